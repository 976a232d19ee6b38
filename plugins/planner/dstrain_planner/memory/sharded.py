"""What one of several processes has of a network that is sharded among them."""

from dataclasses import dataclass

from dstrain.plugin import KeptWeights, PlannedComponent


@dataclass(frozen=True)
class DividedBytes:
    """What one process has of a network that is sharded among several."""

    frozen: int
    """Bytes of its rows of what is not trained, and of buffers."""
    trained: int
    """Bytes of its rows of what is trained."""
    numbers: int
    """How many numbers those are."""
    together: int
    """Bytes of whole weights on the device at the peak of a step: those of no block and
    of two blocks, or all."""


def as_divided(
    component: PlannedComponent, kept: KeptWeights, processes: int, gives_up: bool
) -> DividedBytes:
    """Return what a process has of a network, of those with the most.

    Args:
        component: The network.
        kept: How its weights are kept.
        processes: How many it is sharded among.
        gives_up: Whether a block's weights are given up after its forward pass.
    """
    frozen = trained = numbers = 0
    whole: dict[int, int] = {}
    for one, size in zip(component.tensors, kept.sizes, strict=True):
        if not one.is_parameter or not one.shape:
            frozen += size
            continue
        rows = -(-one.shape[0] // processes)
        own = size * rows // one.shape[0]
        if one.is_trained:
            trained += own
            numbers += one.numbers * rows // one.shape[0]
        else:
            frozen += own
        whole[one.block] = whole.get(one.block, 0) + size
    outside = whole.pop(-1, 0)
    blocks = sorted(whole.values())
    # One computes, and the next is put together meanwhile.
    together = outside + sum(blocks[-2:] if gives_up else blocks)
    return DividedBytes(frozen, trained, numbers, together)
