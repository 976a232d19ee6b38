"""LoRA layers (Hu et al. 2021, "LoRA: low-rank adaptation of large language models"),
through peft.

y = W x + (alpha / rank) B A x. Files have the layout that diffusers loads exactly: keys
`<prefix>.<layer>.lora_A.weight` and, because those alone say nothing of alpha, the header `lora_adapter_metadata`.
"""

import difflib
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.errors import StateError, UsageError
from dstrain.storage.safetensors import with_checksum, write_tensors

ADAPTER = "default"
ADAPTER_HEADER = "lora_adapter_metadata"


@dataclass(frozen=True)
class LoraConfig:
    """LoRA layers to add to one component.

    targets: patterns of layer names; a layer matches when its dotted name is the
    pattern or ends with '.' + pattern, in which `*` stands for anything.
    """

    component: str
    targets: tuple[str, ...]
    rank: int
    alpha: float


@dataclass(frozen=True)
class LoraLayer:
    """One layer's LoRA, of which the effect is (alpha / rank) up down.

    down: (rank, in), and the kernel's axes of a convolution. up: (out, rank). An
    embedding's `in` is its vocabulary.
    """

    down: Tensor
    up: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        """The number of rows of `down`, and of columns of `up`."""
        return len(self.down)


def inject(
    module: nn.Module, lora_config: LoraConfig, aliases: Mapping[str, tuple[str, ...]]
) -> dict[str, int]:
    """Freeze the module, add trainable fp32 LoRA layers, and return how many layers
    each target matched.

    aliases: other name of a target -> patterns. Initial numbers come from torch's
    global generator: seed it before. Raises UsageError for a target that matches
    nothing, naming the nearest layers, or that no LoRA layer can wrap.
    """
    if not lora_config.targets:
        raise UsageError(
            "--lora_target_modules", f"names no layer of {lora_config.component}"
        )
    patterns = {
        target: aliases.get(target, (target,)) for target in lora_config.targets
    }
    layers = {
        pattern: _matched(module, pattern, lora_config.component)
        for group in patterns.values()
        for pattern in group
    }
    nothing = [
        target
        for target, group in patterns.items()
        if not any(layers[pattern] for pattern in group)
    ]
    if nothing:
        lines = [
            f"nearest to {target!r}: {_nearest(module, patterns[target][0])}"
            for target in nothing[:3]
        ]
        what = f"no layer of {lora_config.component} matches {', '.join(map(repr, nothing))}"
        raise UsageError("--lora_target_modules", what, *lines)
    module.requires_grad_(False)
    # peft compares endings alone: where a pattern has a `*`, it gets the names
    # themselves.
    named = [
        name
        for pattern, names in layers.items()
        for name in (names if "*" in pattern else [pattern])
    ]
    for parameter in _add(
        module,
        _config(lora_config.rank, lora_config.alpha, sorted(set(named))),
        ADAPTER,
    ).values():
        parameter.requires_grad_(True)
    return {
        target: sum(len(layers[pattern]) for pattern in group)
        for target, group in patterns.items()
    }


def lora_state(module: nn.Module) -> dict[str, Tensor]:
    """The trained LoRA weights by peft's names (`<layer>.lora_A.weight`), sharing
    memory with the module.

    Raises StateError if `inject` or `add_layers` added none.
    """
    return _state(module, ADAPTER)


def save_lora(
    path: Path,
    module: nn.Module,
    lora_config: LoraConfig,
    prefix: str,
    metadata: Mapping[str, Any],
) -> None:
    """Write the trained LoRA weights, fp32, so that `diffusers` loads them exactly for
    any alpha.

    prefix: what diffusers calls the component ('transformer'); '' for none. metadata:
    family, base, step, versions and the like; what is not a string is kept as JSON.
    Raises SystemFault.
    """
    adapter = {
        "r": lora_config.rank,
        "lora_alpha": lora_config.alpha,
        "target_modules": _targets(module),
    }
    text = json.dumps(
        {_key(prefix, name): value for name, value in adapter.items()}, sort_keys=True
    )
    tensors = {
        _key(prefix, name): tensor for name, tensor in lora_state(module).items()
    }
    write_tensors(
        path,
        tensors,
        with_checksum(
            tensors,
            {ADAPTER_HEADER: text, **lora_header(module, lora_config, metadata)},
        ),
    )


