"""Add the masks of a dataset to a variant, and refuse those without effect."""

from dataclasses import dataclass, replace

import numpy as np

from dstrain.data import Dataset, inputs_of
from dstrain.errors import UsageError
from dstrain.graph import Column, Constant, Input, MaskColumn, PipelineSpec, Plan, Task
from dstrain.pipeline.loss_masks import (
    LATENTS,
    LOSS_WEIGHT,
    MASK,
    UNMASKED_WEIGHT,
    MaskUnit,
)


@dataclass(frozen=True)
class Masks:
    """What the flags ask of masks."""

    column: str | None = None
    """The column that names them."""
    is_alpha: bool = False
    """Whether they are the alpha channels of the images themselves."""
    unmasked_weight: float = 0.0
    """As in `weigh_latents`."""

    def __bool__(self) -> bool:
        """Return whether any masks are asked for."""
        return self.column is not None or self.is_alpha

    @property
    def flag(self) -> str:
        """Return the flag that asks for masks."""
        return "--alpha_mask" if self.is_alpha else "--mask_column"


def with_masks(spec: PipelineSpec, task: Task, masks: Masks) -> PipelineSpec:
    """Return the variant with masks of the loss, or as it is if none are asked for.

    Raises UsageError for a loss that takes none, and for a variant that is not trained on
    one image or video.
    """
    if not masks:
        return spec
    if LOSS_WEIGHT not in task.loss.inputs:
        what = f"the loss of task {task.name} takes no masks"
        advice = f"give it a parameter {LOSS_WEIGHT}: Tensor | None = None"
        raise UsageError(masks.flag, what, advice)
    unit = MaskUnit(spec.latent_shape)
    inputs = {**spec.inputs, **_inputs_of(spec, masks)}
    return replace(spec, inputs=inputs, units=(*spec.units, unit))


def with_masks_of_dataset(spec: PipelineSpec, masks: Masks) -> PipelineSpec:
    """Return a variant with masks as one dataset is read, whose masks are others, or none.

    Raises UsageError as `with_masks` does.
    """
    if MASK not in spec.inputs:
        return spec
    inputs = {**spec.inputs, **_inputs_of(spec, masks)}
    if masks:
        return replace(spec, inputs=inputs)
    # The weight stays, which the rows of other datasets have whose cell is blank: rows
    # without a mask have the same inputs, and share batches.
    del inputs[MASK]
    units = tuple(unit for unit in spec.units if not isinstance(unit, MaskUnit))
    return replace(spec, inputs=inputs, units=units)


def _inputs_of(spec: PipelineSpec, masks: Masks) -> dict[str, Input]:
    """Return the inputs of masks; of none the weight of what they would leave out."""
    weight = Constant(float(masks.unmasked_weight))
    if not masks:
        return {UNMASKED_WEIGHT: weight}
    name, masked = _masked_input(spec, masks.flag)
    if masks.is_alpha and masked.from_video:
        what = f"{spec.where} is trained on videos, whose alpha channels are not read"
        raise UsageError(masks.flag, what, "use --mask_column, a mask for all frames")
    column = MaskColumn(
        masked.name if masks.column is None else masks.column,
        "image",
        mode="RGBA" if masks.is_alpha else "L",
        of=name,
        not_empty=masks.unmasked_weight == 0,
    )
    return {MASK: column, UNMASKED_WEIGHT: weight}


def _masked_input(spec: PipelineSpec, flag: str) -> tuple[str, Column]:
    """Return the image or video that `LATENTS` are encoded from: that which their unit
    reads, else that of the units before it.
    """
    makers = spec.makers
    names = {LATENTS}
    found: dict[str, Column] = {}
    while names and not found:
        units = [makers[name] for name in names if name in makers]
        names = {name for unit in units for name in unit.inputs}
        for name in names:
            source = spec.inputs.get(name)
            if isinstance(source, Column) and source.kind in ("image", "video"):
                found[name] = source
    if len(found) != 1:
        sources = " and ".join(sorted(found)) or "no image or video"
        what = f"{spec.where} encodes {LATENTS} from {sources}; a mask is of one"
        raise UsageError(flag, what)
    return next(iter(found.items()))


def check_masks(plan: Plan) -> None:
    """Refuse masks that have no effect, as a variant cannot say how large latents are.

    plan: Of all inputs that rows can have.
    """
    if MASK in plan.spec.inputs and LOSS_WEIGHT not in plan.loss_inputs:
        what = f"have no effect: {plan.spec.where} has latents of unknown size"
        raise UsageError("masks", what, *plan.skipped.values())


def rows_without_masks(dataset: Dataset) -> list[str]:
    """Say how many rows of a dataset with masks have none."""
    rows = len(np.unique(dataset.sample_ids[:, 0]))
    lacks = np.array([MASK not in inputs_of(one) for one in dataset.signatures], bool)
    without = len(np.unique(dataset.sample_ids[lacks[dataset.groups], 0]))
    if MASK not in dataset.columns or not without:
        return []
    what = f"{without:,} of {rows:,} rows have no mask"
    return [f"{dataset.table.path}: {what}: the loss counts all of them"]


def refuse_no_masks(dataset: Dataset) -> None:
    """Raise UsageError if masks are asked for, and no row has one."""
    if MASK not in dataset.columns:
        return
    if any(MASK in inputs for inputs in dataset.input_sets):
        return
    column = dataset.columns[MASK]
    flag, what = "--mask_column", f"all values of column {column.name!r} are blank"
    if column.mode == "RGBA":
        flag = "--alpha_mask"
        what = f"no image in column {column.name!r} has an alpha channel"
    raise UsageError(flag, f"has no effect: {what}")
