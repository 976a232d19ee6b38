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

from dstrain.console import number_of
from dstrain.errors import StateError, UsageError, first_few, nearest
from dstrain.lazy import import_name, without_optional
from dstrain.lora.layer_names import (
    base_shapes,
    is_target,
    layers_of,
    numbers_of_layers,
)
from dstrain.lora.layers import Layer, LoraConfig
from dstrain.lora.types import LoraType, type_named, type_of
from dstrain.models import StoredLinear
from dstrain.storage.tensor_writer import whole


@torch.no_grad()
def load_layers(
    own: Mapping[str, Layer],
    layers: Mapping[str, Layer],
    path: Path,
    optional_layers: Collection[str] = (),
) -> None:
    """Fill the layers that `inject` added.

    Raises StateError unless names, ranks and alphas are those in training; the file may
    lack optional layers, which no loss reaches, and have others if these have no effect.
    """
    for name, layer in layers.items():
        if name in own:
            _check(name, layer, own[name], path)
    trained = own.keys()
    others = sorted(layers.keys() - trained)
    acting = (name for name in others if layers[name].acts)
    untrained = sorted({*others} - {*optional_layers} | {*acting})
    absent = sorted(trained - layers.keys() - set(optional_layers))
    lines = []
    for difference, names in (
        ("in the file but not trained", untrained),
        ("trained but not in the file", absent),
    ):
        if names:
            count = number_of(len(names), "layer")
            lines.append(f"{count} {difference}: {first_few(names)}")
    if lines:
        advice = "--lora_target_modules chooses the layers to train"
        what = f"does not fit: it has LoRA on {number_of(len(layers), 'layer')}, but {len(trained)} are trained"
        raise StateError(path, what, *lines, advice)
    for name in trained & layers.keys():
        kind = type_named(own[name].type)
        with kind.naming:
            kind.fill(own[name], layers[name])


def _check(name: str, layer: Layer, trained: Layer, path: Path) -> None:
    """Refuse a layer of another type, rank or alpha than the one in training, or of a
    type with shapes of its own with other ones.
    """
    if layer.type != trained.type:
        what = f"contains {layer.type}, but the LoRA layers to train are {trained.type}"
        raise StateError(path, what, f"give --lora_type {layer.type}")
    kind = type_named(layer.type)
    with kind.naming:
        have, wanted = (kind.shapes_of(one) for one in (layer, trained))
    if have != wanted:
        what = f"has {kind.name} of {name} in tensors of shapes {have}, but {wanted} are to be trained"
        raise StateError(path, what, f"{kind.sizes} choose them")
    for number in ("rank", "alpha") if not have else ():
        own, other = (getattr(one, number) for one in (layer, trained))
        # Files store alpha in fp32.
        if not math.isclose(own, other, rel_tol=1e-6):
            what = f"has {number} {own:g} of {name}, to be trained with {other:g}"
            advice = f"give --lora_{number} {own:g}, or PATTERN={own:g} for some layers"
            raise StateError(path, what, advice)


ADAPTER = "default"
UP = re.compile(r"\.lora_(embedding_)?B(\.|$)")
"""What is in peft's name of an `up`."""


