"""Resume exactly: what a state contains, and what must be equal to resume from it."""

import math
import os
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.config.fields import split_commas
from dstrain.config.learning_rates import parse_learning_rates
from dstrain.config.options.optimizer import ENDING_AT_LAST_STEP
from dstrain.config.options.train import (
    options_affecting,
    recorded_values,
)
from dstrain.config.serialize import (
    NEW_START,
    as_flags,
    command_line,
    read_resolved,
)
from dstrain.console import get_logger, number_of
from dstrain.data.forms.naming import parse_columns
from dstrain.errors import StateError, UsageError
from dstrain.graph.inputs import MaskColumn
from dstrain.models.device import precision
from dstrain.pipeline.loss_masks import MASK
from dstrain.pipeline.tile_choice import tiles_of
from dstrain.runs.checkpoints.state import TrainingState
from dstrain.runs.checkpoints.state_folders import states
from dstrain.runs.datasets.changed import written_since
from dstrain.runs.datasets.masks import other_masks
from dstrain.runs.datasets.own_options import (
    differing_options,
    other_options,
    with_recorded,
)
from dstrain.runs.datasets.sources import source_here
from dstrain.runs.setup import Setup
from dstrain.runs.training_run import PlannedTraining, TrainingData, TrainingRun
from dstrain.storage.files import unused_name
from dstrain.storage.hashing import hash_json
from dstrain.storage.run_files import RunFiles
from dstrain.training.batching import Position
from dstrain.training.loader import CachedSamples
from dstrain.training.optimizers.names import named
from dstrain.training.sharded_networks import read_own_rows

logger = get_logger(__name__)

OF_PARAMETER = re.compile(r"optimizer/state/(\d+)/")
"""Names of an optimizer's tensors that belong to its parameter of this number."""
PROCESSES = "processes"
"""Entry of the versions in a run's configuration: how many processes trained."""
SAMPLES = "samples of a step"
OF_SAMPLES = ("batch_size", "gradient_accumulation_steps", PROCESSES)
"""What the samples of a step are the product of."""
MODIFIERS = "plugins that change steps"
"""Entry of these versions: what `modifiers_in_words` returns."""
NO_MODIFIERS = "none"
ROWS = "rows"
"""End of the entries of `data_fingerprint` that are no digests."""
ANEW = (
    "or start over with another --output_path, or with --overwrite in place of --resume"
)
AnyRun = TrainingRun | PlannedTraining
NO_FLAG = "no flag differs: other rows are skipped or have other sizes, or the model is another"
OF_TRAINED_WEIGHTS = frozenset(
    {
        "model",
        "lokr_factor",
        "lora_alpha",
        "lora_base_model",
        "lora_rank",
        "lora_target_modules",
        "lora_type",
        "trainable_models",
    }
)
"""Options that say which weights are trained, and of which shapes."""
STANDS_FOR = MappingProxyType(
    {
        "lr_scheduler_num_cycles": 1,
        "lr_scheduler_power": 1.0,
        "loraplus_lr_ratio": 1.0,
        "trainable_dtype": "fp32",
    }
)
"""Options of the optimizer -> the value of a run without them."""


def data_fingerprint(run: TrainingRun) -> dict[str, str]:
    """Return digests of the data: the metadata's bytes, and the sizes of the files it
    names.

    Sizes, because reading every image would cost more than it saves. Stage 2 has no
    files; the keys of its cached values say what these were computed from.
    """
    content = _content(run.data)
    if run.validation.data is not run.data:
        second = _content(run.validation.data)
        content |= {f"validation {name}": one for name, one in second.items()}
    return content


def _content(data: TrainingData) -> dict[str, str]:
    if data.cache_info is not None and isinstance(data.source, CachedSamples):
        return {
            "metadata": data.cache_info.dataset["sha256"],
            ROWS: str(data.cache_info.dataset["rows"]),
            "cached values": data.source.rows.values_digest,
        }
    setup = data.setup
    dataset = setup.dataset
    sizes = []
    # The variants of a sample read the same files.
    for first in dataset.first_variants:
        row = dataset.rows[first]
        used = sorted(setup.plan(frozenset(row)).used_inputs)
        files = [file for name in used for file in row[name].files]
        sizes.append([os.path.getsize(file) for file in files])
    return {
        **_rows_of(setup),
        "files (by their sizes)": hash_json("sizes", sizes),
    }


