"""Masks that weight the loss: for a variant that knows nothing of them, the input, and the
unit that turns it into a value as large as the latents.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from dstrain.data import Dataset
from dstrain.data.cells import mask_channel
from dstrain.errors import UsageError
from dstrain.graph import (
    Column,
    Constant,
    FunctionSpec,
    Input,
    MaskColumn,
    PipelineSpec,
    Plan,
    Task,
)
from dstrain.graph.function_spec import versioned
from dstrain.graph.unit import Unit

MASK = "loss_mask"
"""The input."""
UNMASKED_WEIGHT = "unmasked_weight"
LOSS_WEIGHT = "loss_weight"
"""The value, and the parameter of a loss that takes it."""
LATENTS = "input_latents"
"""The value that a loss compares with, whose image or video is masked."""


class LossWeight(TypedDict):
    """How much a loss counts each position of the latents."""

    loss_weight: Tensor
    """(1, 1, ..., latent height, latent width), fp32, 0 to 1."""


@versioned(1)
def weigh_latents(
    latent_shape: tuple[int, ...], loss_mask: Image.Image, unmasked_weight: float
) -> LossWeight:
    """Average a mask over the part of the image that each position of the latents is of.

    Args:
        latent_shape: (1, channels, ..., latent height, latent width).
        loss_mask: As large as the image; its last channel is 255 for what counts.
        unmasked_weight: The weight where it is 0.
    """
    if len(latent_shape) < 4:
        raise UsageError(
            "masks",
            f"latents of shape {list(latent_shape)} have no height and width to mask",
        )
    pixels = torch.from_numpy(np.array(mask_channel(loss_mask)))
    height, width = latent_shape[-2:]
    mask = adaptive_avg_pool2d(pixels[None].float() / 255, (height, width))
    # In this form, 1 stays 1 exactly, and an unmasked weight of 0 leaves the mask.
    weight = 1 - (1 - unmasked_weight) * (1 - mask)
    one_each = [1] * (len(latent_shape) - 2)
    return {"loss_weight": weight.view(*one_each, height, width)}


@dataclass(frozen=True, init=False)
class MaskUnit(Unit):
    """The unit of a variant that makes the weight, without what encodes the image: a
    variant says how large its latents are.
    """

    latent_shape: FunctionSpec = field(init=False)

    def __init__(self, latent_shape: FunctionSpec) -> None:
        """Build the unit of a variant with this `latent_shape`."""
        super().__init__(weigh_latents, given=("latent_shape",))
        # The class is frozen.
        object.__setattr__(self, "latent_shape", latent_shape)
        object.__setattr__(self, "inputs", {**self.inputs, **latent_shape.inputs})
        object.__setattr__(self, "components", latent_shape.components)

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        """Return what the unit is, with what `latent_shape` is."""
        return {**super().identity, "latent shape": self.latent_shape.identity}

    def call(self, arguments: Mapping[str, Any]) -> LossWeight:
        """Compute the shape from what it asks for, and the weight."""
        shape = self.latent_shape
        asked = {*shape.inputs, *shape.components}
        given = {name: value for name, value in arguments.items() if name in asked}
        return weigh_latents(
            tuple(shape.function(**given)), arguments[MASK], arguments[UNMASKED_WEIGHT]
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
        raise UsageError(
            masks.flag,
            f"the loss of task {task.name} takes no masks",
            f"a loss that takes them has a parameter {LOSS_WEIGHT}: Tensor | None = None",
        )
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
        what = (
            f"have no effect: the size of the latents of {plan.spec.where} is unknown"
        )
        raise UsageError("masks", what, *plan.skipped.values())


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
