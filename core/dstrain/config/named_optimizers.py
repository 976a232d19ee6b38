"""The optimizers that have a name, with what they are called with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

OWN_MUON = "dstrain.training.optimizers.muon.Muon"


@dataclass(frozen=True)
class NamedOptimizer:
    """Where an optimizer is from, and what it is called with."""

    path: str
    """Dotted path of its class."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments in place of the class's own defaults; --optimizer_args comes before."""
    install: str = ""
    """The distribution that contains it, for `pip install`."""
    learning_rate: float = 1e-4
    """The learning rate where none is given."""


def _bitsandbytes(name: str) -> NamedOptimizer:
    return NamedOptimizer(f"bitsandbytes.optim.{name}", install="bitsandbytes")


def _pytorch_optimizer(name: str) -> NamedOptimizer:
    return NamedOptimizer(f"pytorch_optimizer.{name}", install="pytorch-optimizer")


OPTIMIZERS: Mapping[str, NamedOptimizer] = MappingProxyType(
    {
        "adamw": NamedOptimizer("torch.optim.AdamW", {"fused": True}),
        "adafactor": NamedOptimizer(
            "transformers.Adafactor", {"relative_step": False, "scale_parameter": False}
        ),
        "adamw8bit": _bitsandbytes("AdamW8bit"),
        "paged_adamw8bit": _bitsandbytes("PagedAdamW8bit"),
        "lion8bit": _bitsandbytes("Lion8bit"),
        "paged_lion8bit": _bitsandbytes("PagedLion8bit"),
        "ademamix8bit": _bitsandbytes("AdEMAMix8bit"),
        "lion": _pytorch_optimizer("Lion"),
        "came": _pytorch_optimizer("CAME"),
        "stableadamw": _pytorch_optimizer("StableAdamW"),
        "soap": _pytorch_optimizer("SOAP"),
        "prodigy": NamedOptimizer(
            "prodigyopt.Prodigy", install="prodigyopt", learning_rate=1.0
        ),
        "schedulefree": NamedOptimizer(
            "schedulefree.AdamWScheduleFree", install="schedulefree"
        ),
        "muon": NamedOptimizer(OWN_MUON),
    }
)
"""Name -> optimizer, in the order of the guide."""


def named(name: str) -> NamedOptimizer:
    """Return the optimizer of a short name, or of a dotted path; a path that has a
    short name has its learning rate, and the class's own defaults.
    """
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    for one in OPTIMIZERS.values():
        if one.path == name:
            return NamedOptimizer(name, {}, one.install, one.learning_rate)
    return NamedOptimizer(name)
