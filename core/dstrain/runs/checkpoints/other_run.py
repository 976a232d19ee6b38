"""Refuse to resume the state of another run, with the entries that differ."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.config import as_flags, read_resolved
from dstrain.config.options import TrainConfig, ends_at_last_step, options_affecting
from dstrain.config.plugin_options import flags_by_name, plugin_flags
from dstrain.errors import StateError
from dstrain.installed import how_to_have
from dstrain.models.device import ATTENTION
from dstrain.runs.checkpoints.run_identity import (
    MODIFIERS,
    NO_MODIFIERS,
    PROCESSES,
    AnyRun,
    config_digest,
    modifiers_in_words,
)


def refuse_other_run(
    run: AnyRun,
    saved_digest: str,
    saved_content: Mapping[str, str],
    content: Mapping[str, str],
) -> None:
    """Raise StateError if a saved state is of another run, or of another dataset, with
    the entries that differ.

    Args:
        saved_content: Its `data_fingerprint`.
        content: That of this run, or a part of it.
    """
    found = _differing(saved_content, content)
    if saved_digest != config_digest(run):
        found = _differing_options(run) | found
    elif not found:
        return
    names = ", ".join(found) or "what has no name here, such as sizes of rows"
    saved, now = ({name: pair[at] for name, pair in found.items()} for at in (0, 1))
    absent = [
        f"{name}: {advice}"
        for name, value in saved.items()
        if (advice := how_to_have("options", name) or how_to_have(name, str(value)))
    ]
    raise StateError(
        "--resume",
        f"the saved run had other options or another dataset: {names}",
        f"saved: {json.dumps(saved, ensure_ascii=False)}",
        f"this run: {json.dumps(now, ensure_ascii=False)}",
        *absent,
        "resume with what was saved, or give another --output_path in place of --resume",
    )


def _differing_options(run: AnyRun) -> dict[str, tuple[Any, Any]]:
    """Return the options that differ from those recorded of the saved run, with both values."""
    setup = run.setup
    config = setup.config
    folder = setup.output
    if config.resume not in (None, "auto"):
        folder = Path(str(config.resume)).resolve().parent.parent
    try:
        recorded = read_resolved(folder)
    except StateError:
        return {}
    # What is at its default is not written.
    known = flags_by_name(TrainConfig)
    optional = (*options_affecting("if_given"), *plugin_flags(TrainConfig))
    same = {name: known[name].default for name in optional}
    size = str(run.processes.size)
    same |= {ATTENTION: "native", MODIFIERS: NO_MODIFIERS, PROCESSES: size}
    saved = {**same, **recorded, **recorded.get("versions", {})}
    now = {**same, **as_flags(setup.recorded), **setup.versions}
    now[MODIFIERS] = modifiers_in_words(setup)
    # Without its stage.
    saved["task"] = str(recorded.get("task", "")).partition(":")[0]
    now["task"] = config.task_name
    names = [*options_affecting("training", "resolved"), *setup.spec.constants]
    if ends_at_last_step(config.lr_scheduler):
        names += options_affecting("length")
    names += [PROCESSES, MODIFIERS, ATTENTION, "task"]
    now = {name: now[name] for name in names if name in now}
    # Of a plugin that is not there, say.
    gone = recorded.keys() - {*known, "versions", "p"}
    return _differing(saved, now | dict.fromkeys(filter(recorded.get, sorted(gone))))


def _differing(
    saved: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the entries of the second whose values are others in the first, with both."""
    # Versions before an option did not record it.
    return {
        name: (saved[name], one)
        for name, one in now.items()
        if saved.get(name, one) != one
    }
