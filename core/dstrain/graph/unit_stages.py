"""Split units into those that run once and those that run in each step."""

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from dstrain.errors import UsageError, nearest
from dstrain.graph.spec import PipelineSpec
from dstrain.graph.unit import Unit


def units_in_training(units: Iterable[Unit], changing: set[str]) -> list[Unit]:
    """Return the units that use a component that changes, and those that use their outputs."""
    found: list[Unit] = []
    computed: set[str] = set()
    for unit in units:
        if changing & set(unit.components) or computed & set(unit.inputs):
            found.append(unit)
            computed |= set(unit.outputs)
    return found


class UnitStages(NamedTuple):
    """The units of the two stages of split training, each in the order in which they run."""

    data_process: tuple[Unit, ...]
    """The units whose outputs are the same in every epoch, so that they can be stored."""
    train: tuple[Unit, ...]
    """The units that run in each step."""


def split_units(
    units: PipelineSpec | Iterable[Callable[..., Any] | Unit],
    trainables: str | Iterable[str],
) -> UnitStages:
    """Split units into two stages by what their signatures declare; nothing is loaded.

    A unit runs in each step if it uses a component that is trained, or `rng`, or an
    output of such a unit. Raises UsageError for a function that is no unit, and for a
    component that the pipeline does not have.

    Args:
        units: A pipeline's spec; or functions, or units, in the order in which they run,
            of which any component may be trained, since model_fn may use others.
        trainables: Names of trained components, or of parts of them: a list, or text
            with commas.
    """
    known: Collection[str] | None = None
    if isinstance(units, PipelineSpec):
        known, units = units.components, units.units
    all_units = [one if isinstance(one, Unit) else Unit(one) for one in units]
    text = trainables if isinstance(trainables, str) else ",".join(trainables)
    names = {name.strip().partition(".")[0] for name in text.split(",")} - {""}
    for name in sorted(names):
        if known is not None and name not in known:
            what = f"the pipeline has no component {name!r}{nearest(name, known)}"
            raise UsageError("trainables", what, f"components: {', '.join(known)}")
    changing = {"rng", *names}
    in_training = units_in_training(all_units, changing)
    cached = tuple(unit for unit in all_units if unit not in in_training)
    return UnitStages(cached, tuple(in_training))
