"""A linear layer whose frozen weight a keeper stores in another form."""

from torch import Tensor, nn


class StoredLinear(nn.Linear):
    """A linear layer that restores its weight for each product; keepers make layers of it.

    `weight` is what it stores. LoRA is trained beside it, and nothing is merged into it.
    """

    def restored(self) -> Tensor:
        """Return the weight (out, in) that the layer computes with, detached."""
        raise NotImplementedError