def lora_header(
    module: nn.Module, lora_config: LoraConfig, metadata: Mapping[str, Any]
) -> dict[str, str]:
    """What a file of the trained layers says of itself in any program's names; metadata
    as in `save_lora`.
    """
    targets = ",".join(_targets(module))
    ours = {
        "component": lora_config.component,
        "rank": lora_config.rank,
        "alpha": lora_config.alpha,
        "targets": targets,
    }
    return {
        "format": "pt",
        **{name: _text(value) for name, value in {**metadata, **ours}.items()},
    }


def lora_layers(module: nn.Module, lora_config: LoraConfig) -> dict[str, LoraLayer]:
    """The trained layers by the module's own names, sharing memory with it."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in lora_state(module).items():
        name, _, part = key.rpartition(".lora_")
        parts.setdefault(name, {})[part.removeprefix("embedding_")[0]] = tensor
    return {
        name: LoraLayer(found["A"], found["B"], lora_config.alpha)
        for name, found in parts.items()
    }


@torch.no_grad()
def add_layers(
    module: nn.Module,
    layers: Mapping[str, LoraLayer],
    scale: float = 1.0,
    adapter_name: str = ADAPTER,
) -> None:
    """Add an adapter with these layers, by name, frozen; ranks and alphas may differ
    between them.

    scale: factor of the adapter's effect. Adapters of other names stay active; no other
    parameter changes. The layers' names and shapes are those of the module
    (`lora_files.read_lora` makes sure).
    """
    trainable = [
        parameter for parameter in module.parameters() if parameter.requires_grad
    ]
    (rank, alpha), _ = Counter(
        (layer.rank, layer.alpha) for layer in layers.values()
    ).most_common(1)[0]
    exactly = {
        name: f"^{re.escape(name)}" for name in layers
    }  # peft compares endings, where nothing says otherwise
    config = _config(rank, alpha, "|".join(map(re.escape, layers)))
    config.rank_pattern = {
        exactly[name]: layer.rank
        for name, layer in layers.items()
        if layer.rank != rank
    }
    config.alpha_pattern = {
        exactly[name]: layer.alpha
        for name, layer in layers.items()
        if layer.alpha != alpha
    }
    _add(module, config, adapter_name)
    for parameter in trainable:
        parameter.requires_grad_(True)
    _copy(layers, _state(module, adapter_name))
    for name, layer in _lora_layers(module).items():
        if name in layers:
            layer.set_scale(adapter_name, scale)


@torch.no_grad()
def load_layers(
    module: nn.Module,
    layers: Mapping[str, LoraLayer],
    lora_config: LoraConfig,
    where: str,
    optional_layers: Collection[str] = (),
) -> None:
    """Fill the layers that `inject` added; raises StateError unless names, ranks and
    alphas are the same on both sides.

    spare: layers that no loss reaches: the file may lack them, and may have others if
    these have no effect.
    """
    for layer in layers.values():
        _check_same(where, layer, lora_config)
    state = _state(module, ADAPTER)
    inside = {name.rpartition(".lora_")[0] for name in state}
    without_effect = {
        name for name in optional_layers if name in layers and not layers[name].up.any()
    }
    faults = {
        "in the file, and not trained": sorted(layers.keys() - inside - without_effect),
        "trained, and not in the file": sorted(
            inside - layers.keys() - set(optional_layers)
        ),
    }
    lines = [
        f"{len(names)} layers {what}: {first_few(names)}"
        for what, names in faults.items()
        if names
    ]
    if lines:
        what = f"does not fit: it has LoRA on {len(layers)} layers, and {len(inside)} are trained"
        raise StateError(
            where, what, *lines, "--lora_target_modules says which layers are trained"
        )
    _copy(
        layers,
        {
            name: value
            for name, value in state.items()
            if name.rpartition(".lora_")[0] in layers
        },
    )


@torch.no_grad()
def merge_layers(module: nn.Module, layers: Mapping[str, LoraLayer]) -> None:
    """Add the layers' effect to the module's own weights: computed in fp32, then
    rounded to the weights' dtype.
    """
    for name, layer in layers.items():
        owner = module.get_submodule(name)
        weight = owner.weight
        assert isinstance(weight, Tensor)
        change = (
            layer.alpha
            / layer.rank
            * (layer.up.float().flatten(1) @ layer.down.float().flatten(1))
        )
        change = change.T if isinstance(owner, nn.Embedding) else change
        weight.copy_(weight.float() + change.reshape(weight.shape).to(weight.device))


def first_few(names: Iterable[str], count: int = 3) -> str:
    """The first few of some names, in words."""
    every = list(names)
    return ", ".join(every[:count]) + ", ..." * (len(every) > count)


def _copy(layers: Mapping[str, LoraLayer], state: Mapping[str, Tensor]) -> None:
    for key, tensor in state.items():
        name, _, part = key.rpartition(".lora_")
        layer = layers[name]
        tensor.copy_(
            layer.down if part.removeprefix("embedding_").startswith("A") else layer.up
        )


def _targets(module: nn.Module) -> list[str]:
    return sorted(_configs(module)[ADAPTER].target_modules)


def _key(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _configs(module: nn.Module) -> dict[str, Any]:
    """Adapter name -> peft's configuration."""
    found: dict[str, Any] = getattr(module, "peft_config", {})
    return found


