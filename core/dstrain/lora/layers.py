"""Add, fill and merge LoRA layers through peft.

LoRA (Hu et al. 2021, "LoRA: low-rank adaptation of large language models"):
y = W x + (alpha / rank) B A x.
"""

import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.errors import StateError, UsageError, first_few, nearest
from dstrain.lazy import import_name, without_quantizers
from dstrain.lora.key_names import base_shapes, layers_of
from dstrain.lora.key_parser import LoraWeights, parse_keys
from dstrain.storage.safetensors import whole

ADAPTER = "default"
UP = re.compile(r"\.lora_(embedding_)?B(\.|$)")
"""What is in peft's name of an `up`."""


@dataclass(frozen=True)
class LoraConfig:
    """The LoRA layers to add to one component."""

    component: str
    targets: tuple[str, ...]
    """Patterns of layer names. A layer matches if its dotted name is the pattern or
    ends with '.' + pattern; `*` stands for anything.
    """
    rank: int
    alpha: float


@dataclass(frozen=True)
class Trainables:
    """The parts of a pipeline to train."""

    full: tuple[str, ...] = ()
    """Component names, or dotted parts of one ('dit.transformer_blocks.3')."""
    lora: tuple[LoraConfig, ...] = ()

    @property
    def components(self) -> tuple[str, ...]:
        """Return the trained components, each once."""
        names = [name.partition(".")[0] for name in self.full]
        names += [lora_config.component for lora_config in self.lora]
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class LoraLayer:
    """The LoRA of one layer: (alpha / rank) up down."""

    down: Tensor
    """(rank, in), followed by the kernel's axes for a convolution. The `in` of an
    embedding is its vocabulary.
    """
    up: Tensor
    """(out, rank)."""
    alpha: float

    @property
    def rank(self) -> int:
        """Return the number of rows of `down`."""
        return len(self.down)

    @property
    def scale(self) -> float:
        """Return what up down is multiplied by."""
        return self.alpha / self.rank

    def with_alpha(self, alpha: float) -> "LoraLayer":
        """Return a layer with the same effect that has this alpha."""
        return replace(self, up=rescaled(self.up, self.alpha, alpha), alpha=alpha)

    def folded(self) -> "LoraLayer":
        """Return a layer with the same effect whose scale is 1: what files contain."""
        return self.with_alpha(float(self.rank))


def inject(
    module: nn.Module,
    lora_config: LoraConfig,
    aliases: Mapping[str, tuple[str, ...]],
) -> dict[str, int]:
    """Freeze the module, add trainable fp32 LoRA layers, and count the layers that each
    target matched.

    The initial values come from torch's global generator: seed it first. Raises
    UsageError for a target that matches nothing, naming the nearest layers, or that
    LoRA cannot wrap.

    Args:
        module: The network.
        lora_config: The layers to add.
        aliases: Other names of targets, each with the patterns it stands for.
    """
    layers = layers_of(base_shapes(module))
    counts = dict.fromkeys(lora_config.targets, 0)
    peft_targets: set[str] = set()
    for target in counts:
        for pattern in aliases.get(target, (target,)):
            matched = [
                name for name in layers if fnmatchcase(f".{name}", f"*.{pattern}")
            ]
            counts[target] += len(matched)
            # peft compares endings only: in place of a `*`, it gets the names.
            peft_targets.update(matched if "*" in pattern else [pattern])
    unmatched = [target for target, count in counts.items() if not count]
    if unmatched:
        names = ", ".join(map(repr, unmatched))
        endings = {name.rpartition(".")[2] for name in layers}
        hint = nearest(unmatched[0], endings) if len(unmatched) == 1 else ""
        what = f"no layer of {lora_config.component} matches {names}{hint}"
        raise UsageError(
            "--lora_target_modules", what, f"its layers: {first_few(layers)}"
        )
    module.requires_grad_(False)
    try:
        _add(
            module,
            ADAPTER,
            r=lora_config.rank,
            lora_alpha=lora_config.alpha,
            target_modules=sorted(peft_targets),
        )
    except ValueError as error:
        # A target also matches a module of a kind that peft cannot wrap.
        raise UsageError("--lora_target_modules", str(error)) from error
    for layer in _lora_modules(module):
        layer.set_requires_grad(ADAPTER)
    return counts


