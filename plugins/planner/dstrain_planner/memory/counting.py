"""Count the activations of a run, for its largest sample."""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dstrain import TrainingModule
from dstrain.plugin import DstrainError, Files, PlannedRun

from dstrain_planner.memory.activations import Activations, count_activations
from dstrain_planner.memory.samples import ChosenSample, of_cache, of_flags, of_largest


@dataclass(frozen=True)
class Counted:
    """What was counted of a step."""

    activations: Activations | None
    origin: str
    """The sample that was counted, in words, or why none was."""


def count(run: PlannedRun) -> Counted:
    """Count the activations of a run. It takes the run's module."""
    if run.unknown:
        why = f"the configuration of {', '.join(run.unknown)} is not known"
        return Counted(None, why)
    try:
        chosen, module = _sample_and_module(run)
        counted = count_activations(
            module,
            [chosen.sample] * run.config.batch_size,
            trains=run.stage != "data_process",
        )
    # Whatever a unit needs beyond shapes: without an answer there is no estimate, and
    # the rest of the dry run is as useful.
    except Exception as error:
        reason = error.what if isinstance(error, DstrainError) else repr(error)
        return Counted(None, reason.partition("\n")[0][:200])
    return Counted(counted, chosen.origin)


def encoding_in_tiles(run: PlannedRun) -> int | None:
    """Return the most that the units that are cached hold at one time if VAEs compute in
    tiles; None if it cannot be counted.

    Raises UsageError for a run whose VAEs cannot.
    """
    stage_1 = run.of_stage("data_process")
    changes: dict[str, Any] = {"tiled": True}
    tiled = stage_1.with_config(replace(stage_1.config, **changes))
    counted = count(replace(tiled, components=run.components)).activations
    return None if counted is None else counted.encoding


def _sample_and_module(run: PlannedRun) -> tuple[ChosenSample, TrainingModule]:
    """Return the sample to count, and a module that can run it."""
    cached = run.cached
    if cached is not None:
        return of_cache(cached), run.module()
    # Without a feature cache, its values are made as stage 1 makes them.
    module = run.module(whole=True)
    chosen = of_flags(run) if run.largest is None else of_largest(run, run.largest)
    if _add_tokenizers(run, module.pipeline.components, module.pipeline.dtype):
        words = f"{chosen.origin}; tokens as of the toy's tokenizer, which makes more"
        chosen = replace(chosen, origin=words)
    return chosen, module


def _add_tokenizers(run: PlannedRun, components: dict[str, Any], dtype: Any) -> bool:
    """Put the toy's tokenizers in the place of those that are not here; return whether
    there was one.
    """
    setup = run.setup
    known = {one.name: one for one in setup.family.load("components")}
    wanted = run.loaded("data_process" if run.stage == "data_process" else "")
    absent = [
        name for name in wanted if known[name].is_folder and name not in components
    ]
    if not absent:
        return False
    with TemporaryDirectory(prefix="dstrain-toy-") as folder:
        setup.family.load("toy")(Path(folder), setup.spec.variant, 0)
        for name in absent:
            place = Path(folder) / known[name].folder
            network: Any = known[name].network
            components[name] = network.load(Files((place,)), None, dtype)
    return True
