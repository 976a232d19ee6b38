"""LoRA layers (Hu et al. 2021, "LoRA: low-rank adaptation of large language models"), through peft.

y = W x + (alpha / rank) B A x. Files have the layout that diffusers loads exactly: keys
`<prefix>.<layer>.lora_A.weight` and, because those alone say nothing of alpha, the header `lora_adapter_metadata`.
"""

import difflib
import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dstrain.errors import StateError, UsageError
from dstrain.files import read_tensors, write_tensors

ADAPTER = "default"
ADAPTER_HEADER = "lora_adapter_metadata"
INERT = frozenset(
    {"r", "lora_alpha", "target_modules", "peft_version", "task_type", "init_lora_weights", "lora_dropout"}
    | {"inference_mode", "auto_mapping", "base_model_name_or_path", "revision"}
)
"""Fields of a peft configuration that are read, or that change nothing once the weights are loaded."""


@dataclass(frozen=True)
class LoraSpec:
    """LoRA layers to add to one component.

    targets: patterns of layer names; a layer matches when its dotted name is the pattern or ends with '.' + pattern,
    in which `*` stands for anything.
    """

    component: str
    targets: tuple[str, ...]
    rank: int
    alpha: float


def inject(module: nn.Module, spec: LoraSpec, aliases: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """Freeze the module, add trainable fp32 LoRA layers, and return how many layers each target matched.

    aliases: other name of a target -> patterns. Initial numbers come from torch's global generator: seed it before.
    Raises UsageError for a target that matches nothing, naming the nearest layers, or that no LoRA layer can wrap.
    """
    if not spec.targets:
        raise UsageError("--lora_target_modules", f"names no layer of {spec.component}")
    patterns = {target: aliases.get(target, (target,)) for target in spec.targets}
    layers = {pattern: _matched(module, pattern, spec.component) for group in patterns.values() for pattern in group}
    nothing = [target for target, group in patterns.items() if not any(layers[pattern] for pattern in group)]
    if nothing:
        lines = [f"nearest to {target!r}: {_nearest(module, patterns[target][0])}" for target in nothing[:3]]
        what = f"no layer of {spec.component} matches {', '.join(map(repr, nothing))}"
        raise UsageError("--lora_target_modules", what, *lines)
    module.requires_grad_(False)
    # peft compares endings alone: where a pattern has a `*`, it gets the names themselves.
    named = [name for pattern, names in layers.items() for name in (names if "*" in pattern else [pattern])]
    for parameter in _add(module, _config(spec.rank, spec.alpha, named), ADAPTER).values():
        parameter.requires_grad_(True)
    return {target: sum(len(layers[pattern]) for pattern in group) for target, group in patterns.items()}


def lora_state(module: nn.Module) -> dict[str, Tensor]:
    """The trained LoRA weights by peft's names (`<layer>.lora_A.weight`), sharing memory with the module.

    Raises StateError if `inject` or `load_lora` added none.
    """
    return _state(module, ADAPTER)


def save_lora(path: Path, module: nn.Module, spec: LoraSpec, prefix: str, metadata: Mapping[str, Any]) -> None:
    """Write the trained LoRA weights, fp32, so that `diffusers` loads them exactly for any alpha.

    prefix: what diffusers calls the component ('transformer'); '' for none. metadata: family, base, step, versions and
    the like; what is not a string is kept as JSON. Raises SystemFault.
    """
    layers = lora_state(module)
    targets = sorted(_configs(module)[ADAPTER].target_modules)
    adapter = {"r": spec.rank, "lora_alpha": spec.alpha, "target_modules": targets}
    ours = {"component": spec.component, "rank": spec.rank, "alpha": spec.alpha, "targets": ",".join(targets)}
    header = {
        "format": "pt",
        ADAPTER_HEADER: json.dumps({_key(prefix, name): value for name, value in adapter.items()}, sort_keys=True),
        **{name: _text(value) for name, value in {**metadata, **ours}.items()},
    }
    write_tensors(path, {_key(prefix, name): tensor for name, tensor in layers.items()}, header)


def load_lora(path: Path, module: nn.Module, prefix: str, scale: float = 1.0, adapter_name: str = ADAPTER) -> None:
    """Load a LoRA file into the adapter of this name, added frozen if the module has none.

    scale: factor of the adapter's effect. Adapters of other names stay active; no other parameter changes.
    Raises StateError unless rank, alpha and every key and shape agree; the module may then hold a half-loaded adapter.
    """
    tensors, header = read_tensors(path)
    config = _read_config(path, header, prefix)
    if adapter_name in _configs(module):
        _check_same(path, config, _configs(module)[adapter_name])
    else:
        _add_frozen(path, module, config, adapter_name)
    state = _state(module, adapter_name)
    _check_fits(path, tensors, {_key(prefix, name): tensor for name, tensor in state.items()})
    for name, tensor in state.items():
        tensor.copy_(tensors[_key(prefix, name)])
    for layer in _lora_layers(module).values():
        layer.set_scale(adapter_name, scale)


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

    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}


def _state(module: nn.Module, adapter_name: str) -> dict[str, Tensor]:
    from peft.utils import get_peft_model_state_dict

    if adapter_name not in _configs(module):
        raise StateError(type(module).__name__, f"has no LoRA layers named {adapter_name!r}")
    state: dict[str, Tensor] = get_peft_model_state_dict(module, adapter_name=adapter_name, save_embedding_layers=False)
    return state


