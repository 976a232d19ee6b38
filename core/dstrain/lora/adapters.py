"""Add LoRA layers to a network, and fill them, through peft."""

import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.config.options import LoraType
from dstrain.console import number_of
from dstrain.errors import UsageError, first_few, nearest
from dstrain.lazy import QUANTIZERS, hidden, import_name
from dstrain.lora.initial_layers import fill
from dstrain.lora.key_names import base_shapes, layers_of
from dstrain.lora.key_parser import LoraWeights, Weights, parse_keys
from dstrain.lora.layers import LoraConfig, LoraLayer
from dstrain.lora.lokr import Layer, LokrLayer
from dstrain.lora.patterns import exact_pattern, is_target, numbers_of_layers
from dstrain.models import StoredLinear
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
    kind = "LoraConfig"
    if lora_config.type != "lora":
        _refuse_other_kinds(module, wanted, lora_config.type)
    if lora_config.type == "dora":
        settings["use_dora"] = True
    if lora_config.type == "lokr":
        kind = "LoKrConfig"
        settings["alpha"] = settings.pop("lora_alpha")
        settings["decompose_factor"] = lora_config.factor
    module.requires_grad_(False)
    try:
        _add(module, ADAPTER, kind, target_modules=sorted(peft_targets), **settings)
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


def lora_layers(
    module: nn.Module, state: Mapping[str, Tensor] | None = None
) -> dict[str, Layer]:
    """Return the trained layers by the module's own names, sharing memory with it.

    Args:
        module: The network with LoRA layers.
        state: What `lora_state` returned, where it was called already: of a network that
            is sharded each process must call it, and equally often.
    """
    wrapped = _lora_modules(module)
    found: dict[str, Layer] = {}
    kind = Path(type(module).__name__)
    weights = parse_keys(kind, lora_state(module) if state is None else dict(state))
    for name, one in weights.items():
        layer = wrapped[name]
        if isinstance(one, LoraWeights):
            found[name] = one.layer(layer.lora_alpha[ADAPTER])
            continue
        rank, alpha = layer.r[ADAPTER], layer.alpha[ADAPTER]
        found[name] = LokrLayer(one.first, one.second, rank, alpha)
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
    pairs = {name: one for name, one in layers.items() if isinstance(one, LoraLayer)}
    if pairs:
        _add_pairs(module, pairs, adapter_name)
    else:
        _add_lokr(module, layers, adapter_name)
    for parameter in trainable:
        parameter.requires_grad_(True)
    for layer in _lora_modules(module).values():
        layer.set_scale(adapter_name, scale)


def _add_pairs(
    module: nn.Module, layers: Mapping[str, LoraLayer], adapter_name: str
) -> None:
    """Add LoRA or DoRA."""
    ranks = {name: layer.rank for name, layer in layers.items()}
    alphas = {name: layer.alpha for name, layer in layers.items()}
    first = next(iter(layers))
    settings = _peft_numbers(ranks, ranks[first], alphas, alphas[first])
    _refuse_below(module, layers, layers[first].type)
    if layers[first].type == "dora":
        settings["use_dora"] = True
    targets = "|".join(map(re.escape, layers))
    _add(module, adapter_name, target_modules=targets, **settings)
    for name, added in _weights(module, adapter_name).items():
        assert isinstance(added, LoraWeights)
        fill(added.layer(1.0), layers[name])


def _add_lokr(
    module: nn.Module, layers: Mapping[str, Layer], adapter_name: str
) -> None:
    """Add LoKr, whose matrices may have any shapes: they replace those of peft."""
    _refuse_below(module, layers, "lokr")
    for name in layers:
        if isinstance(module.get_submodule(name), StoredLinear):
            what = f"LoKr cannot be added to {name}, which is quantized"
            raise UsageError("--lora", what, "leave the component as it is loaded")
    targets = "|".join(map(re.escape, layers))
    settings = {"r": 1, "alpha": 1, "decompose_factor": 1}
    _add(module, adapter_name, "LoKrConfig", target_modules=targets, **settings)
    wrapped = _lora_modules(module)
    for name, layer in layers.items():
        assert isinstance(layer, LokrLayer)
        own = wrapped[name]
        device = own.lokr_w1[adapter_name].device
        for part in ("lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b"):
            matrices = getattr(own, part)
            if adapter_name in matrices:
                del matrices[adapter_name]
        for part, matrix in layer.folded().parts().items():
            weight = matrix.detach().float().to(device)
            getattr(own, part)[adapter_name] = nn.Parameter(weight, requires_grad=False)


