"""Add up what a run needs on its device, and in RAM, at the peak."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor
from torch.utils._pytree import tree_leaves

from dstrain.config.options import TrainConfig
from dstrain.distributed import Sharding
from dstrain.models.execution import AS_LOADED, Kept
from dstrain.runs.memory.components import (
    TRAINED,
    ComponentSize,
    as_divided,
    as_kept,
)
from dstrain.runs.memory.facts import Facts
from dstrain.training.optimizers import SIDE, Trial

CONTEXT = 2**30
"""Bytes for the device's context, and for kernels and workspaces of its libraries (cuBLAS,
cuDNN): none of these is a tensor."""
FRAGMENTED = 0.05
"""Share of the counted bytes that is lost between them: torch's allocator gets memory in
segments of 2 and 20 MiB or more, and a piece that is free between used ones serves only
requests that are as small. accelerate leaves a tenth of a device free where it counts
weights alone; here activations are counted, too."""
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
    sharding: Sharding | None = None
    """How networks in training are sharded, if they are."""
    processes: int = 1
    """How many they are sharded among."""
    rounds: bool = False
    """Whether trained weights are in bf16, and their updates rounded by chance."""


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
    """Bytes in RAM: of weights, and where sharding offloads them, of all that is
    sharded."""
    together: int = 0
    """Bytes of weights of sharded networks that are whole at the peak of a step."""

    @property
    def least(self) -> int:
        """Return the bytes on the device of all that is known."""
        training = self.trained + self.gradients + self.optimizer + self.average
        weights = sum(self.weights.values()) + self.together
        return weights + training + (self.activations or 0)

    @property
    def margin(self) -> int:
        """Return the bytes to leave free for what is not counted."""
        return CONTEXT + int(FRAGMENTED * self.least)

    @property
    def peak(self) -> int:
        """Return what the device needs, of all that is known."""
        return self.least + self.margin

    def fits(self, device: int) -> bool | None:
        """Return whether a device has the memory; None if that is not known."""
        if self.peak > device:
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
    weights, offloaded, ram, restored = _places(sizes, choice.kept)
    counted = facts.activations
    # What a unit computes with a stored weight is computed with the restored one.
    encoding = None if counted is None else counted.encoding + offloaded + restored
    if stage == "data_process":
        return Estimate(weights, 0, 0, 0, 0, encoding, ram)
    numbers = sum(one.trained for one in sizes.values())
    # Weights that are in bf16 are computed with as they are.
    number, copied = (CAST, 0) if choice.rounds else (TRAINED, numbers * CAST)
    activations = None
    if counted is not None and encoding is not None:
        activations = restored + counted.kept(
            choice.config.checkpoints,
            choice.config.use_gradient_checkpointing_offload,
            copied if choice.mixed else 0,
        )
        if not stage:
            # Units run before the step keeps anything.
            activations = max(activations, encoding)
    found = Estimate(
        weights=weights,
        trained=numbers * number,
        gradients=numbers * number,
        optimizer=int(numbers * choice.state_bytes),
        average=numbers * TRAINED if choice.config.ema_decay is not None else 0,
        activations=activations,
        ram=ram,
    )
    return found if choice.sharding is None else _divided(found, sizes, choice)


def _divided(
    whole: Estimate, sizes: Mapping[str, ComponentSize], choice: Choice
) -> Estimate:
    """Return the estimate for one of several processes among which networks in training
    are sharded.
    """
    assert choice.sharding is not None
    offloads = choice.sharding.offload
    gives_up = choice.sharding.reshard_after_forward
    weights = dict(whole.weights)
    trained = numbers = together = ram = 0
    for name, size in sizes.items():
        if not size.trained:
            continue
        kept = choice.kept.get(name, AS_LOADED)
        own = as_divided(size, kept, choice.processes, gives_up)
        weights[name] = 0 if offloads else own.frozen
        ram += own.frozen
        trained += own.trained
        numbers += own.numbers
        together += own.together
    gradients = numbers * TRAINED
    optimizer = int(numbers * choice.state_bytes)
    average = numbers * TRAINED if whole.average else 0
    if offloads:
        ram += whole.ram + trained + gradients + optimizer + average
        trained = gradients = optimizer = average = 0
    return replace(
        whole,
        weights=weights,
        trained=trained,
        gradients=gradients,
        optimizer=optimizer,
        average=average,
        ram=ram if offloads else whole.ram,
        together=together,
    )


def _places(
    sizes: Mapping[str, ComponentSize], kept: Mapping[str, Kept]
) -> tuple[dict[str, int], int, int, int]:
    """Return what is always on the device, by component; the most that is there while a
    unit uses it; what is in RAM; and the most that a stored weight takes restored.
    """
    weights = {}
    offloaded = ram = restored = 0
    for name, size in sizes.items():
        how = kept.get(name, AS_LOADED)
        place = as_kept(size, how)
        weights[name] = 0 if how.offloaded else place.device
        ram += place.ram
        restored = max(restored, CAST * place.largest_stored)
        if how.offloaded:
            offloaded = max(offloaded, place.device)
            ram += place.device
    return weights, offloaded, ram, restored
