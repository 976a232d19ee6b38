"""Say where tensors differ."""

from torch import Tensor

EXACT = 1e-5
"""Greatest difference from the published pipeline's latents."""


def greatest_difference(ours: Tensor, published: Tensor) -> tuple[float, str]:
    """Return the greatest difference, and its position with both values in words.

    Positions where `published` is NaN are left out. Tensors of different shapes differ
    by infinity.
    """
    if ours.shape != published.shape:
        shapes = f"{list(ours.shape)}, published {list(published.shape)}"
        return float("inf"), f"in shape: {shapes}"
    difference = (ours.double() - published.double()).abs()
    compared = difference.masked_fill(published.isnan(), 0)
    # NaN is greater than nothing, and would pass.
    most = compared.nan_to_num(float("inf")).flatten().argmax().item()
    where = position(ours, int(most))
    return compared.nan_to_num(float("inf")).flatten()[int(most)].item(), (
        f"most at {where}: {ours.flatten()[int(most)].item():.6g}, "
        f"published {published.flatten()[int(most)].item():.6g}"
    )


def position(tensor: Tensor, index: int) -> str:
    """Return the position of an element of the flattened tensor as an index into the
    tensor: '[0, 3, 1]'.
    """
    found = []
    for length in reversed(tensor.shape):
        index, place = divmod(index, length)
        found.append(place)
    return str(found[::-1])
