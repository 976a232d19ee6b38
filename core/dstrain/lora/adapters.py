"""Add LoRA layers to a network, and fill them, through peft."""

import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.errors import StateError, UsageError, first_few, nearest
from dstrain.lazy import import_name, without_quantizers
from dstrain.lora.key_names import base_shapes, layers_of
from dstrain.lora.key_parser import LoraWeights, parse_keys
from dstrain.lora.layers import LoraConfig, LoraLayer
from dstrain.lora.patterns import exact_pattern, is_target, numbers_of_layers
from dstrain.models.quantization.linear import StoredLinear
from dstrain.storage.safetensors import whole

ADAPTER = "default"
UP = re.compile(r"\.lora_(embedding_)?B(\.|$)")
"""What is in peft's name of an `up`."""


def inject(
    module: nn.Module,
    lora_config: LoraConfig,
    aliases: Mapping[str, tuple[str, ...]],
) -> dict[str, int]:
    """Freeze the module, add trainable fp32 LoRA layers, and count the layers that each
    target matched.

    The initial values come from torch's global generator: seed it first. Raises
    UsageError for a target that matches nothing, naming the nearest layers, or that
    LoRA cannot wrap, and for a pattern of ranks or alphas that matches none.

    Args:
        module: The network.
        lora_config: The layers to add.
        aliases: Other names of targets, each with the patterns it stands for.
    """
    layers = layers_of(base_shapes(module))
    counts = dict.fromkeys(lora_config.targets, 0)
    peft_targets: set[str] = set()
    chosen: set[str] = set()
    for target in counts:
        for pattern in aliases.get(target, (target,)):
            matched = [name for name in layers if is_target(name, pattern)]
            counts[target] += len(matched)
            chosen.update(matched)
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
    wanted = [name for name in layers if name in chosen]
    settings = _numbers(wanted, lora_config, aliases)
    if lora_config.dropout:
        settings["lora_dropout"] = lora_config.dropout
    if lora_config.type == "dora":
        _refuse_other_kinds(module, wanted)
        settings["use_dora"] = True
    module.requires_grad_(False)
    try:
        _add(module, ADAPTER, target_modules=sorted(peft_targets), **settings)
    except ValueError as error:
        # A target also matches a module of a kind that peft cannot wrap.
        raise UsageError("--lora_target_modules", str(error)) from error
    for layer in _lora_modules(module).values():
        layer.set_requires_grad(ADAPTER)
    return counts


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


def lora_names(module: nn.Module) -> list[str]:
    """Return the names of the layers that have LoRA."""
    return list(_lora_modules(module))


def lora_layers(module: nn.Module) -> dict[str, LoraLayer]:
    """Return the trained layers by the module's own names, sharing memory with it."""
    wrapped = _lora_modules(module)
    found = {}
    for name, one in _weights(module, ADAPTER).items():
        alpha = wrapped[name].lora_alpha[ADAPTER]
        found[name] = LoraLayer(one.down, one.up, alpha, one.magnitude)
    return found


@torch.no_grad()
def add_layers(
    module: nn.Module,
    layers: Mapping[str, LoraLayer],
    scale: float = 1.0,
    adapter_name: str = ADAPTER,
) -> None:
    """Add an adapter with these layers, frozen; ranks and alphas may differ between
    layers.

    Adapters of other names stay active, and no other parameter changes. Raises
    UsageError for DoRA on layers that have one.

    Args:
        module: The network.
        layers: The layers by the module's own names, with fitting shapes (`read_lora`
            checks both).
        scale: A factor of the adapter's effect; of DoRA, only 1 (`with_strength`).
        adapter_name: The name of the adapter.
    """
    trainable = [
        parameter for parameter in module.parameters() if parameter.requires_grad
    ]
    ranks = {name: layer.rank for name, layer in layers.items()}
    alphas = {name: layer.alpha for name, layer in layers.items()}
    first = next(iter(layers))
    settings = _peft_numbers(ranks, ranks[first], alphas, alphas[first])
    if layers[first].type == "dora":
        _refuse_others_below(module, layers)
        settings["use_dora"] = True
    targets = "|".join(map(re.escape, layers))
    _add(module, adapter_name, target_modules=targets, **settings)
    for parameter in trainable:
        parameter.requires_grad_(True)
    for name, added in _weights(module, adapter_name).items():
        _fill(added, layers[name])
    for layer in _lora_modules(module).values():
        layer.set_scale(adapter_name, scale)


@torch.no_grad()
def load_layers(
    module: nn.Module,
    layers: Mapping[str, LoraLayer],
    path: Path,
    optional_layers: Collection[str] = (),
) -> None:
    """Fill the layers that `inject` added.

    Raises StateError unless names, ranks and alphas are those in training.

    Args:
        module: The network with LoRA layers.
        layers: The layers to copy from, by the module's own names.
        path: The file that the layers are from.
        optional_layers: Layers that no loss reaches: the file may lack them, and may
            have others if these have no effect.
    """
    own = lora_layers(module)
    for name, layer in layers.items():
        if name in own:
            _check_type(layer, own[name], path)
            _check_numbers(name, layer, own, path)
    trained = own.keys()
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
        _fill(own[name], layers[name])


