"""Loops that do what a step of other programs does, on the same random weights, sample,
targets and rank.

`diffusers`: examples/dreambooth/train_dreambooth_lora_qwen_image.py with cached latents
and prompts: the network in bf16, or its linear layers as bitsandbytes' `Linear4bit`.
`reference`: `sft:train` of DiffSynth-Studio. With `--fp8_models` it keeps weights as
`float8_e4m3fn` without scales and casts each in every forward pass; with
`--enable_model_cpu_offload` each layer's frozen weights are copied to the device before
they are used, and dropped afterwards.

Both train peft's layers in bf16 with AdamW and gradient checkpointing.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import peft
import torch
from dstrain.models import components_of
from dstrain.models.placing import Place, keep
from dstrain.registry import load_family
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu.case import Case
from benchmarks.gpu.networks import DTYPE, WORKLOADS


class CastLinear(nn.Linear):
    """A layer whose weight is cast in every forward pass."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the product in bf16; autograd keeps the weight that was cast."""
        return functional.linear(input.to(DTYPE), self.weight.to(DTYPE), self.bias)


def cast_linear(linear: nn.Linear, weight: Tensor) -> nn.Linear:
    """Return the layer with its weight as fp8 without a scale."""
    layer = CastLinear(linear.in_features, linear.out_features, device="meta")
    layer.bias = linear.bias
    stored = weight.to(torch.float8_e4m3fn)
    layer.weight = nn.Parameter(stored, requires_grad=False)
    return layer


def linear_in_4bit(linear: nn.Linear, weight: Tensor) -> nn.Linear:
    """Return the layer as bitsandbytes' own, in nf4."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    layer: nn.Linear = Linear4bit(
        linear.in_features,
        linear.out_features,
        compute_dtype=DTYPE,
        quant_type="nf4",
        device="meta",
    )
    layer.bias = linear.bias
    stored = Params4bit(weight, requires_grad=False, quant_type="nf4")
    if stored.quant_state is None:
        stored = stored._quantize(weight.device)
    layer.weight = stored
    return layer


LINEARS: dict[str, Callable[[nn.Linear, Tensor], nn.Linear]] = {
    "fp8": cast_linear,
    "bitsandbytes_nf4": linear_in_4bit,
}


def store_of(case: Case) -> Place:
    """Return what stores a weight as the other programs do."""
    if not case.method:
        return keep
    stored_linear = LINEARS[case.method]
    family = load_family(WORKLOADS[case.model].family)
    as_loaded = components_of(family)[family.default_trainable].as_loaded

    def store(network: nn.Module, name: str, weight: Tensor) -> Tensor:
        layer, _, own = name.rpartition(".")
        linear = network.get_submodule(layer)
        is_whole = any(fnmatchcase(layer, one) for one in as_loaded)
        if own != "weight" or not isinstance(linear, nn.Linear) or is_whole:
            return weight
        stored = stored_linear(linear, weight)
        network.set_submodule(layer, stored)
        return stored.weight

    return store


class LayerInRam:
    """A layer whose frozen weights are on the device only while it computes."""

    def __init__(self, weights: Sequence[nn.Parameter], device: torch.device) -> None:
        self.weights = weights
        self.device = device
        self.masters = [self._in_ram(one.data) for one in weights]
        self.drop()

    def attach(self, layer: nn.Module) -> None:
        """Copy weights before each pass of the layer, and drop them after it."""
        layer.register_forward_pre_hook(self.load)
        layer.register_forward_hook(self.drop)
        layer.register_full_backward_pre_hook(self.load)
        layer.register_full_backward_hook(self.drop)

    def load(self, *_: Any) -> None:
        """Copy the weights to the device."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.untyped_storage().resize_(master.nbytes)
            weight.data.copy_(master, non_blocking=True)

    def drop(self, *_: Any) -> None:
        """Free the copies."""
        for weight in self.weights:
            # The shape stays: autograd compares it with that of the first pass.
            weight.untyped_storage().resize_(0)

    def _in_ram(self, weight: Tensor) -> Tensor:
        copy = weight.to("cpu", copy=True)
        return copy.pin_memory() if self.device.type == "cuda" else copy


def prepare(case: Case, network: nn.Module, device: torch.device) -> list[nn.Parameter]:
    """Make a network train as the other programs make it; return what is trained.

    Args:
        case: What is measured.
        network: The network, its weights stored.
        device: Where it computes.
    """
    family = load_family(WORKLOADS[case.model].family)
    targets = [*family.lora_targets[family.default_trainable]]
    options = peft.LoraConfig(r=case.rank, lora_alpha=case.rank, target_modules=targets)
    peft.inject_adapter_in_model(options, network)
    trained = [one for one in network.parameters() if one.requires_grad]
    for one in trained:
        one.data = one.data.to(DTYPE)
    network.enable_gradient_checkpointing()  # type: ignore[operator]  # of diffusers
    if case.swap:
        for layer in network.modules():
            frozen = [one for one in layer.parameters(False) if not one.requires_grad]
            if frozen:
                LayerInRam(frozen, device).attach(layer)
    network.train()
    return trained
