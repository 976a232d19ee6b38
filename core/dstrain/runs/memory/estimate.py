"""Add up what a run needs on its device at the peak."""

from collections.abc import Mapping
from dataclasses import dataclass

from dstrain.config.options.train import TrainConfig
from dstrain.runs.memory.components import TRAINED
from dstrain.runs.memory.facts import Facts

RESERVE = 2**30
"""Bytes for the device's own context, its libraries and what the allocator rounds up."""
ADAMW = 8.0
"""Bytes of AdamW's state per trained number: two in fp32."""
CAST = 2
"""Bytes of a weight's copy in bf16, which autocast holds through a forward pass."""


@dataclass(frozen=True)
class Estimate:
    """Bytes on the device at the peak of one stage."""

    weights: Mapping[str, int]
    """Component -> its frozen weights and buffers as they are kept."""
    trained: int
    gradients: int
    optimizer: int
    activations: int | None
    """None where they are not known."""

    @property
    def least(self) -> int:
        """Return the bytes of all that is known."""
        static = sum(self.weights.values()) + self.trained
        return static + self.gradients + self.optimizer + (self.activations or 0)

    def fits(self, device: int) -> bool | None:
        """Return whether a device has the memory; None if that is not known."""
        if self.least + RESERVE > device:
            return False
        return None if self.activations is None else True


def estimate(
    facts: Facts, names: tuple[str, ...], config: TrainConfig, stage: str, mixed: bool
) -> Estimate:
    """Estimate a stage.

    Args:
        facts: What the run loads and trains.
        names: The components that the stage loads.
        config: The flags to estimate with.
        stage: 'data_process', or another for one that trains.
        mixed: Whether it computes in bf16.
    """
    sizes = {name: facts.components[name] for name in names if name in facts.components}
    weights = {name: one.frozen_bytes for name, one in sizes.items()}
    counted = facts.activations
    if stage == "data_process":
        encoding = None if counted is None else counted.encoding
        return Estimate(weights, 0, 0, 0, encoding)
    numbers = sum(one.trained for one in sizes.values())
    activations = None
    if counted is not None:
        activations = counted.kept(
            config.use_gradient_checkpointing,
            config.use_gradient_checkpointing_offload,
            numbers * CAST if mixed else 0,
        )
        if not stage:
            # Units run before the step keeps anything.
            activations = max(activations, counted.encoding)
    return Estimate(
        weights=weights,
        trained=sum(one.trained_bytes for one in sizes.values()),
        gradients=numbers * TRAINED,
        optimizer=int(numbers * ADAMW),
        activations=activations,
    )
