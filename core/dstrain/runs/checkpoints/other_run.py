"""Refuse a state of another run, or of another dataset, and say what differs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain.config import (
    as_flags,
    command_line,
    read_resolved,
)
from dstrain.config.options import (
    TrainConfig,
    ends_at_last_step,
    options_affecting,
)
from dstrain.config.plugin_options import plugin_flags
from dstrain.config.serialize import new_start
from dstrain.errors import StateError
from dstrain.models.device import ATTENTION
from dstrain.runs.checkpoints.run_identity import (
    NO_MODIFIERS,
    ROWS,
    AnyRun,
    config_digest,
    modifiers_in_words,
)
from dstrain.storage import RunFiles
from dstrain.storage.files import unused_name

PROCESSES = "processes"
"""Entry of the versions in a run's configuration: how many processes trained."""
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
        what = _dataset_changed(changed, saved_content, content)
        advice = "to resume, put the dataset back as it was"
        raise StateError("--resume", what, advice, *_new_run(run), START_OVER)


def _dataset_changed(
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
    return f"the dataset has changed since the saved run read it: {'; '.join(words)}"


def _new_run(run: AnyRun) -> list[str]:
    """Return the command of a new run that starts from the weights saved last."""
    output = run.setup.output
    weights = RunFiles.read(output).newest_weights()
    if not weights:
        return []
    changes = {
        **new_start(),
        "resume_from_checkpoint": ",".join(map(str, weights)),
        "output_path": unused_name(output),
    }
    command = command_line(run.setup.typed, **changes)
    return [f"or start a new run from the saved weights; run: {command}"]


def _differing(run: AnyRun) -> dict[str, str]:
    """Return the options that differ from the run whose state is resumed, each with both
    values in words; none where nothing differs that has a name.
    """
    setup = run.setup
    folder = setup.output
    if setup.config.resume not in (None, "auto"):
        folder = Path(str(setup.config.resume)).resolve().parent.parent
    try:
        recorded = read_resolved(folder)
    except StateError:
        return {}
    native = {ATTENTION: "native"}
    size = str(run.processes.size)
    modifiers = modifiers_in_words(setup)
    versions = {**native, PROCESSES: size, MODIFIERS: NO_MODIFIERS}
    # What is at its default is not written.
    defaults = {name: one.default for name, one in plugin_flags(TrainConfig).items()}
    saved = {**defaults, **recorded, **versions, **recorded.get("versions", {})}
    here = {**native, **setup.versions, PROCESSES: size, MODIFIERS: modifiers}
    now = {**defaults, **as_flags(setup.recorded), **here}
    names = options_affecting("training", "resolved")
    if ends_at_last_step(setup.config.lr_scheduler):
        names += options_affecting("length")
    words = {}
    for name in (*names, *setup.spec.constants, *UNFLAGGED):
        # Versions before a flag did not record it.
        if name in saved and name in now and saved[name] != now[name]:
            flag = name if name in UNFLAGGED else f"--{name}"
            values = f"saved {_shown(saved[name])}, this run {_shown(now[name])}"
            words[name] = f"{flag}: {values}"
    return words


def _shown(value: Any) -> str:
    if value is None or value == []:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