def inject(
    module: nn.Module, lora_config: LoraConfig, aliases: Mapping[str, tuple[str, ...]]
) -> dict[str, int]:
    """Freeze the module, add trainable fp32 LoRA layers, and count the layers that each
    target matched; an alias stands for several patterns.

    The initial values come from torch's global generator: seed it first. Raises
    UsageError for a target that matches nothing, naming the nearest layers, or that
    LoRA cannot wrap, and for a pattern of ranks or alphas that matches none.
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
        advice = f"its layers: {first_few(layers)}"
        raise UsageError("--lora_target_modules", what, advice)
    wanted = [name for name in layers if name in chosen]
    settings, ranks = _numbers(wanted, lora_config, aliases)
    if lora_config.dropout:
        settings["lora_dropout"] = lora_config.dropout
    kind = type_named(lora_config.type)
    settings["target_modules"] = sorted(peft_targets)
    with kind.naming:
        _check_layers(module, ranks, kind)
        configuration = kind.configured(settings, dict(lora_config.settings))
    module.requires_grad_(False)
    try:
        _add(module, ADAPTER, configuration)
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


def lora_layers(
    module: nn.Module, state: Mapping[str, Tensor] | None = None
) -> dict[str, Layer]:
    """Return the trained layers by the module's own names, sharing memory with it.

    `state` is what `lora_state` returned, where it was called already: of a network that
    is sharded each process must call it, and equally often.
    """
    return _layers(module, lora_state(module) if state is None else state, ADAPTER)


def _layers(
    module: nn.Module, state: Mapping[str, Tensor], adapter_name: str
) -> dict[str, Layer]:
    """Return the layers of an adapter, sharing memory with its state."""
    wrapped = _lora_modules(module)
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        # A layer may lie inside another one that is wrapped.
        name = key
        while name not in wrapped:
            name = name.rpartition(".")[0]
        parts.setdefault(name, {})[key.removeprefix(f"{name}.")] = tensor
    found: dict[str, Layer] = {}
    for name, own in parts.items():
        kind = type_of(own)
        with kind.naming:
            rank, alpha = kind.numbers_of(wrapped[name], adapter_name)
            found[name] = kind.layer(own, rank, alpha)
    return found


@torch.no_grad()
def add_layers(
    module: nn.Module,
    layers: Mapping[str, Layer],
    scale: float = 1.0,
    adapter_name: str = ADAPTER,
) -> None:
    """Add an adapter with these layers, frozen; ranks and alphas may differ between
    layers.

    Adapters of other names stay active, and no other parameter changes. Raises
    UsageError for layers that have one where their types exclude each other.

    Args:
        module: The network.
        layers: By the module's own names, with fitting shapes (`read_lora` checks both).
        scale: A factor of the adapter's effect; only 1 for a type that does not scale.
        adapter_name: Its name.
    """
    trainable = [one for one in module.parameters() if one.requires_grad]
    _hold(module, layers, adapter_name)
    for one in trainable:
        one.requires_grad_(True)
    for layer in _lora_modules(module).values():
        if scale != 1 or hasattr(layer, "set_scale"):
            layer.set_scale(adapter_name, scale)


def _hold(module: nn.Module, layers: Mapping[str, Layer], adapter_name: str) -> None:
    """Add an adapter that has the numbers of these layers, all of one type."""
    ranks = {name: layer.rank for name, layer in layers.items()}
    alphas = {name: layer.alpha for name, layer in layers.items()}
    first = next(iter(layers))
    kind = type_named(layers[first].type, "--lora")
    _refuse_below(module, layers, kind)
    settings = _peft_numbers(ranks, ranks[first], alphas, alphas[first])
    settings["target_modules"] = "|".join(map(re.escape, layers))
    with kind.naming:
        kind.check(ranks, module, "--lora")
        _add(module, adapter_name, kind.to_hold(layers, settings))
        wrapped = _lora_modules(module)
        held = _layers(module, lora_state(module, adapter_name), adapter_name)
        for name, own in held.items():
            kind.hold(wrapped[name], adapter_name, own, layers[name])


def _check_layers(module: nn.Module, ranks: Mapping[str, int], kind: LoraType) -> None:
    """Refuse a type on layers that it is not for."""
    for name in ranks:
        layer: Any = module.get_submodule(name)
        own = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
        if not kind.stored and isinstance(own, StoredLinear):
            what = f"{kind.name} needs weights as loaded; {name} has another form"
            raise UsageError("--lora_type", what, "train lora")
        if kind.linear_only and not isinstance(own, nn.Linear):
            what = f"{kind.name} is for linear layers; {name} is {type(own).__name__}"
            advice = "leave it out of --lora_target_modules"
            raise UsageError("--lora_type", what, advice)
    kind.check(ranks, module, "--lora_type")


def _refuse_below(module: nn.Module, names: Collection[str], kind: LoraType) -> None:
    """Refuse types on layers that have another one already, where that would not be
    what was trained, or peft cannot have both on one layer.
    """
    lora = import_name("peft.tuners.lora", "LoraLayer")
    wrapped = _lora_modules(module)
    above = {k for k, one in wrapped.items() if kind.below and isinstance(one, lora)}
    taken = [name for name in names if name in wrapped and name not in above]
    if taken:
        what = f"{number_of(len(taken), 'layer')} with another LoRA below this {kind.name}: {first_few(taken)}"
        advice = "give one file for these layers"
        if kind.kind == LoraType.kind and not kind.below:
            advice = f"give the {kind.name} first"
        raise UsageError("--lora", what, advice)


def _numbers(
    layers: Collection[str],
    lora_config: LoraConfig,
    aliases: Mapping[str, tuple[str, ...]],
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the layers' ranks and alphas as peft's settings, and the rank of each."""
    found = numbers_of_layers("--lora_rank", layers, lora_config.ranks, aliases)
    ranks = {name: found.get(name, lora_config.rank) for name in layers}
    given = numbers_of_layers("--lora_alpha", layers, lora_config.alphas, aliases)
    alphas = {}
    for name in layers:
        other = ranks[name] if lora_config.alpha is None else lora_config.alpha
        alphas[name] = float(given.get(name, other))
    alpha = lora_config.rank if lora_config.alpha is None else lora_config.alpha
    return _peft_numbers(ranks, lora_config.rank, alphas, alpha), ranks


def _peft_numbers(
    ranks: Mapping[str, int], rank: int, alphas: Mapping[str, float], alpha: float
) -> dict[str, Any]:
    """Return peft's settings for ranks and alphas, mostly `rank` and `alpha`."""
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
    # One pattern for all: peft tries each on each layer. Without `^`, it would also match
    # layers whose names end with one of these.
    return {
        f"^(?:{'|'.join(map(re.escape, names))})": number
        for number, names in layers.items()
    }


def _lora_modules(module: nn.Module) -> dict[str, Any]:
    """Return the layers that peft has wrapped, by name."""
    kind = import_name("peft.tuners.tuners_utils", "BaseTunerLayer")
    return {
        name: layer for name, layer in module.named_modules() if isinstance(layer, kind)
    }


def _add(module: nn.Module, adapter_name: str, configuration: Any) -> None:
    """Add an adapter of peft in fp32 beside the others, all active and frozen."""
    inject_adapter = import_name("peft", "inject_adapter_in_model")
    cast_adapter = import_name("peft.tuners.tuners_utils", "cast_adapter_dtype")
    with warnings.catch_warnings(), without_optional(), _drawn_in_fp32(module):
        # peft warns of a second adapter; several are intended here.
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        inject_adapter(configuration, module, adapter_name)
    cast_adapter(module, adapter_name)
    adapters: Any = module.peft_config
    for layer in _lora_modules(module).values():
        layer.set_adapter(list(adapters), inference_mode=True)


@contextmanager
def _drawn_in_fp32(module: nn.Module) -> Iterator[None]:
    """Within, peft does not round the weights of new layers to the dtype of the layer
    that they are added to: they are the same however that one is stored.
    """
    every: list[Any] = list(module.modules())
    layers = [layer for layer in every if not hasattr(layer, "compute_dtype")]
    for layer in layers:
        # peft asks for it before the dtype of the weight.
        layer.compute_dtype = torch.float32
    try:
        yield
    finally:
        for layer in layers:
            del layer.compute_dtype
