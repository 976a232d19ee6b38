"""What an estimate is computed from: sizes of components and counted activations."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from dstrain.errors import DstrainError
from dstrain.graph import Plan
from dstrain.models import Files, components_of
from dstrain.models.toy import fill_folder
from dstrain.pipeline import Pipeline
from dstrain.runs.build import load_module
from dstrain.runs.memory.activations import Activations, count_activations
from dstrain.runs.memory.components import ComponentSize, component_size
from dstrain.runs.memory.samples import (
    ChosenSample,
    LargestSample,
    of_cache,
    of_flags,
    of_largest,
)
from dstrain.runs.setup import Setup
from dstrain.runs.training_run import TrainingData
from dstrain.training import TrainingModule


@dataclass(frozen=True)
class Facts:
    """What does not depend on how a run saves memory."""

    components: Mapping[str, ComponentSize]
    unknown: tuple[str, ...]
    """Components with weights whose configuration is not known."""
    activations: Activations | None
    origin: str
    """The sample that was counted, in words, or why none was."""
    absent: tuple[str, ...] = ()
    """Components with weights whose files are not on this machine."""

    def of_components(self, names: Collection[str]) -> "Facts":
        """Return the facts of a part of the components, those that a stage loads."""
        return replace(
            self,
            components={n: one for n, one in self.components.items() if n in names},
            unknown=tuple(name for name in self.unknown if name in names),
            absent=tuple(name for name in self.absent if name in names),
        )


def facts_of(
    setup: Setup,
    plans: Sequence[Plan],
    loaded: Pipeline | TrainingModule,
    data: TrainingData | None,
    largest: LargestSample | None,
) -> Facts:
    """Measure what a run loads and trains. Afterwards, `loaded` is of no use.

    Args:
        setup: The run.
        plans: Its plans.
        loaded: Its pipeline, or module, without memory.
        data: The samples of its feature cache, if it has one.
        largest: The largest sample of its dataset, if it is known.
    """
    pipeline = loaded if isinstance(loaded, Pipeline) else loaded.pipeline
    lora = () if isinstance(loaded, Pipeline) else tuple(loaded.trained.lora)
    known = components_of(setup.family)
    sizes = {
        name: component_size(name, network, name in lora)
        for name, network in pipeline.components.items()
        if isinstance(network, nn.Module)
    }
    wanted = dict.fromkeys(
        name for plan in plans for name in plan.components[setup.stage]
    )
    unknown = tuple(
        name for name in wanted if not known[name].is_folder and name not in sizes
    )
    absent = tuple(name for name in sizes if name not in pipeline.files)
    if unknown:
        why = f"the configuration of {', '.join(unknown)} is not known"
        return Facts(sizes, unknown, None, why, absent)
    try:
        chosen, module = _sample_and_module(setup, plans, loaded, data, largest)
        counted = count_activations(
            module,
            [chosen.sample] * setup.config.batch_size,
            trains=setup.stage != "data_process",
        )
    # Whatever a unit needs beyond shapes: without an answer there is no estimate, and
    # the rest of the dry run is as useful.
    except Exception as error:
        reason = error.what if isinstance(error, DstrainError) else repr(error)
        short = reason.partition("\n")[0][:200]
        return Facts(sizes, unknown, None, short, absent)
    return Facts(sizes, unknown, counted, chosen.origin, absent)


def encoding_in_tiles(
    setup: Setup, plans: Sequence[Plan], largest: LargestSample | None
) -> int | None:
    """Return the most that the units that are cached hold at one time if VAEs compute in
    tiles; None if it cannot be counted.

    Raises UsageError for a run whose VAEs cannot.
    """
    task = f"{setup.config.task_name}:data_process"
    config = replace(setup.config, task=task, tiled=True)
    tiled = replace(setup, stage="data_process", config=config)
    loaded = Pipeline.from_found(
        tiled.family,
        tiled.spec,
        tiled.find(plans, []),
        tiled.device,
        tiled.dtype,
        empty=True,
    )
    counted = facts_of(tiled, plans, loaded, None, largest).activations
    return None if counted is None else counted.encoding


def _sample_and_module(
    setup: Setup,
    plans: Sequence[Plan],
    loaded: Pipeline | TrainingModule,
    data: TrainingData | None,
    largest: LargestSample | None,
) -> tuple[ChosenSample, TrainingModule]:
    """Return the sample to count, and a module that can run it."""
    if isinstance(loaded, Pipeline):
        module = TrainingModule(loaded, setup.task)
        module.trained.components = setup.trainables.components
    else:
        module = loaded
    if data is not None and setup.stage == "train":
        return of_cache(data), module
    if setup.stage == "train":
        # Without a feature cache, its values are made as stage 1 makes them.
        whole = replace(
            setup, stage="", config=replace(setup.config, task=setup.config.task_name)
        )
        module = load_module(
            whole, plans, whole.find(plans), TrainingModule, empty=True
        )
    if largest is None:
        chosen = of_flags(setup)
    else:
        chosen = of_largest(setup, largest)
    if _add_tokenizers(setup, plans, module.pipeline):
        words = f"{chosen.origin}; tokens as of the toy's tokenizer, which makes more"
        chosen = replace(chosen, origin=words)
    return chosen, module


def _add_tokenizers(setup: Setup, plans: Sequence[Plan], pipeline: Pipeline) -> bool:
    """Put the toy's tokenizers in the place of those that are not here; return whether
    there was one.
    """
    known = components_of(setup.family)
    stage = "data_process" if setup.stage == "data_process" else ""
    wanted = dict.fromkeys(name for plan in plans for name in plan.components[stage])
    absent = [
        name
        for name in wanted
        if known[name].is_folder and name not in pipeline.components
    ]
    if not absent:
        return False
    with TemporaryDirectory(prefix="dstrain-toy-") as folder:
        fill_folder(setup.family, setup.spec.variant, 0, Path(folder), "")
        for name in absent:
            place = Path(folder) / known[name].folder
            network: Any = known[name].network
            pipeline.components[name] = network.load(
                Files((place,)), None, pipeline.dtype
            )
    return True