def _weights(module: nn.Module, adapter_name: str) -> Mapping[str, Weights]:
    """Return the matrices of an adapter by layer, sharing memory with the module."""
    return parse_keys(Path(type(module).__name__), lora_state(module, adapter_name))


def with_strength(
    module: nn.Module, layers: Mapping[str, Layer], strength: float
) -> dict[str, Layer]:
    """Return DoRA layers that change the module's own weights `strength` times as much
    as these; the weights must be readable.
    """
    found: dict[str, Layer] = {}
    for name, layer in layers.items():
        assert isinstance(layer, LoraLayer)
        linear = module.get_submodule(name)
        own = linear.get_parameter("weight")
        weight = linear.dequantize() if isinstance(linear, StoredLinear) else own
        found[name] = layer.at_strength(weight.detach().float(), strength)
    return found


def _refuse_other_kinds(
    module: nn.Module, names: Collection[str], lora_type: LoraType
) -> None:
    """Refuse DoRA and LoKr on what is no linear layer, and LoKr on a quantized one."""
    for name in names:
        layer: Any = module.get_submodule(name)
        kind = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
        if lora_type == "lokr" and isinstance(kind, StoredLinear):
            what = f"lokr needs weights as they are loaded; {name} is quantized"
            raise UsageError("--lora_type", what, "train lora or dora")
        if not isinstance(kind, nn.Linear):
            what = f"{lora_type} is for linear layers; {name} is {type(kind).__name__}"
            advice = "leave it out of --lora_target_modules"
            raise UsageError("--lora_type", what, advice)


def _refuse_below(
    module: nn.Module, names: Collection[str], lora_type: LoraType
) -> None:
    """Refuse DoRA and LoKr on layers that have a LoRA already, and LoRA on LoKr.

    DoRA rescales the model's own weights, and what it makes of those that another LoRA
    has changed was not trained. peft cannot have LoKr and another on one layer.
    """
    lokr = import_name("peft.tuners.lokr", "LoKrLayer")
    wrapped = _lora_modules(module)
    taken = [
        name
        for name in names
        if name in wrapped and (lora_type != "lora" or isinstance(wrapped[name], lokr))
    ]
    if taken:
        kinds = {"dora": "a LoRA below this DoRA", "lokr": "a LoRA beside this LoKr"}
        kind = kinds.get(lora_type, "a LoKr beside this LoRA")
        what = f"{number_of(len(taken), 'layer')} with {kind}: {first_few(taken)}"
        advice = "give one file for these layers"
        if lora_type == "dora":
            advice = "give the DoRA first"
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
    kinds = (
        import_name("peft.tuners.lora", "LoraLayer"),
        import_name("peft.tuners.lokr", "LoKrLayer"),
    )
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, kinds)
    }


def _add(
    module: nn.Module,
    adapter_name: str,
    kind: str = "LoraConfig",
    **settings: Any,
) -> None:
    """Add an adapter in fp32 beside the others, all active and frozen; the settings are
    those of peft's configuration of that kind.
    """
    make_config = import_name("peft", kind)
    inject_adapter = import_name("peft", "inject_adapter_in_model")
    cast_adapter = import_name("peft.tuners.tuners_utils", "cast_adapter_dtype")
    with warnings.catch_warnings(), _as_linear_layers(), _drawn_in_fp32(module):
        # peft warns of a second adapter; several are intended here.
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        inject_adapter(make_config(**settings), module, adapter_name)
    cast_adapter(module, adapter_name)
    adapters: Any = module.peft_config
    for layer in _lora_modules(module).values():
        layer.set_adapter(list(adapters), inference_mode=True)


@contextmanager
def _as_linear_layers() -> Iterator[None]:
    """Within, peft imports no library that quantizes, unless it is imported already: it
    takes a layer of bitsandbytes for what it also is, a linear layer.
    """
    # peft remembers whether they are installed, from before and for afterwards.
    memories = [
        one
        for one in vars(import_module("peft.import_utils")).values()
        if hasattr(one, "cache_clear")
    ]
    try:
        with hidden(QUANTIZERS):
            for memory in memories:
                memory.cache_clear()
            yield
    finally:
        for memory in memories:
            memory.cache_clear()


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