def _rows_of(setup: Setup) -> dict[str, str]:
    return {
        "metadata": setup.dataset_digest,
        ROWS: str(len(setup.checked_dataset.table.rows)),
    }


def rows_fingerprint(setup: Setup) -> dict[str, str]:
    """Return what of `data_fingerprint` is known before stage 1 has computed anything."""
    content = _rows_of(setup)
    if setup.validation is not None:
        second = _rows_of(setup.validation)
        content |= {f"validation {name}": one for name, one in second.items()}
    return content


def modifiers_in_words(setup: Setup) -> str:
    """Return the plugins that change training after each step, with a part of the
    digest of their code.
    """
    words = [f"{name} (code {code[:8]})" for name, code in setup.modifiers.items()]
    return ", ".join(words) or NO_MODIFIERS


def config_digest(run: AnyRun) -> str:
    """Return a digest of all that decides the numbers of a run.

    The split into stages, the number of processes and the place of files are not in it.
    """
    setup = run.setup
    config = setup.config
    ends_at_last_step = config.lr_scheduler in ENDING_AT_LAST_STEP
    columns = (config.extra_inputs, config.data_file_keys)
    numbers: list[Any] = [
        setup.mixed_precision,
        run.total_steps if ends_at_last_step else None,
        {name: constant.value for name, constant in setup.spec.constants.items()},
        [[one.component, dict(one.entries)] for one in setup.models if one.entries],
        [setup.spec.variant, *(sorted(split_commas(names)) for names in columns)],
        {
            **recorded_values(config, "training"),
            "learning_rate": setup.optimizer.rates.plain,
        },
    ]
    optimizer = optimizer_identity(setup)
    if optimizer:
        numbers.append(optimizer)
    if config.compile:
        numbers.append({"compile": True})
    if config.column or config.default_caption is not None:
        numbers.append([parse_columns(config.column), config.default_caption])
    mask = setup.spec.inputs.get(MASK)
    if isinstance(mask, MaskColumn):
        # How much of it counts is one of the constants.
        numbers.append({"masks": [mask.name, mask.mode]})
        others = other_masks(config)
        if others:
            numbers.append({"masks of datasets": others})
    own_options = other_options(config)
    if own_options:
        numbers.append({"options of datasets": own_options})
    if setup.modifiers:
        numbers.append({"modify step": dict(setup.modifiers)})
    if setup.preset is not None:
        numbers.append([*setup.preset.components, setup.preset.digest])
    stored = stored_components(run)
    if stored:
        numbers.append({"kept": stored})
    # Stage 2 does not load what stage 1 encoded with.
    configs = {
        **(run.cache_info.configs if run.cache_info else {}),
        **run.found.configs,
    }
    tiles = tiles_of(setup.tiling, setup.family, configs).items()
    used_tiles = {
        name: one.identity for name, one in tiles if name in run.module.used_components
    }
    if used_tiles:
        numbers.append({"tiles": used_tiles})
    order: list[Any] = [run.order.groups.tolist(), run.order.samples_per_step]
    if run.data.parts:
        order.append([list(part) for part in run.data.parts])
    trainables = setup.trainables.identity
    return hash_json("run", [setup.task.name, trainables, order, numbers])


def stored_components(run: AnyRun) -> dict[str, list[str]]:
    """Return how the components that the run uses are quantized, those that are as they
    are loaded left out: the place of weights changes no number.
    """
    kept = run.setup.kept
    used = sorted(run.module.used_components & kept.keys())
    identities = {name: kept[name].identity for name in used}
    return {name: identity for name, identity in identities.items() if identity}


def optimizer_identity(setup: Setup) -> dict[str, Any]:
    """Return what decides the optimizer's numbers, nothing where that is what states of
    runs before there was a choice have.
    """
    config = setup.config
    found: dict[str, Any] = {}
    if not setup.optimizer.is_default:
        found |= setup.optimizer.identity
    for name, default in STANDS_FOR.items():
        value = getattr(config, name)
        if value not in (None, default):
            found[name] = value
    return found


def training_state(run: TrainingRun, content: Mapping[str, str]) -> TrainingState:
    """Return what a run needs to resume exactly.

    There is no generator state, since every draw is keyed by its place.
    """
    parameters = run.module.trained.parameters
    return TrainingState(
        step=run.step,
        trainable={
            name: value.detach()
            for name, value in {**parameters, **run.module.trained_buffers}.items()
        },
        optimizer=run.optimizer.state_dict(),
        scheduler=run.lr_scheduler.state_dict(),
        config_digest=config_digest(run),
        versions=run.setup.versions,
        content=content,
        average=run.ema.tensors,
        average_facts=run.ema.facts,
        position=asdict(run.position) if run.position else {},
    )


