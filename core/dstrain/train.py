"""Training, in one piece or as stage 2: the loop, and what it is made of."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from dstrain.bad_samples import read_samples
from dstrain.errors import Diverged, OutOfMemory, UsageError
from dstrain.gradient import enable_checkpointing
from dstrain.interrupt import asked_to_stop
from dstrain.loading import load_pipeline, start_from_lora
from dstrain.lora_files import check_lora_file
from dstrain.memory import LOAD_ADVICE, explained, is_out_of_memory, peak_memory
from dstrain.model_files import Found
from dstrain.module import Batch, TrainingModule
from dstrain.order import MicroBatch, Order, deal, first_samples, with_gaps
from dstrain.outputs import Outputs
from dstrain.previews import Previews, open_previews
from dstrain.progress import Progress
from dstrain.samples import Rows, Source, StoredRows, load_batches
from dstrain.setup import Setup, warn
from dstrain.start_weights import start_weights
from dstrain.steplog import StepLog
from dstrain.store import FeatureStore
from dstrain.stored_plan import check_configs, open_plan
from dstrain.summary import Tally
from dstrain.world import World


@dataclass(frozen=True)
class Feed:
    """The samples of a run: `groups` numbers the signature of each, `places` has its row and chunk.

    Rows that are left out have a place and no sample, as `order.with_gaps` makes them.
    """

    source: Source
    groups: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    presence: frozenset[frozenset[str]]
    about: Any


@dataclass
class Job:
    """Everything a training loop holds."""

    setup: Setup
    world: World
    module: TrainingModule
    model: Any
    optimizer: Optimizer
    scheduler: LRScheduler
    order: Order
    source: Source
    found: Found
    steps: int
    about: Any
    step: int = 0

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self.scheduler.get_last_lr()[0])


def train(setup: Setup, world: World, module_class: type[TrainingModule] = TrainingModule) -> None:
    """Train and save; every number that is logged is the mean over a whole optimizer step and all processes."""
    outputs = Outputs(setup, world)
    outputs.refuse_unfit()
    if setup.stage != "train":
        read_samples(setup, world)
    warn(setup, world)
    with outputs.opened():
        samples = feed(setup, world)
        previews = open_previews(setup, samples)
        with explained("loading", *LOAD_ADVICE):
            job = prepare(setup, world, samples, module_class)
            previews.load(job)
        outputs.begin(job)
        run_steps(job, outputs, previews)
        outputs.end(job)


def run_steps(job: Job, outputs: Outputs, previews: Previews) -> None:
    """The training loop: from where the job stands, which may lack previews, to its last step."""
    bar, tally = Progress("train", job.steps, job.step, job.world.is_main), Tally()
    log = StepLog(outputs.folder, job.setup.extensions, job.world.is_main)
    with log.opened(job.step), bar as progress, asked_to_stop() as asked:
        previews.make_if_due(job, True, asked)
        for numbers in outputs.watched(steps(job)):
            log.add(numbers)
            tally.add(numbers)
            progress.step(
                f"loss {numbers['loss']:.4f} lr {numbers['learning_rate']:.2e} "
                f"{numbers['samples_per_second']:.2f} samples/s"
            )
            saved = outputs.save_if_due(job, int(numbers["epoch"]))
            previews.make_if_due(job, saved, asked)
            if job.world.any(asked()) and job.step < job.steps:
                outputs.stop(job, saved)
    if tally.steps:
        job.world.say(tally.told(peak_memory()))


def steps(job: Job) -> Iterator[dict[str, float]]:
    """Make the run's optimizer steps one by one; yields the numbers of each, as they are logged."""
    waiting = time.perf_counter()
    for epoch, batches in optimizer_steps(job):
        start = time.perf_counter()
        learning_rate = job.learning_rate
        try:
            loss, norm = update(job, batches)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(job, batches) from error
        job.step += 1
        end = time.perf_counter()
        yield {
            "step": job.step, "epoch": epoch, "loss": loss, "learning_rate": learning_rate, "grad_norm": norm,
            "samples_per_second": batches[0].micro.total / (end - waiting), "data_wait_seconds": start - waiting,
        }  # fmt: skip
        waiting = time.perf_counter()


