"""Add up what a run needs on its device, and in RAM, at the peak."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.utils._pytree import tree_leaves

from dstrain.config.options.train import TrainConfig
from dstrain.models.execution.kept import AS_LOADED, Kept
from dstrain.runs.memory.components import TRAINED, ComponentSize, as_kept
from dstrain.runs.memory.facts import Facts
from dstrain.training.optimizers.trial import SIDE, Trial

RESERVE = 2**30
"""Bytes for the device's own context, its libraries and what the allocator rounds up."""
CAST = 2
"""Bytes of a number in bf16: of the copies of trained weights that autocast holds through
a forward pass, and of a stored weight that is restored for a product."""


@dataclass(frozen=True)
class Choice:
    """How a run saves memory."""

    config: TrainConfig
    kept: Mapping[str, Kept]
    state_bytes: float
    """Bytes of the optimizer's state per trained number."""
    mixed: bool
    """Whether it computes in bf16."""


@dataclass(frozen=True)
class Estimate:
    """Bytes at the peak of one stage."""

    weights: Mapping[str, int]
    """Component -> what of its frozen weights and buffers is always on the device."""
    trained: int
    gradients: int
    optimizer: int
    average: int
    activations: int | None
    """None where they are not known."""
    ram: int = 0
    """Bytes of weights in RAM."""

    @property
    def least(self) -> int:
        """Return the bytes on the device of all that is known."""
        training = self.trained + self.gradients + self.optimizer + self.average
        return sum(self.weights.values()) + training + (self.activations or 0)

    def fits(self, device: int) -> bool | None:
        """Return whether a device has the memory; None if that is not known."""
        if self.least + RESERVE > device:
            return False
        return None if self.activations is None else True


def state_bytes(trial: Trial) -> float:
    """Return the bytes of an optimizer's state per number, as seen on a matrix."""
    tensors = [one for one in tree_leaves(trial.state) if isinstance(one, Tensor)]
    return round(sum(one.nbytes for one in tensors) / SIDE**2, 2)


def estimate(
    facts: Facts, names: tuple[str, ...], choice: Choice, stage: str
) -> Estimate:
    """Estimate a stage.

    Args:
        facts: What the run loads and trains.
        names: The components that the stage loads.
        choice: How it saves memory.
        stage: 'data_process', or another for one that trains.
    """
    sizes = {name: facts.components[name] for name in names if name in facts.components}
    weights, borrowed, ram, restored = _places(sizes, choice.kept)
    counted = facts.activations
    encoding = None if counted is None else counted.encoding + borrowed
    if stage == "data_process":
        return Estimate(weights, 0, 0, 0, 0, encoding, ram)
    numbers = sum(one.trained for one in sizes.values())
    activations = None
    if counted is not None and encoding is not None:
        activations = restored + counted.kept(
            choice.config.checkpoints,
            choice.config.use_gradient_checkpointing_offload,
            numbers * CAST if choice.mixed else 0,
        )
        if not stage:
            # Units run before the step keeps anything.
            activations = max(activations, encoding)
    trained = sum(one.trained_bytes for one in sizes.values())
    return Estimate(
        weights=weights,
        trained=trained,
        gradients=numbers * TRAINED,
        optimizer=int(numbers * choice.state_bytes),
        average=numbers * TRAINED if choice.config.ema_decay is not None else 0,
        activations=activations,
        ram=ram,
    )


def _places(
    sizes: Mapping[str, ComponentSize], kept: Mapping[str, Kept]
) -> tuple[dict[str, int], int, int, int]:
    """Return what is always on the device, by component; the most that is there while a
    unit borrows it; what is in RAM; and the most that a stored weight takes restored.
    """
    weights = {}
    borrowed = ram = restored = 0
    for name, size in sizes.items():
        how = kept.get(name, AS_LOADED)
        place = as_kept(size, how)
        weights[name] = 0 if how.offloaded else place.device
        ram += place.ram
        restored = max(restored, CAST * place.largest_stored)
        if how.offloaded:
            borrowed = max(borrowed, place.device)
            ram += place.device
    return weights, borrowed, ram, restored