def state_reader(run: TrainingRun) -> Callable[[Path], dict[str, Tensor]] | None:
    """Return how the files of a state are read: where the run is sharded, of each
    tensor the rows that are this process's; None for all of each.
    """
    if not run.is_sharded:
        return None
    trained = run.module.trained.parameters
    groups = run.optimizer.param_groups
    numbered = [parameter for group in groups for parameter in group["params"]]

    def owner_of(name: str) -> nn.Parameter | None:
        found = OF_PARAMETER.match(name)
        return numbered[int(found[1])] if found else trained.get(name)

    return lambda path: read_own_rows(path, owner_of)


def refuse_other_run(
    run: AnyRun,
    saved_digest: str,
    saved_content: Mapping[str, str],
    content: Mapping[str, str],
) -> None:
    """Raise StateError if a saved state is of another run, or of another dataset.

    Args:
        run: The run that would resume.
        saved_digest: The `config_digest` of the saved run.
        saved_content: Its `data_fingerprint`.
        content: That of this run, or a part of it.
    """
    changed = [
        name
        for name in content
        if saved_content.get(name, content[name]) != content[name]
    ]
    is_other = saved_digest != config_digest(run)
    differing = _differing(run) if is_other else {}
    if differing or (is_other and not changed):
        # A new run cannot start from weights of other shapes.
        has_same_weights = not differing.keys() & OF_TRAINED_WEIGHTS
        raise StateError(
            "--resume",
            "the saved run had different settings that affect the result",
            "; ".join(differing.values()) or NO_FLAG,
            *(["resume with those that were saved"] if differing else []),
            *(_new_run(run) if has_same_weights else ()),
            ANEW,
        )
    if changed:
        what = _dataset_changed(run, changed, saved_content, content)
        advice = "to resume, put the dataset back as it was"
        raise StateError("--resume", what, advice, *_new_run(run), ANEW)


def _dataset_changed(
    run: AnyRun,
    changed: Sequence[str],
    saved: Mapping[str, str],
    content: Mapping[str, str],
) -> str:
    """Say what of the dataset has changed: rows, files, or values."""
    names = [name for name in changed if not name.endswith(ROWS)]
    words = [f"its {' and its '.join(names)}"]
    for name in changed:
        if name.endswith(ROWS):
            second = name.removesuffix(ROWS)
            words.append(f"{saved[name]} {second}rows then, {content[name]} now")
    output = run.setup.output
    kept = states(output)
    if kept:
        datasets = run.setup.datasets
        found = [written_since(source_here(one.config), kept[0]) for one in datasets]
        words += filter(None, found)
    return f"the dataset has changed since the saved run read it: {'; '.join(words)}"


@torch.no_grad()
def load_training_state(
    run: TrainingRun,
    state: TrainingState,
    content: Mapping[str, str],
) -> None:
    """Put a saved state back, bit for bit; raises StateError if it is of another run,
    or of another dataset.
    """
    refuse_other_run(run, state.config_digest, state.content, content)
    parameters = run.module.trained.parameters
    buffers = run.module.trained_buffers
    saved = {
        name: list(tensor.shape)
        for name, tensor in state.trainable.items()
        if name not in buffers
    }
    own = {name: list(parameter.shape) for name, parameter in parameters.items()}
    other_shapes = [
        f"{name}: saved {saved.get(name)}, this run {own.get(name)}"
        for name in saved | own
        if saved.get(name) != own.get(name)
    ]
    if other_shapes:
        count = number_of(len(other_shapes), "parameter")
        what = f"the saved run trains {count} of another shape"
        raise StateError("--resume", what, "; ".join(other_shapes[:3]))
    for name, parameter in parameters.items():
        parameter.copy_(state.trainable[name])
    for name, buffer in buffers.items():
        # States of networks that had none lack it.
        if name in state.trainable:
            buffer.copy_(state.trainable[name])
    run.optimizer.load_state_dict(state.optimizer)
    run.lr_scheduler.load_state_dict(state.scheduler)
    _load_average(run, state)
    run.step = state.step
    if state.position:
        run.passed = deque([Position(**state.position)])


