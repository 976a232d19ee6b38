"""Add up what a run needs on its device, and in RAM, at the peak."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dstrain.plugin import PlannedComponent, PlannedRun

from dstrain_planner.memory.activations import Activations
from dstrain_planner.memory.sharded import as_divided

TRAINED = 4
"""Bytes of a number that is trained: it is in fp32."""
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


def estimate(run: PlannedRun, counted: Activations | None, stage: str) -> Estimate:
    """Estimate a stage.

    Args:
        run: What is loaded and trained, and how it is kept.
        counted: The activations of a step; None if they are not known.
        stage: 'data_process', or another for one that trains.
    """
    names = run.loaded(stage)
    sizes = {name: run.components[name] for name in names if name in run.components}
    weights, offloaded, ram, restored = _places(run, sizes)
    # What a unit computes with a stored weight is computed with the restored one.
    encoding = None if counted is None else counted.encoding + offloaded + restored
    if stage == "data_process":
        return Estimate(weights, 0, 0, 0, 0, encoding, ram)
    config = run.config
    numbers = sum(one.trained for one in sizes.values())
    # Weights that are in bf16 are computed with as they are.
    number, copied = (
        (CAST, 0) if run.setup.optimizer.rounds else (TRAINED, numbers * CAST)
    )
    activations = None
    if counted is not None and encoding is not None:
        activations = restored + counted.kept(
            run.setup.checkpoints,
            config.use_gradient_checkpointing_offload,
            copied if run.setup.mixed_precision == "bf16" else 0,
        )
        if not stage:
            # Units run before the step keeps anything.
            activations = max(activations, encoding)
    found = Estimate(
        weights=weights,
        trained=numbers * number,
        gradients=numbers * number,
        optimizer=int(numbers * run.optimizer_bytes),
        average=numbers * TRAINED if config.ema_decay is not None else 0,
        activations=activations,
        ram=ram,
    )
    return found if run.sharding is None else _divided(found, sizes, run)


def _divided(
    whole: Estimate, sizes: Mapping[str, PlannedComponent], run: PlannedRun
) -> Estimate:
    """Return the estimate for one of several processes among which networks in training
    are sharded.
    """
    assert run.sharding is not None
    offloads = run.sharding.offload
    gives_up = run.sharding.reshard_after_forward
    weights = dict(whole.weights)
    trained = numbers = together = ram = 0
    for name, size in sizes.items():
        if not size.trained:
            continue
        own = as_divided(size, run.kept[name], run.processes, gives_up)
        weights[name] = 0 if offloads else own.frozen
        ram += own.frozen
        trained += own.trained
        numbers += own.numbers
        together += own.together
    gradients = numbers * TRAINED
    optimizer = int(numbers * run.optimizer_bytes)
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
    run: PlannedRun, sizes: Mapping[str, PlannedComponent]
) -> tuple[dict[str, int], int, int, int]:
    """Return what is always on the device, by component; the most that is there while a
    unit uses it; what is in RAM; and the most that a stored weight takes restored.
    """
    weights = {}
    offloaded = ram = restored = 0
    for name in sizes:
        kept = run.kept[name]
        weights[name] = 0 if kept.is_offloaded else kept.device
        ram += kept.ram
        restored = max(restored, CAST * kept.largest_stored)
        if kept.is_offloaded:
            offloaded = max(offloaded, kept.device)
            ram += kept.device
    return weights, offloaded, ram, restored
