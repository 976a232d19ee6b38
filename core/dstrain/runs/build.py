"""Build a training run: samples, pipeline, trainable parameters, optimizer and
schedule.
"""

from typing import Any

from torch.optim import AdamW
from transformers import get_scheduler

from dstrain.cache.store import FeatureCache
from dstrain.distributed.world import ProcessGroup
from dstrain.errors import UsageError
from dstrain.lora.reader import check_lora_file
from dstrain.models.checkpointing import enable_checkpointing
from dstrain.pipeline.pipeline import Pipeline
from dstrain.runs.checkpoints.initial_weights import start_weights
from dstrain.runs.feature_plan import check_configs, open_plan
from dstrain.runs.job import TrainingData, TrainingRun
from dstrain.runs.setup import Setup
from dstrain.training.loader import Rows, StoredRows
from dstrain.training.module import TrainingModule
from dstrain.training.order import Order, row_starts, with_excluded_rows
from dstrain.training.trainables import start_from_lora


def open_training_data(setup: Setup, processes: ProcessGroup) -> TrainingData:
    """Open the samples: the data set's rows, or in stage 2 the feature store's."""
    if setup.stage == "train":
        store = FeatureCache.open(setup.cache_path)
        plan = open_plan(setup, store)
        lines = [
            (int(line["group"]), (int(line["row"]), int(line["chunk"])))
            for line in plan.rows
        ]
        groups, places = (
            tuple(group for group, _ in lines),
            tuple(place for _, place in lines),
        )
        stored = StoredRows(store, plan.rows, plan.presence, row_starts(places))
        groups, places = with_excluded_rows(
            groups, places, plan.about["data set"]["rows"]
        )
        return TrainingData(
            stored, groups, places, frozenset(plan.presence), plan.about
        )
    rows, places = setup.dataset.rows, setup.dataset.sample_ids
    reads = {
        inputs: setup.plan(inputs).used_inputs
        for inputs in {frozenset(cells) for cells in rows}
    }
    numbers: dict[Any, int] = {}
    groups = tuple(
        numbers.setdefault(setup.dataset.signature(number), len(numbers))
        for number in range(len(rows))
    )
    source = Rows(rows, reads, row_starts(places), setup.dataset.damage)
    return TrainingData(
        source,
        *with_excluded_rows(groups, places, len(setup.dataset.table.rows)),
        frozenset(reads),
        None,
    )


def prepare(
    setup: Setup,
    processes: ProcessGroup,
    samples: TrainingData,
    module_class: type[TrainingModule],
) -> TrainingRun:
    """Load what the stage needs, make it trainable, and build order, optimizer and
    schedule.
    """
    config = setup.config
    plans = [setup.plan(inputs) for inputs in sorted(samples.presence, key=sorted)]
    components = dict.fromkeys(
        name for plan in plans for name in plan.components[setup.stage]
    )
    config_only = dict.fromkeys(
        name for plan in plans for name in plan.configs[setup.stage]
    )
    found = setup.find(components, config_only)
    if samples.about is not None:
        check_configs(samples.about, found)
    live = {
        name
        for plan in plans
        for step in plan.train_steps
        for name in step.unit.components
    }
    # Units run without autocast, so one in which a part is trained in fp32 is in fp32
    # as a whole.
    parts = [name.partition(".") for name in setup.trainables.full]
    full = [component for component, _, part in parts if not part or component in live]
    starts = start_weights(setup, found)
    check_lora_file(config.lora_checkpoint)
    placed = starts.in_place(found)
    pipeline = Pipeline.from_found(
        setup.family, setup.spec, placed, setup.device, setup.dtype, full
    )
    pipeline.autocast = setup.dtype if setup.mixed_precision != "no" else None
    module = module_class(pipeline, setup.task, setup.timestep_sampler, setup.stage)
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
        processes.size * config.batch_size * config.gradient_accumulation_steps,
        config.seed,
        samples.places,
    )
    steps = total_steps(config, order.steps)
    optimizer = AdamW(
        module.trained_parameters,
        config.learning_rate,
        weight_decay=config.weight_decay,
        fused=True,
    )
    scheduler = get_scheduler(
        config.lr_scheduler, optimizer, config.lr_warmup_steps, steps
    )
    model, wrapped = processes.accelerator.prepare(module, optimizer)
    # Unwrapped: without loss scaling the wrapper adds nothing but a search for packages
    # at every step.
    return TrainingRun(
        *(
            setup,
            processes,
            module,
            model,
            wrapped.optimizer,
            scheduler,
            order,
            samples.source,
            found,
            steps,
        ),
        samples.about,
    )


def checkpointed(module: TrainingModule, offload: bool) -> None:
    """Switch gradient checkpointing on in every network of a training step that can;
    one that is trained must.
    """
    for name, network in module.networks.items():
        try:
            enable_checkpointing(name, network, offload)
        except UsageError:
            if name in module.trained.components:
                raise


def total_steps(config: Any, per_epoch: int) -> int:
    """Optimizer steps of the run: --num_epochs (1 if neither is given) or --max_steps,
    the smaller of both.
    """
    epochs = (
        config.num_epochs
        if config.num_epochs is not None
        else (None if config.max_steps else 1)
    )
    limits = [epochs * per_epoch] if epochs is not None else []
    return min(limits + ([config.max_steps] if config.max_steps else []))