def _load_average(run: TrainingRun, state: TrainingState) -> None:
    """Continue the average of the saved run; where it kept none, begin one with the
    weights of the state.
    """
    averaged = run.ema
    if not state.average_facts:
        averaged.restart()
        return
    decay = float(state.average_facts["decay"])
    if not averaged:
        logger.info(f"without --ema_decay {decay:g}, the average of the run ends here")
        return
    if decay != averaged.decay:
        raise StateError(
            "--resume",
            f"--ema_decay: saved {decay:g}, this run {averaged.decay:g}",
            "give it as saved; without it the run resumes too, and its average ends",
        )
    averaged.load(state.average, int(state.average_facts["steps"]))


def _new_run(run: AnyRun) -> list[str]:
    """Return the command of a new run that starts from the weights saved last."""
    output = run.setup.output
    weights = RunFiles.read(output).newest_weights()
    if not weights:
        return []
    changes = {
        **NEW_START,
        "resume_from_checkpoint": ",".join(map(str, weights)),
        "output_path": unused_name(output),
    }
    command = command_line(run.setup.typed, **changes)
    return [f"or start a new run from the saved weights; run: {command}"]


def _differing(run: AnyRun) -> dict[str, str]:
    """Return the options that differ from the run whose state is resumed, each with both
    values in words; none where nothing differs that has a name.
    """
    config = run.setup.config
    folder = run.setup.output
    if config.resume not in (None, "auto"):
        folder = Path(str(config.resume)).resolve().parent.parent
    try:
        recorded = read_resolved(folder)
    except StateError:
        return {}
    versions = recorded.get("versions", {})
    size = str(run.processes.size)
    saved = _resolved(run, {**recorded, PROCESSES: versions.get(PROCESSES, size)})
    now = _resolved(run, {**as_flags(run.setup.recorded), PROCESSES: size})
    saved[MODIFIERS] = versions.get(MODIFIERS, NO_MODIFIERS)
    now[MODIFIERS] = modifiers_in_words(run.setup)
    if saved.pop(SAMPLES) == now.pop(SAMPLES):
        for name in OF_SAMPLES:
            saved.pop(name, None)
            now.pop(name, None)
    words = {}
    for name, value in now.items():
        # Versions before a flag did not record it.
        if name in saved and saved[name] != value:
            flag = name if name in (PROCESSES, MODIFIERS) else f"--{name}"
            words[name] = _in_words(flag, saved[name], value)
    with suppress(UsageError):  # datasets that a version wrote with other options
        recorded_config = with_recorded(config, recorded)
        for place, old, new in differing_options(recorded_config, config):
            words[place] = _in_words(place, old, new)
    return words


def _in_words(place: str, saved: Any, now: Any) -> str:
    return f"{place}: saved {_shown(saved)}, this run {_shown(now)}"


def _resolved(run: AnyRun, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that decide a run's numbers, and its processes, each as one of
    the ways in which it can be written.
    """
    names = options_affecting("training", "resolved")
    if run.setup.config.lr_scheduler in ENDING_AT_LAST_STEP:
        names += options_affecting("length")
    names += (*run.setup.spec.constants, PROCESSES)
    found = {name: flags[name] for name in names if name in flags}
    # What datasets have of their own is compared by itself, wherever they are.
    found.pop("dataset", None)
    default = named(found.get("optimizer", "")).learning_rate
    rates = parse_learning_rates(found.get("learning_rate"), default)
    with suppress(UsageError):  # for components that this run does not train
        rates = run.setup.by_component(rates)
    found["learning_rate"] = rates.plain
    for name, value in STANDS_FOR.items():
        if found.get(name, 0) is None:
            found[name] = value
    for name in ("extra_inputs", "data_file_keys"):
        found[name] = ",".join(sorted(split_commas(found.get(name)))) or None
    if "column" in found:
        columns = parse_columns(found["column"])
        found["column"] = [f"{name}={columns[name]}" for name in sorted(columns)]
    if found.get("lora_alpha", 0) is None:
        found["lora_alpha"] = found["lora_rank"]
    custom = found.pop("customized_optimizer", None)
    found["optimizer"] = custom or found.get("optimizer", "adamw")
    found["mixed_precision"] = precision(found.get("mixed_precision"), run.setup.device)
    found[SAMPLES] = math.prod(int(found.get(name, 1)) for name in OF_SAMPLES)
    return found


def _shown(value: Any) -> str:
    if value is None or value == []:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
