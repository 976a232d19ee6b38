"""A linear layer whose frozen weight is quantized, and restored for each
product.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from dstrain.plugin.functional import StoredLinear
from torch import Tensor, nn
from torch.nn import functional

Restore = Callable[[Sequence[Tensor], torch.dtype], Tensor]
"""(stored tensors, dtype) -> the weight (out, in) in that dtype, always the same."""


class QuantizedLinear(StoredLinear):
    """Computes what an `nn.Linear` with the restored weight computes, bit for bit, and
    so does its backward pass.
    """

    def __init__(
        self,
        linear: nn.Linear,
        stored: Sequence[Tensor],
        restore: Restore,
        dtype: torch.dtype,
    ) -> None:
        """Store the weight of a layer; the bias stays the layer's own.

        Args:
            linear: The layer; its weight is not read.
            stored: The stored weight as int8, then tensors such as scales.
            restore: Restores the weight from these.
            dtype: The dtype that the layer computes in without autocast.
        """
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        # int8 whatever the bits mean: networks ask for the dtype of a weight, cast their
        # input to it if it is a floating-point one, and T5 does so unless it is int8.
        # gloo, which cannot send float8, can send it.
        packed, *scales = stored
        self.weight = nn.Parameter(packed.view(torch.int8), requires_grad=False)
        self.register_parameter("bias", linear.bias)
        for index, scale in enumerate(scales):
            # No state dict has them: names and shapes are those of the plain network.
            self.register_buffer(f"scale_{index}", scale, persistent=False)
        self.scale_names = tuple(f"scale_{index}" for index in range(len(scales)))
        self.restore = restore
        self.dtype = dtype

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """Return the stored weight and what it is restored with."""
        return (self.weight, *(getattr(self, name) for name in self.scale_names))

    def restored(self) -> Tensor:
        """Return the weight (out, in) that the layer computes with."""
        return self.restore(tuple(one.detach() for one in self.stored), self.dtype)

    @property
    def W_q(self) -> Tensor:
        """Return the stored weight: peft calls `dequantize` of a layer that has this."""
        return self.weight

    def dequantize(self) -> Tensor:
        """Return the restored weight (out, in), which DoRA computes with."""
        return self.restore(self.stored, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b: (..., in) -> (..., out)."""
        dtype = self.dtype
        bias: Tensor | None = self.bias
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x = x.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        product: Tensor = _Product.apply(  # type: ignore[no-untyped-call]  # of torch
            x, bias, self.restore, self.dtype, dtype, *self.stored
        )
        return product

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Scales that a change of the network's dtype would round stay as they are.
        scales = {name: self._buffers[name] for name in self.scale_names}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # of torch
        for name, before in scales.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self


class _Product(torch.autograd.Function):
    """The product with a weight that is restored in each pass.

    A restored weight that autograd kept from the forward to the backward pass would take
    the memory that storing it saves; it keeps the stored one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        restore: Restore,
        own: torch.dtype,
        dtype: torch.dtype,
        *stored: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*stored)
        ctx.restore = restore
        ctx.own = own
        return functional.linear(x, restore(stored, own).to(dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        stored = ctx.saved_tensors
        weight = ctx.restore(stored, ctx.own).to(gradient.dtype)
        return gradient @ weight, *(None for _ in range(4 + len(stored)))