def out_of_memory(job: Job, batches: Sequence[Batch]) -> OutOfMemory:
    """What did not fit: the shapes of the largest micro-batch's first sample, the peak, and the flags that lower it."""
    largest = max(batches, key=lambda batch: len(batch.samples))
    values = largest.samples[0].values
    shapes = [f"{name} {list(value.shape)}" for name, value in values.items() if isinstance(value, torch.Tensor)]
    row = place(job, largest.micro.keys[0].row)
    return OutOfMemory(
        f"step {job.step + 1}",
        f"out of memory at {peak_memory():.1f} GiB with {len(largest.samples)} samples like {row}",
        f"values: {', '.join(shapes or values)}",
        "lower --batch_size (and raise --gradient_accumulation_steps), --max_pixels or --lora_rank",
        "or give --use_gradient_checkpointing, --use_gradient_checkpointing_offload",
    )


def update(job: Job, batches: Sequence[Batch]) -> tuple[float, float]:
    """One optimizer step over a global batch; returns its mean loss and the norm of its gradient before clipping."""
    accelerator = job.world.accelerator
    losses = []
    for batch in batches:
        with nullcontext() if batch.micro.last else accelerator.no_sync(job.model):
            loss = job.model(batch)
            # DDP averages gradients over processes, and each loss is already a share of the global mean.
            loss.backward(torch.full_like(loss, job.world.size))
        losses.append(loss.detach())
    if job.step == 0:
        warn_without_gradient(job)
    norm = torch.nn.utils.clip_grad_norm_(job.module.trained_parameters, job.setup.config.max_grad_norm)
    loss_value, norm_value = torch.stack([job.world.total(torch.stack(losses).sum()), norm]).tolist()
    if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
        raise diverged(job, batches, loss_value, norm_value)
    job.optimizer.step()
    job.scheduler.step()
    job.optimizer.zero_grad(set_to_none=True)
    return loss_value, norm_value


def diverged(job: Job, batches: Sequence[Batch], loss: float, norm: float) -> Diverged:
    """What is said of a step whose loss or gradient is no finite number: its samples may be why, or the settings."""
    keys = (key for batch in batches if any(batch.micro.weights) for key in batch.micro.keys)
    named = ", ".join(dict.fromkeys(place(job, key.row) for key in keys))
    more = f" and those of {job.world.size - 1} other processes" if job.world.size > 1 else ""
    return Diverged(
        f"step {job.step + 1}",
        f"loss {loss}, gradient norm {norm}; the weights are untouched",
        f"look at the samples of this step: {named}{more}",
        "or begin again from that checkpoint's weights with a lower --learning_rate or --max_grad_norm",
    )


def place(job: Job, row: int) -> str:
    """Name a row of the data set; stage 2 has no table to name a line of."""
    return f"row {row} (from 0)" if job.setup.stage else job.setup.dataset.table.where(row)


def warn_without_gradient(job: Job) -> None:
    """Name the trained parameters that the first loss did not reach."""
    names = [name for name, parameter in job.module.trained.parameters.items() if parameter.grad is None]
    if names:
        job.world.warn(f"no gradient reaches {len(names)} parameters: {', '.join(names[:3])}, ...")


def optimizer_steps(job: Job) -> Iterator[tuple[int, list[Batch]]]:
    """Yield (epoch, micro-batches of one optimizer step) from where the job stands to its last step."""
    per_epoch = job.order.steps
    while job.step < job.steps:
        epoch, done = divmod(job.step, per_epoch)
        batches: list[Batch] = []
        for batch in load_batches(
            job.source, partial(micro_batches, job, epoch, done), job.setup.config.dataset_num_workers
        ):
            batches.append(batch)
            if batch.micro.last:
                yield epoch, batches
                batches = []


def micro_batches(job: Job, epoch: int, done: int) -> Iterable[MicroBatch]:
    """This process's micro-batches of an epoch, without the steps already done or beyond the last."""
    left = job.steps - job.step
    for samples in islice(job.order.global_batches(epoch), done, done + left):
        yield from deal(samples, job.setup.config.batch_size, job.world.rank, job.world.size)