def _fill(own: LoraWeights | LoraLayer, layer: LoraLayer) -> None:
    """Copy a layer into the memory of another one of its type."""
    own.down.copy_(layer.down)
    own.up.copy_(layer.up)
    if own.magnitude is not None and layer.magnitude is not None:
        own.magnitude.copy_(layer.magnitude)


def _check_type(layer: LoraLayer, trained: LoraLayer, path: Path) -> None:
    """Refuse LoRA where DoRA is trained, and the other way round."""
    if layer.type != trained.type:
        what = f"contains {layer.type}, but the LoRA layers to train are {trained.type}"
        raise StateError(path, what, f"give --lora_type {layer.type}")


def _check_numbers(
    name: str,
    layer: LoraLayer,
    trained: Mapping[str, LoraLayer],
    path: Path,
) -> None:
    """Refuse a layer with another rank or alpha than the one in training."""
    for number in ("rank", "alpha"):
        have = getattr(layer, number)
        wanted = getattr(trained[name], number)
        # Files store alpha in fp32.
        if math.isclose(have, wanted, rel_tol=1e-6):
            continue
        if len({getattr(one, number) for one in trained.values()}) == 1:
            what = (
                f"has {number} {have:g}, but the LoRA layers to train have {wanted:g}"
            )
            raise StateError(path, what, f"give --lora_{number} {have:g}")
        what = (
            f"has {number} {have:g} of {name}, which is to be trained with {wanted:g}"
        )
        advice = f"--lora_{number} chooses it, for some layers as PATTERN=NUMBER"
        raise StateError(path, what, advice)


def _weights(module: nn.Module, adapter_name: str) -> dict[str, LoraWeights]:
    """Return the matrices of an adapter by layer, sharing memory with the module."""
    return parse_keys(Path(type(module).__name__), lora_state(module, adapter_name))


def with_strength(
    module: nn.Module, layers: Mapping[str, LoraLayer], strength: float
) -> dict[str, LoraLayer]:
    """Return DoRA layers that change the module's own weights `strength` times as much
    as these; the weights must be readable.
    """
    found = {}
    for name, layer in layers.items():
        linear = module.get_submodule(name)
        own = linear.get_parameter("weight")
        weight = linear.dequantize() if isinstance(linear, StoredLinear) else own
        found[name] = layer.at_strength(weight.detach().float(), strength)
    return found


def _refuse_other_kinds(module: nn.Module, names: Collection[str]) -> None:
    """Refuse DoRA on what is no linear layer."""
    for name in names:
        layer: Any = module.get_submodule(name)
        kind = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
        if not isinstance(kind, nn.Linear):
            what = f"dora is for linear layers; {name} is {type(kind).__name__}"
            raise UsageError(
                "--lora_type", what, "leave it out of --lora_target_modules"
            )


def _refuse_others_below(module: nn.Module, names: Collection[str]) -> None:
    """Refuse DoRA on layers that have a LoRA already: it rescales the model's own
    weights, and what it makes of those that another LoRA has changed was not trained.
    """
    wrapped = _lora_modules(module)
    taken = [name for name in names if name in wrapped]
    if taken:
        what = f"{len(taken)} layers have a LoRA below this DoRA: {first_few(taken)}"
        advice = "give the DoRA first, or merge one with --preset_lora_path in training"
        raise UsageError("--lora", what, advice)


def _numbers(
    layers: Collection[str],
    lora_config: LoraConfig,
    aliases: Mapping[str, tuple[str, ...]],
) -> dict[str, Any]:
    """Return the ranks and alphas that layers are to have, as peft's settings."""
    found = numbers_of_layers("--lora_rank", layers, lora_config.ranks, aliases)
    ranks = {name: found.get(name, lora_config.rank) for name in layers}
    given = numbers_of_layers("--lora_alpha", layers, lora_config.alphas, aliases)
    alphas = {}
    for name in layers:
        other = ranks[name] if lora_config.alpha is None else lora_config.alpha
        alphas[name] = float(given.get(name, other))
    alpha = lora_config.rank if lora_config.alpha is None else lora_config.alpha
    return _peft_numbers(ranks, lora_config.rank, alphas, alpha)


def _peft_numbers(
    ranks: Mapping[str, int],
    rank: int,
    alphas: Mapping[str, float],
    alpha: float,
) -> dict[str, Any]:
    """Return peft's settings for ranks and alphas by layer, most of which are `rank` and
    `alpha`.
    """
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": _exceptions(ranks, rank),
        "alpha_pattern": _exceptions(alphas, alpha),
    }


def _exceptions(numbers: Mapping[str, float], usual: float) -> dict[str, float]:
    """Return a pattern with each number that is not the usual one."""
    layers: dict[float, list[str]] = {}
    for name, number in numbers.items():
        if number != usual:
            layers.setdefault(number, []).append(name)
    return {exact_pattern(names): number for number, names in layers.items()}


def _lora_modules(module: nn.Module) -> dict[str, Any]:
    """Return the layers that peft has wrapped, by name."""
    kind = import_name("peft.tuners.lora", "LoraLayer")
    return {
        name: layer for name, layer in module.named_modules() if isinstance(layer, kind)
    }


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
    for layer in _lora_modules(module).values():
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