def rescaled(up: Tensor, alpha: float, new_alpha: float) -> Tensor:
    """Return `up` such that the effect with `new_alpha` is that of `up` with `alpha`,
    exactly if their ratio is a power of 2, else rounded to fp32.
    """
    # Files store alpha in fp32.
    if math.isclose(alpha, new_alpha, rel_tol=1e-6):
        return up
    return up.float() * alpha / new_alpha


def lora_state(module: nn.Module, adapter_name: str = ADAPTER) -> dict[str, Tensor]:
    """Return the weights of an adapter, by default the trained one, by peft's names
    (`<layer>.lora_A.weight`), sharing memory with the module.

    Those whose rows lie on several processes are put together, so that each of these
    must call this.
    """
    state_of = import_name("peft.utils", "get_peft_model_state_dict")
    state: dict[str, Tensor] = state_of(
        module, adapter_name=adapter_name, save_embedding_layers=False
    )
    return {name: whole(value) for name, value in state.items()}


def lora_layers(module: nn.Module, lora_config: LoraConfig) -> dict[str, LoraLayer]:
    """Return the trained layers by the module's own names, sharing memory with it."""
    return {
        name: LoraLayer(one.down, one.up, lora_config.alpha)
        for name, one in _weights(module, ADAPTER).items()
    }


@torch.no_grad()
def add_layers(
    module: nn.Module,
    layers: Mapping[str, LoraLayer],
    scale: float = 1.0,
    adapter_name: str = ADAPTER,
) -> None:
    """Add an adapter with these layers, frozen; ranks and alphas may differ between
    layers.

    Adapters of other names stay active, and no other parameter changes.

    Args:
        module: The network.
        layers: The layers by the module's own names, with fitting shapes (`read_lora`
            checks both).
        scale: A factor of the adapter's effect.
        adapter_name: The name of the adapter.
    """
    trainable = [
        parameter for parameter in module.parameters() if parameter.requires_grad
    ]
    first = next(iter(layers.values()))
    ranks = {}
    alphas = {}
    for name, layer in layers.items():
        # Without `^`, peft would also match layers whose names end with this one.
        pattern = f"^{re.escape(name)}"
        # peft tries every pattern on every layer, so only the exceptions get one.
        if layer.rank != first.rank:
            ranks[pattern] = layer.rank
        if layer.alpha != first.alpha:
            alphas[pattern] = layer.alpha
    _add(
        module,
        adapter_name,
        r=first.rank,
        lora_alpha=first.alpha,
        target_modules="|".join(map(re.escape, layers)),
        rank_pattern=ranks,
        alpha_pattern=alphas,
    )
    for parameter in trainable:
        parameter.requires_grad_(True)
    for name, added in _weights(module, adapter_name).items():
        added.down.copy_(layers[name].down)
        added.up.copy_(layers[name].up)
    for layer in _lora_modules(module):
        layer.set_scale(adapter_name, scale)


