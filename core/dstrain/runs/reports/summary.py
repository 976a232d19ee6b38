"""What a run prints at its start and at its end."""

import json
import shlex
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.console import clock, get_logger
from dstrain.errors import DstrainError, StateError
from dstrain.graph.inputs import Column
from dstrain.graph.plan import make_plan
from dstrain.graph.spec import PipelineSpec
from dstrain.models.components import Component
from dstrain.models.locate import Found, ModelConfig, assign, place_of
from dstrain.pipeline.sampling import generate_task
from dstrain.runs.checkpoints.directory import PREVIEWS
from dstrain.runs.setup import Setup
from dstrain.training.loader import CachedSamples, DecodedSamples
from dstrain.training.order import EXCLUDED

if TYPE_CHECKING:
    from dstrain.runs.job import TrainingRun

logger = get_logger(__name__)


GROUPS_TOLD = 3
LOSSES_TOLD = 20
LATENT_AXES = 4
"""Of stored values, those with so many axes or more have a size worth telling: latents,
not texts.
"""


def announce(run: "TrainingRun", folder: Path) -> None:
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
        f"{samples_told(run)} x {run.order.repeat}, {run.order.steps_per_epoch} steps an epoch; "
        f"runs to step {run.total_steps}, {run.total_steps / run.order.steps_per_epoch:.4g} epochs{limit}"
    )
    sizes = ", ".join(f"{number} of {size}" for size, number in groups_told(run))
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


def samples_told(run: "TrainingRun") -> str:
    """How many rows are drawn from, and how many samples these give where it is not one
    each.
    """
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


def groups_told(run: "TrainingRun") -> list[tuple[str, int]]:
    """The sizes that most samples have, each with how many have it; those of what is
    stored, in stage 2.
    """
    groups = [group for group in run.order.groups if group != EXCLUDED]
    first = {
        group: len(groups) - 1 - place for place, group in enumerate(reversed(groups))
    }
    told: Counter[str] = Counter()
    for group, number in Counter(groups).items():
        told[", ".join(_sizes(run, first[group]))] += number
    return [(size, number) for size, number in told.most_common(GROUPS_TOLD) if size]


def _sizes(run: "TrainingRun", sample: int) -> Iterator[str]:
    """The sizes of a sample's pictures and videos, or of its stored latents."""
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
class Tally:
    """What a run's end says of its steps: how many, in what time, with which losses."""

    start: float = field(default_factory=time.monotonic)
    steps: int = 0
    seconds_per_sample: float = 0.0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES_TOLD))

    def add(self, numbers: Mapping[str, float]) -> None:
        """Count one optimizer step, by its numbers as they are logged."""
        self.steps += 1
        self.seconds_per_sample += 1 / numbers["samples_per_second"]
        self.losses.append(numbers["loss"])

    def told(self, memory: float) -> str:
        """One line; memory: the most that was in use, in GiB. samples/s is that of the
        steps, without what is saved.
        """
        took = clock(time.monotonic() - self.start)
        rate = self.steps / self.seconds_per_sample
        loss = sum(self.losses) / len(self.losses)
        last = f"mean of the last {len(self.losses)} steps"
        return (
            f"{self.steps} steps in {took}, {rate:.2f} samples/s, loss {loss:.4g} ({last}), "
            f"peak memory {memory:.2f} GiB"
        )


def conclude(run: "TrainingRun", folder: Path, weights: Sequence[Path]) -> None:
    """Say where the weights are and how to try them."""
    if not weights:
        logger.info(
            f"nothing left to do: {folder} is at step {run.step} of {run.total_steps}"
        )
        return
    logger.info("weights: " + ", ".join(str(path) for path in weights))
    by_component = dict(zip(run.module.trained.components, weights, strict=True))
    loras = {
        name: path
        for name, path in by_component.items()
        if name in run.module.trained.lora
    }
    full = {name: path for name, path in by_component.items() if name not in loras}
    preset = run.setup.preset
    if (
        preset is not None and preset.component not in full
    ):  # trained in full, the weights have it in them
        loras = {"preset": preset.path, **loras}
    logger.info("try them: " + generate_command(run.setup, run.found, full, loras))