def _lora_layers(module: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, LoraLayer)
    }


def _state(module: nn.Module, adapter_name: str) -> dict[str, Tensor]:
    from peft.utils import get_peft_model_state_dict

    if adapter_name not in _configs(module):
        raise StateError(
            type(module).__name__, f"has no LoRA layers named {adapter_name!r}"
        )
    state: dict[str, Tensor] = get_peft_model_state_dict(
        module, adapter_name=adapter_name, save_embedding_layers=False
    )
    return state


def _config(rank: int, alpha: float, targets: list[str] | str) -> Any:
    import peft

    return peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets)


def _add(module: nn.Module, config: Any, adapter_name: str) -> dict[str, nn.Parameter]:
    """Add an adapter in fp32 beside those there, all active and frozen; return its
    parameters by name.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.tuners_utils import cast_adapter_dtype

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Already found a `peft_config`"
        )  # several adapters are meant
        inject_adapter_in_model(config, module, adapter_name)
    cast_adapter_dtype(module, adapter_name)
    names = list(_configs(module))
    for layer in _lora_layers(module).values():
        layer.set_adapter(names, inference_mode=True)
    marks = (f".{adapter_name}", f".{adapter_name}.weight")
    return {
        name: p
        for name, p in module.named_parameters()
        if "lora_" in name and name.endswith(marks)
    }


def _layers(module: nn.Module) -> dict[str, bool]:
    """The module's own parts by name, none of LoRA layers added to it, and whether a
    LoRA layer can wrap each.
    """
    kinds = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    added = _lora_layers(module)
    inside = tuple(f"{name}." for name in added)
    own = {
        name: layer
        for name, layer in module.named_modules()
        if name and not name.startswith(inside)
    }
    return {
        name: name in added or isinstance(layer, kinds) for name, layer in own.items()
    }


def _matched(module: nn.Module, pattern: str, component: str) -> list[str]:
    found = {
        name: fits
        for name, fits in _layers(module).items()
        if fnmatchcase(f".{name}", f"*.{pattern}")
    }
    for name, fits in found.items():
        if not fits:
            kind = type(module.get_submodule(name)).__name__
            what = f"{pattern!r} matches {component}.{name}, a {kind}, which no LoRA layer can wrap"
            raise UsageError(
                "--lora_target_modules", what, f"nearest: {_nearest(module, pattern)}"
            )
    return list(found)


def _nearest(module: nn.Module, pattern: str) -> str:
    """Up to three patterns that would match and look most like this one."""
    names = [name.split(".") for name, fits in _layers(module).items() if fits]
    tails = {".".join(name[-length:]) for name in names for length in (1, 2, 3)}
    usable = sorted(tail for tail in tails if not tail[0].isdigit())
    return (
        ", ".join(difflib.get_close_matches(pattern, usable, n=3, cutoff=0.0))
        or "none: it has no such layer"
    )


def _check_same(where: str, layer: LoraLayer, lora_config: LoraConfig) -> None:
    for name, flag, have, want in (
        ("rank", "--lora_rank", layer.rank, lora_config.rank),
        ("alpha", "--lora_alpha", layer.alpha, lora_config.alpha),
    ):
        if not math.isclose(have, want, rel_tol=1e-6):  # files keep alpha in fp32
            what = f"has {name} = {have:g}, the LoRA layers in training have {want:g}"
            raise StateError(where, what, f"give {flag} {have:g}")


@dataclass(frozen=True)
class Trainables:
    """full: component names, or dotted parts of one ('dit.transformer_blocks.3'). lora:
    LoRA layers to add.
    """

    full: tuple[str, ...] = ()
    lora: tuple[LoraConfig, ...] = ()

    @property
    def components(self) -> tuple[str, ...]:
        """The components that are trained, each once."""
        names = [name.partition(".")[0] for name in self.full] + [
            lora_config.component for lora_config in self.lora
        ]
        return tuple(dict.fromkeys(names))