def feed(setup: Setup, world: World) -> Feed:
    """Open the samples: the data set's rows, or in stage 2 the feature store's."""
    if setup.stage == "train":
        store = FeatureStore.open(setup.store_path)
        plan = open_plan(setup, store)
        lines = [(int(line["group"]), (int(line["row"]), int(line["chunk"]))) for line in plan.rows]
        groups, places = tuple(group for group, _ in lines), tuple(place for _, place in lines)
        stored = StoredRows(store, plan.rows, plan.presence, first_samples(places))
        groups, places = with_gaps(groups, places, plan.about["data set"]["rows"])
        return Feed(stored, groups, places, frozenset(plan.presence), plan.about)
    rows, places = setup.dataset.rows, setup.dataset.places
    reads = {inputs: setup.plan(inputs).used_inputs for inputs in {frozenset(cells) for cells in rows}}
    numbers: dict[Any, int] = {}
    groups = tuple(numbers.setdefault(setup.dataset.signature(number), len(numbers)) for number in range(len(rows)))
    source = Rows(rows, reads, first_samples(places), setup.dataset.damage)
    return Feed(source, *with_gaps(groups, places, len(setup.dataset.table.rows)), frozenset(reads), None)


def prepare(setup: Setup, world: World, samples: Feed, module_class: type[TrainingModule]) -> Job:
    """Load what the stage needs, make it trainable, and build order, optimizer and schedule."""
    config = setup.config
    plans = [setup.plan(inputs) for inputs in sorted(samples.presence, key=sorted)]
    components = dict.fromkeys(name for plan in plans for name in plan.components[setup.stage])
    bare = dict.fromkeys(name for plan in plans for name in plan.configs[setup.stage])
    found = setup.find(components, bare)
    if samples.about is not None:
        check_configs(samples.about, found)
    live = {name for plan in plans for step in plan.live for name in step.unit.borrows}
    # Units run without autocast, so one in which a part is trained in fp32 is in fp32 as a whole.
    parts = [name.partition(".") for name in setup.trainables.full]
    full = [component for component, _, part in parts if not part or component in live]
    starts = start_weights(setup, found)
    check_lora_file(config.lora_checkpoint)
    placed = starts.in_place(found)
    pipeline = load_pipeline(setup.record, setup.wiring, placed, setup.device, setup.dtype, full, world.say)
    pipeline.autocast = setup.dtype if setup.mixed_precision != "no" else None
    module = module_class(pipeline, setup.task, setup.levels, setup.stage)
    module.switch_to_training_mode(setup.trainables, config.seed)
    if config.lora_checkpoint is not None:
        start_from_lora(pipeline, module.trained.lora, config.lora_checkpoint)
    for path in starts.lora.values():
        start_from_lora(pipeline, module.trained.lora, path)
    for plan in plans:
        module.plan(plan.inputs)
    if config.use_gradient_checkpointing or config.use_gradient_checkpointing_offload:
        checkpointed(module, config.use_gradient_checkpointing_offload)
    order = Order(
        samples.groups,
        config.dataset_repeat,
        world.size * config.batch_size * config.gradient_accumulation_steps,
        config.seed,
        samples.places,
    )
    steps = total_steps(config, order.steps)
    optimizer = AdamW(module.trained_parameters, config.learning_rate, weight_decay=config.weight_decay, fused=True)
    scheduler = get_scheduler(config.lr_scheduler, optimizer, config.lr_warmup_steps, steps)
    model, wrapped = world.accelerator.prepare(module, optimizer)
    # Unwrapped: without loss scaling the wrapper adds nothing but a search for packages at every step.
    return Job(
        *(setup, world, module, model, wrapped.optimizer, scheduler, order, samples.source, found, steps),
        samples.about,
    )


def checkpointed(module: TrainingModule, offload: bool) -> None:
    """Switch gradient checkpointing on in every network of a training step that can; one that is trained must."""
    for name, network in module.networks.items():
        try:
            enable_checkpointing(name, network, offload)
        except UsageError:
            if name in module.trained.components:
                raise


def total_steps(config: Any, per_epoch: int) -> int:
    """Optimizer steps of the run: --num_epochs (1 if neither is given) or --max_steps, the smaller of both."""
    epochs = config.num_epochs if config.num_epochs is not None else (None if config.max_steps else 1)
    limits = [epochs * per_epoch] if epochs is not None else []
    return min(limits + ([config.max_steps] if config.max_steps else []))