def _config(rank: int, alpha: float, patterns: Iterable[str]) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=sorted(set(patterns)))


def _add(module: nn.Module, config: Any, adapter_name: str) -> dict[str, nn.Parameter]:
    """Add an adapter in fp32 beside those there, all active and frozen; return its parameters by name."""
    from peft import inject_adapter_in_model
    from peft.tuners.tuners_utils import cast_adapter_dtype

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several adapters are meant
        inject_adapter_in_model(config, module, adapter_name)
    cast_adapter_dtype(module, adapter_name)
    names = list(_configs(module))
    for layer in _lora_layers(module).values():
        layer.set_adapter(names, inference_mode=True)
    marks = (f".{adapter_name}", f".{adapter_name}.weight")
    return {name: p for name, p in module.named_parameters() if "lora_" in name and name.endswith(marks)}


def _add_frozen(path: Path, module: nn.Module, config: Any, adapter_name: str) -> None:
    """Add the adapter of a file; parameters that were trainable stay so."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        _add(module, config, adapter_name)
    except ValueError as error:  # no layer matches, or one that peft cannot wrap
        raise StateError(str(path), f"does not fit {type(module).__name__}: {error}") from error
    for parameter in trainable:
        parameter.requires_grad_(True)


def _layers(module: nn.Module) -> dict[str, bool]:
    """The module's own parts by name, none of LoRA layers added to it, and whether a LoRA layer can wrap each."""
    kinds = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    added = _lora_layers(module)
    inside = tuple(f"{name}." for name in added)
    own = {name: layer for name, layer in module.named_modules() if name and not name.startswith(inside)}
    return {name: name in added or isinstance(layer, kinds) for name, layer in own.items()}


def _matched(module: nn.Module, pattern: str, component: str) -> list[str]:
    found = {name: fits for name, fits in _layers(module).items() if fnmatchcase(f".{name}", f"*.{pattern}")}
    for name, fits in found.items():
        if not fits:
            kind = type(module.get_submodule(name)).__name__
            what = f"{pattern!r} matches {component}.{name}, a {kind}, which no LoRA layer can wrap"
            raise UsageError("--lora_target_modules", what, f"nearest: {_nearest(module, pattern)}")
    return list(found)


def _nearest(module: nn.Module, pattern: str) -> str:
    """Up to three patterns that would match and look most like this one."""
    names = [name.split(".") for name, fits in _layers(module).items() if fits]
    tails = {".".join(name[-length:]) for name in names for length in (1, 2, 3)}
    usable = sorted(tail for tail in tails if not tail[0].isdigit())
    return ", ".join(difflib.get_close_matches(pattern, usable, n=3, cutoff=0.0)) or "none: it has no such layer"


def _read_config(path: Path, header: Mapping[str, str], prefix: str) -> Any:
    """Rank, alpha and targets from a file's header; raises StateError when it lacks them or asks for more."""
    if ADAPTER_HEADER not in header:
        raise StateError(str(path), f"has no {ADAPTER_HEADER!r} in its header, so rank and alpha are unknown",
                         "a LoRA saved by dstrain or by diffusers' save_lora_weights has it")  # fmt: skip
    try:
        fields = json.loads(header[ADAPTER_HEADER])
        ours = {key.removeprefix(_key(prefix, "")): fields[key] for key in fields if key.startswith(_key(prefix, ""))}
        rank, alpha, targets = ours["r"], float(ours["lora_alpha"]), ours["target_modules"]
        if not isinstance(rank, int) or rank < 1 or not isinstance(targets, list):
            raise ValueError(f"r = {rank!r}, target_modules = {targets!r}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        what = f"header {ADAPTER_HEADER!r} tells no rank, alpha and targets of {prefix!r}: {error!r}"
        raise StateError(str(path), what) from error
    config = _config(rank, alpha, map(str, targets))
    plain = config.to_dict()
    others = sorted(name for name, x in ours.items() if x and x != plain.get(name) and name not in INERT)
    if others:
        what = f"needs {', '.join(others)}, which is not supported; loading without would change the result"
        raise StateError(str(path), what)
    return config


def _check_same(path: Path, want: Any, have: Any) -> None:
    for name, flag in (("r", "--lora_rank"), ("lora_alpha", "--lora_alpha")):
        if getattr(want, name) != getattr(have, name):
            what = f"has {name} = {getattr(want, name):g}, these LoRA layers have {getattr(have, name):g}"
            raise StateError(str(path), what, f"give {flag} {getattr(want, name):g}")


def _check_fits(path: Path, have: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Raise StateError with counts and examples unless names and shapes are the same on both sides."""
    faults = {
        "unknown": sorted(have.keys() - want.keys()),
        "missing": sorted(want.keys() - have.keys()),
        "of another shape": sorted(k for k in have.keys() & want.keys() if have[k].shape != want[k].shape),
    }
    lines = [
        f"{len(keys)} {what}: {', '.join(keys[:3])}{', ...' * (len(keys) > 3)}" for what, keys in faults.items() if keys
    ]
    if lines:
        raise StateError(str(path), f"does not fit: of {len(want)} keys wanted, {len(have)} found", *lines)