@torch.no_grad()
def load_layers(
    module: nn.Module,
    layers: Mapping[str, LoraLayer],
    lora_config: LoraConfig,
    path: Path,
    optional_layers: Collection[str] = (),
) -> None:
    """Fill the layers that `inject` added.

    Raises StateError unless names, ranks and alphas are those in training.

    Args:
        module: The network with LoRA layers.
        layers: The layers to copy from, by the module's own names.
        lora_config: The layers that `inject` added.
        path: The file that the layers are from.
        optional_layers: Layers that no loss reaches: the file may lack them, and may
            have others if these have no effect.
    """
    for layer in layers.values():
        for name in ("rank", "alpha"):
            have = getattr(layer, name)
            wanted = getattr(lora_config, name)
            # Files store alpha in fp32.
            if not math.isclose(have, wanted, rel_tol=1e-6):
                what = (
                    f"has {name} {have:g}, but the LoRA layers to train have {wanted:g}"
                )
                raise StateError(path, what, f"give --lora_{name} {have:g}")
    weights = _weights(module, ADAPTER)
    trained = weights.keys()
    untrained = [
        name
        for name in sorted(layers.keys() - trained)
        if name not in optional_layers or layers[name].up.any()
    ]
    absent = sorted(trained - layers.keys() - set(optional_layers))
    lines = []
    for difference, names in (
        ("in the file but not trained", untrained),
        ("trained but not in the file", absent),
    ):
        if names:
            lines.append(f"{len(names)} layers {difference}: {first_few(names)}")
    if lines:
        advice = "--lora_target_modules chooses the layers to train"
        what = f"does not fit: it has LoRA on {len(layers)} layers, but {len(trained)} are trained"
        raise StateError(path, what, *lines, advice)
    for name in trained & layers.keys():
        weights[name].down.copy_(layers[name].down)
        weights[name].up.copy_(layers[name].up)


@torch.no_grad()
def merge_layers(module: nn.Module, layers: Mapping[str, LoraLayer]) -> None:
    """Add the layers' effect to the module's own weights, as `merged` does."""
    for name, layer in layers.items():
        weight = module.get_parameter(f"{name}.weight")
        weight.copy_(merged(module.get_submodule(name), weight, layer))


@torch.no_grad()
def merged(module: nn.Module, weight: Tensor, layer: LoraLayer) -> Tensor:
    """Return the weight of a module with a layer's effect added, computed in fp32 and
    then rounded to the weight's dtype.
    """
    change = layer.scale * (layer.up.float().flatten(1) @ layer.down.float().flatten(1))
    if isinstance(module, nn.Embedding):
        change = change.T  # its weight is (vocabulary, channels)
    total = weight.float() + change.reshape(weight.shape).to(weight.device)
    return total.to(weight.dtype)


def _weights(module: nn.Module, adapter_name: str) -> dict[str, LoraWeights]:
    """Return the matrices of an adapter by layer, sharing memory with the module."""
    return parse_keys(Path(type(module).__name__), lora_state(module, adapter_name))


def _lora_modules(module: nn.Module) -> list[Any]:
    """Return the layers that peft has wrapped."""
    kind = import_name("peft.tuners.lora", "LoraLayer")
    return [layer for layer in module.modules() if isinstance(layer, kind)]


def _add(
    module: nn.Module,
    adapter_name: str,
    **settings: Any,
) -> None:
    """Add an adapter in fp32 beside the others, all active and frozen; the settings are
    those of `peft.LoraConfig`.
    """
    make_config = import_name("peft", "LoraConfig")
    inject_adapter = import_name("peft", "inject_adapter_in_model")
    cast_adapter = import_name("peft.tuners.tuners_utils", "cast_adapter_dtype")
    with warnings.catch_warnings(), without_quantizers(), _drawn_in_fp32(module):
        # peft warns of a second adapter; several are intended here.
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        inject_adapter(make_config(**settings), module, adapter_name)
    cast_adapter(module, adapter_name)
    adapters: Any = module.peft_config
    for layer in _lora_modules(module):
        layer.set_adapter(list(adapters), inference_mode=True)


@contextmanager
def _drawn_in_fp32(module: nn.Module) -> Iterator[None]:
    """Within, peft does not round the weights of new layers to the dtype of the layer
    that they are added to: they are the same however that one is stored.
    """
    layers: list[Any] = [
        layer for layer in module.modules() if not hasattr(layer, "compute_dtype")
    ]
    for layer in layers:
        # peft asks for it before the dtype of the weight.
        layer.compute_dtype = torch.float32
    try:
        yield
    finally:
        for layer in layers:
            del layer.compute_dtype