def files_needed(spec: PipelineSpec) -> tuple[str, ...]:
    """The inputs of inference that are pictures or videos."""
    used = make_plan(
        spec, frozenset(spec.inputs), generate_task(spec, guided=False)
    ).used_inputs
    files = (
        name
        for name, source in spec.inputs.items()
        if isinstance(source, Column) and source.is_file
    )
    return tuple(name for name in files if name in used)


def generate_command(
    setup: Setup, found: Found, full: Mapping[str, Path], loras: Mapping[str, Path]
) -> str:
    """The command that tries trained weights: those of `full` in the place of the files
    they were loaded from.
    """
    toy = setup.config.toy
    replaced = {path for name in full for path in found.files[name].paths}
    others = (
        []
        if toy
        else [config for config in setup.models if not replaced & set(_paths(config))]
    )
    held = _held(others, setup, found)
    # Where only their order tells two experts apart, it is that of the components.
    order = [component.name for component in setup.family.load("components")]
    paths: list[tuple[int, Any]] = [
        (order.index(name), str(path)) for name, path in full.items()
    ]
    for config, names in zip(others, held, strict=True):
        if config.path and not config.component:
            path = (
                config.path
                if isinstance(config.path, str) or len(config.path) > 1
                else config.path[0]
            )
            paths.append((min(map(order.index, names), default=len(order)), path))
    words = [
        "dstrain",
        "generate",
        "--model",
        setup.spec.family,
        "--variant",
        setup.spec.variant,
    ]
    given = [path for _, path in sorted(paths, key=itemgetter(0))]
    words += ["--model_paths", json.dumps(given)] if given else ["--toy"] if toy else []
    ids = [
        f"{config.source.named}:{config.pattern}" for config in others if config.source
    ]
    words += ["--model_id_with_origin_paths", ",".join(ids)] if ids else []
    words += (
        ["--hub", setup.config.hub] if ids and setup.config.hub != "modelscope" else []
    )
    bare = {option.name for option in setup.family.options if option.is_flag}
    saving = {option.name for option in setup.family.options if option.saves}
    for name, value in (
        (n, v) for n, v in setup.config.family_options.items() if n not in saving
    ):
        words += [f"--{name}"] if name in bare else [f"--{name}", value]
    for lora in loras.values():
        words += ["--lora", str(lora)]
    if (
        setup.task.runs_sampler
    ):  # what was trained is a number of steps, without guidance
        words += ["--num_inference_steps", "...", "--guidance_scale", "1"]
    for name in files_needed(setup.spec):
        words += ["--input", f"{name}=FILE"]
    output = "video.mp4" if setup.spec.makes_video else "picture.png"
    lacking = _lacking(setup, {*full, *chain(*held)}) if given or not toy else ()
    advice = (
        f" (add the model files of the other components: {', '.join(lacking)})"
        if lacking
        else ""
    )
    return shlex.join([*words, "--prompt", "...", "--output", output]) + advice


def _held(
    configs: Sequence[ModelConfig], setup: Setup, found: Found
) -> list[tuple[str, ...]]:
    """The components in each of these sets of files; of files that are not here, what
    their place says.
    """
    known: Sequence[Component] = setup.family.load("components")
    files = dict(found.files)
    here = [replace(config, hub=None) for config in setup.models if _paths(config)]
    with suppress(
        DstrainError
    ):  # files that the run had no use for, and that do not fit: inference will say so
        files = {
            **assign(here, known, [component.name for component in known]),
            **files,
        }
    held = []
    for config in configs:
        paths = set(_paths(config))
        place = place_of(config, known)
        names = tuple(name for name, own in files.items() if paths & set(own.paths))
        held.append(names or ((place,) if place and not paths else ()))
    return held


def _lacking(setup: Setup, held: Collection[str]) -> tuple[str, ...]:
    """The components with weights that inference loads and that are not held."""
    known: Sequence[Component] = setup.family.load("components")
    loaded = make_plan(
        setup.spec,
        frozenset(setup.spec.inputs),
        generate_task(setup.spec, guided=True),
    ).components[""]
    weights = {component.name for component in known if not component.is_folder}
    return tuple(name for name in loaded if name in weights - set(held))


def _paths(config: ModelConfig) -> tuple[Path, ...]:
    try:
        return config.files().paths
    except StateError:
        return ()
