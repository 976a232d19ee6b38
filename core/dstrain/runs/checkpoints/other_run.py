"""Refuse a state of another run, or of another dataset, and say what differs."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dstrain.config import (
    as_flags,
    command_line,
    parse_learning_rates,
    read_resolved,
    split_commas,
)
from dstrain.config.options import ends_at_last_step, options_affecting
from dstrain.config.serialize import NEW_START
from dstrain.data.forms import parse_columns
from dstrain.errors import StateError, UsageError
from dstrain.models import precision
from dstrain.models.device import ATTENTION
from dstrain.runs.checkpoints.run_identity import (
    NO_MODIFIERS,
    ROWS,
    STANDS_FOR,
    AnyRun,
    config_digest,
    modifiers_in_words,
)
from dstrain.runs.checkpoints.state_folders import states
from dstrain.runs.datasets.changed import written_since
from dstrain.runs.datasets.own_options import differing_options, with_recorded
from dstrain.runs.datasets.sources import source_here
from dstrain.storage import RunFiles
from dstrain.storage.files import unused_name
from dstrain.training.optimizers import named

PROCESSES = "processes"
"""Entry of the versions in a run's configuration: how many processes trained."""
SAMPLES = "samples of a step"
OF_SAMPLES = ("batch_size", "gradient_accumulation_steps", PROCESSES)
"""What the samples of a step are the product of."""
MODIFIERS = "plugins that change steps"
"""Entry of these versions: what `modifiers_in_words` returns."""
UNFLAGGED = (PROCESSES, MODIFIERS, ATTENTION)
"""What a run depends on that is no flag."""
START_OVER = (
    "or start over with another --output_path, or with --overwrite in place of --resume"
)
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
            START_OVER,
        )
    if changed:
        what = _dataset_changed(run, changed, saved_content, content)
        advice = "to resume, put the dataset back as it was"
        raise StateError("--resume", what, advice, *_new_run(run), START_OVER)


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
    for found, of in ((saved, versions), (now, run.setup.versions)):
        found[ATTENTION] = of.get(ATTENTION, "native")
    if saved.pop(SAMPLES) == now.pop(SAMPLES):
        for name in OF_SAMPLES:
            saved.pop(name, None)
            now.pop(name, None)
    words = {}
    for name, value in now.items():
        # Versions before a flag did not record it.
        if name in saved and saved[name] != value:
            flag = name if name in UNFLAGGED else f"--{name}"
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
    if ends_at_last_step(run.setup.config.lr_scheduler):
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
