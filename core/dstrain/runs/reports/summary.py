"""What a run prints at its start and at its end."""

import shlex
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.console import clock, get_logger
from dstrain.graph.inputs import Column
from dstrain.graph.plan import make_plan
from dstrain.graph.spec import PipelineSpec
from dstrain.pipeline.sampling import generate_task
from dstrain.runs.checkpoints.directory import PREVIEWS
from dstrain.runs.setup import Setup
from dstrain.training.loader import CachedSamples, DecodedSamples
from dstrain.training.order import EXCLUDED

if TYPE_CHECKING:
    from dstrain.runs.job import TrainingRun

logger = get_logger(__name__)


SIZES_SHOWN = 3
LOSSES_AVERAGED = 20
LATENT_AXES = 4
"""Of stored values, those with so many axes or more have a size worth telling: latents,
not texts.
"""


def log_start(run: "TrainingRun", folder: Path) -> None:
    """Say what is trained on what, for how long, and where it goes."""
    module, setup, config = run.module, run.setup, run.setup.config
    count = sum(parameter.numel() for parameter in module.trained_parameters)
    total = sum(parameter.numel() for parameter in module.networks.parameters())
    logger.info(
        f"device {setup.device}, mixed precision {setup.mixed_precision}, {run.processes.size} process(es)"
    )
    logger.info(
        f"trains {', '.join(module.trained.components)}: {count:,} parameters, {count / total:.1%} of those in a step"
    )
    for component, matched_modules in module.trained.matched_modules.items():
        logger.info(
            f"LoRA on {component}: "
            + ", ".join(
                f"{pattern} x{number}" for pattern, number in matched_modules.items()
            )
        )
    if module.trained.unused_parameters:
        logger.info(
            f"frozen, since no loss reaches them: {len(module.trained.unused_parameters)} parameters"
        )
    limit = "--max_steps" if run.total_steps == config.max_steps else "--num_epochs"
    limit = (
        f", as {limit} says, the smaller of both"
        if config.max_steps and config.num_epochs
        else ""
    )
    logger.info(
        f"{describe_samples(run)} x {run.order.repeat}, {run.order.steps_per_epoch} steps an epoch; "
        f"runs to step {run.total_steps}, {run.total_steps / run.order.steps_per_epoch:.4g} epochs{limit}"
    )
    sizes = ", ".join(f"{number} of {size}" for size, number in frequent_sizes(run))
    if sizes:
        logger.info(f"sizes: {sizes}")
    warmup = (
        f" after {config.lr_warmup_steps} steps of warm-up"
        if config.lr_warmup_steps
        else ""
    )
    size = f"{run.processes.size} process(es) x {config.batch_size}"
    accumulated = f"{config.gradient_accumulation_steps} accumulated"
    rate = f"{config.learning_rate:g}, {config.lr_scheduler}{warmup}"
    logger.info(
        f"batch: {size} x {accumulated} = {run.order.samples_per_step} samples a step; "
        f"learning rate {rate}; seed {config.seed}"
    )
    if config.preview_prompt:
        every = (
            f"every {config.preview_steps} steps"
            if config.preview_steps
            else "with each save"
        )
        logger.info(
            f"previews of {len(config.preview_prompt)} prompt(s) at the start and {every}, in {folder / PREVIEWS}"
        )
    logger.info(f"writes {folder}")


def describe_samples(run: "TrainingRun") -> str:
    """Say how many rows there are, and how many samples if it is not one each."""
    places = (
        zip(run.order.groups, run.order.sample_ids, strict=True)
        if run.order.sample_ids
        else ()
    )
    rows = (
        len({row for group, (row, _) in places if group != EXCLUDED})
        or run.order.sample_count
    )
    return (
        f"{rows} rows"
        if rows == run.order.sample_count
        else f"{rows} rows ({run.order.sample_count} samples)"
    )


def frequent_sizes(run: "TrainingRun") -> list[tuple[str, int]]:
    """Return the most frequent sizes of samples with their counts; in stage 2 of
    latents.
    """
    groups = [group for group in run.order.groups if group != EXCLUDED]
    first = {
        group: len(groups) - 1 - place for place, group in enumerate(reversed(groups))
    }
    told: Counter[str] = Counter()
    for group, number in Counter(groups).items():
        told[", ".join(_sizes(run, first[group]))] += number
    return [(size, number) for size, number in told.most_common(SIZES_SHOWN) if size]


def _sizes(run: "TrainingRun", sample: int) -> Iterator[str]:
    """Yield the sizes of a sample's images and videos, or of its stored latents."""
    source: Any = run.source
    if isinstance(source, DecodedSamples):
        for name, cell in source.rows[sample].items():
            yield from (
                f"{name} {' x '.join(map(str, shape))}" for shape in cell.shapes
            )
    elif isinstance(source, CachedSamples):
        for name, form in source.rows[sample]["values"].items():
            shape = form.get("shapes", ())
            if len(shape) >= LATENT_AXES and all(
                isinstance(axis, int) for axis in shape
            ):
                yield f"{name} {' x '.join(map(str, shape))}"


@dataclass
class RunStatistics:
    """What a run's end says of its steps: how many, in what time, with which losses."""

    start: float = field(default_factory=time.monotonic)
    steps: int = 0
    seconds_per_sample: float = 0.0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES_AVERAGED))

    def add(self, numbers: Mapping[str, float]) -> None:
        """Count one optimizer step, by its numbers as they are logged."""
        self.steps += 1
        self.seconds_per_sample += 1 / numbers["samples_per_second"]
        self.losses.append(numbers["loss"])

    def summary(self, memory: float) -> str:
        """Summarize the steps in one line.

        `memory` is the peak in GiB. samples/s is that of the steps, without saves.
        """
        took = clock(time.monotonic() - self.start)
        rate = self.steps / self.seconds_per_sample
        loss = sum(self.losses) / len(self.losses)
        last = f"mean of the last {len(self.losses)} steps"
        return (
            f"{self.steps} steps in {took}, {rate:.2f} samples/s, loss {loss:.4g} ({last}), "
            f"peak memory {memory:.2f} GiB"
        )


def log_end(run: "TrainingRun", folder: Path, weights: Sequence[Path]) -> None:
    """Log where the weights are and the command that tries them."""
    if weights:
        logger.info("weights: " + ", ".join(map(str, weights)))
        logger.info(f"try them: {generate_command(run.setup, folder)}")
    else:
        logger.info(
            f"nothing left to do: {folder} is at step {run.step} of {run.total_steps}"
        )


def generate_command(setup: Setup, folder: Path) -> str:
    """Return the command that generates with the run's newest weights."""
    words = ["dstrain", "generate", "--run", str(folder)]
    if setup.task.runs_sampler:
        # A number of steps without guidance is what was trained.
        words += ["--num_inference_steps", "...", "--guidance_scale", "1"]
    for name in input_files(setup.spec):
        words += ["--input", f"{name}=FILE"]
    output = "video.mp4" if setup.spec.makes_video else "image.png"
    return shlex.join([*words, "--prompt", "...", "--output", output])


def input_files(spec: PipelineSpec) -> list[str]:
    """Return the inputs of inference that are images or videos."""
    task = generate_task(spec, guided=False)
    used = make_plan(spec, frozenset(spec.inputs), task).used_inputs
    return [
        name
        for name, source in spec.inputs.items()
        if isinstance(source, Column) and source.is_file and name in used
    ]
