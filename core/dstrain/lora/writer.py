"""Write a LoRA, with the key names of diffusers or with those of another program.

Files use the keys that diffusers loads, `<prefix>.<layer>.lora_A.weight`. They contain
(alpha / rank) B in place of B, because many programs do not find alpha and use B A as it
is.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.config.options import LoraType
from dstrain.errors import UsageError
from dstrain.lora.adapters import (
    ADAPTER,
    UP,
    lora_layers,
    lora_names,
    lora_state,
)
from dstrain.lora.fusing import joined, refuse_parts
from dstrain.lora.key_names import base_shapes, key_formats, key_table
from dstrain.lora.key_parser import ADAPTER_HEADER, FOLDED
from dstrain.lora.layers import LoraConfig, rescaled
from dstrain.lora.lokr import Layer, LokrLayer
from dstrain.lora.reading.contents import Lora
from dstrain.models import Shapes, components_of
from dstrain.models.formats import LoraKeyFormat
from dstrain.registry import ModelFamily
from dstrain.storage import write_tensors


def save_lora(
    path: Path,
    module: nn.Module,
    lora_config: LoraConfig,
    prefix: str,
    metadata: Mapping[str, Any],
) -> None:
    """Write the trained LoRA weights in fp32, with alpha / rank as part of B.

    Raises SystemFault.

    Args:
        path: The file to write.
        module: The network with LoRA layers.
        lora_config: The layers that `inject` added.
        prefix: What diffusers calls the component ('transformer').
        metadata: Family, base, step, versions and the like; values that are not strings
            are stored as JSON.
    """
    # Once: of a network that is sharded, the other processes take part in this one.
    state = lora_state(module)
    layers = lora_layers(module, state)
    header = lora_header(module, lora_config, layers, metadata)
    if lora_config.type == "lokr":
        tensors = {
            f"{prefix}.{name}.{part}": value.float()
            for name, layer in layers.items()
            for part, value in _matrices(layer.folded(), "diffusers").items()
        }
        write_tensors(path, tensors, header, checksum=True)
        return
    tensors = {}
    for name, value in state.items():
        found = UP.search(name)
        if found is not None:
            layer = layers[name[: found.start()]]
            value = rescaled(value, layer.alpha, layer.rank)
        tensors[f"{prefix}.{name}"] = value.float()
    adapter = {
        f"{prefix}.r": lora_config.rank,
        f"{prefix}.lora_alpha": lora_config.rank,
        f"{prefix}.target_modules": header["targets"].split(","),
    }
    ranks = {name: layer.rank for name, layer in layers.items()}
    exceptions = peft_exceptions(ranks, lora_config.rank)
    if exceptions:
        adapter[f"{prefix}.rank_pattern"] = exceptions
        adapter[f"{prefix}.alpha_pattern"] = exceptions
    if lora_config.type == "dora":
        adapter[f"{prefix}.use_dora"] = True
    header[ADAPTER_HEADER] = json.dumps(adapter, sort_keys=True)
    write_tensors(path, tensors, header, checksum=True)


def save_lora_for(
    program: str,
    path: Path,
    network: nn.Module,
    lora_config: LoraConfig,
    family: ModelFamily,
    metadata: Mapping[str, Any],
) -> None:
    """Write the trained LoRA weights as `save_lora` does, with the names of a program."""
    if program == "diffusers":
        component = lora_config.component
        prefix = family.lora_prefixes.get(component, component)
        save_lora(path, network, lora_config, prefix, metadata)
        return
    key_format = key_format_of(path, lora_config.component, family, program)
    layers = lora_layers(network)
    lora = Lora(lora_config.component, layers, {})
    named = layers_in(lora, key_format, base_shapes(network))
    tensors = {name: value.float() for name, value in named.items()}
    header = lora_header(network, lora_config, layers, metadata)
    write_tensors(path, tensors, header, checksum=True)


def check_names(
    network: nn.Module, lora_config: LoraConfig, family: ModelFamily, program: str
) -> None:
    """Raise UsageError if the trained layers cannot be written with a program's names,
    before anything is trained.
    """
    if lora_config.type == "lora":
        return
    names = lora_names(network)
    key_format = key_format_of(
        "what is trained", lora_config.component, family, program
    )
    refuse_lora_type(lora_config.type, program)
    for rows in key_table(key_format.checkpoint_format, base_shapes(network)).values():
        refuse_parts(names, rows, lora_config.type)


def refuse_lora_type(lora_type: LoraType, program: str) -> None:
    """Raise UsageError for a program that reads LoRA alone."""
    if lora_type != "lora" and program == "diffsynth":
        what = f"{program} has no key names for {lora_type}, and ignores its keys"
        raise UsageError("--lora_format", what, "give diffusers or comfyui")


def lora_header(
    module: nn.Module,
    lora_config: LoraConfig,
    layers: Mapping[str, Layer],
    metadata: Mapping[str, Any],
) -> dict[str, str]:
    """Return the header of a file of the trained layers, whichever program it is for;
    metadata as in `save_lora`. Its alphas are those of the training.
    """
    adapters: Any = module.peft_config
    adapter = adapters[ADAPTER]
    usual = adapter.alpha if lora_config.type == "lokr" else adapter.lora_alpha
    ranks = {name: layer.rank for name, layer in layers.items()}
    alphas = {name: layer.alpha for name, layer in layers.items()}
    fields = {
        **metadata,
        "component": lora_config.component,
        **in_header("rank", ranks, lora_config.rank),
        **in_header("alpha", alphas, usual),
        "targets": ",".join(sorted(adapters[ADAPTER].target_modules)),
        **FOLDED,
    }
    if lora_config.type != "lora":
        fields["type"] = lora_config.type
    if lora_config.factor != -1:
        fields["factor"] = lora_config.factor
    if lora_config.dropout:
        fields["dropout"] = lora_config.dropout
    header = {"format": "pt"}
    for name, value in fields.items():
        is_text = isinstance(value, str)
        header[name] = value if is_text else json.dumps(value, sort_keys=True)
    return header


def layers_in(
    lora: Lora,
    key_format: LoraKeyFormat,
    shapes: Shapes,
) -> dict[str, Tensor]:
    """Return the tensors of a LoRA by their keys in a program's file.

    alpha / rank becomes part of lora_B, as in every file that dstrain writes. ComfyUI
    and kohya have lora_down, lora_up and an alpha that equals the rank.

    Args:
        lora: The LoRA of one component.
        key_format: The program's names for it.
        shapes: The shapes of the component's network.
    """
    refuse_lora_type(lora.type, key_format.program)
    found: dict[str, Tensor] = {}
    for name, rows in key_table(key_format.checkpoint_format, shapes).items():
        if not any(one.layer in lora.layers for one in rows):
            continue
        if key_format.underscored:
            name = name.replace(".", "_")
        matrices = _matrices(joined(lora.layers, rows), key_format.program)
        for ending, tensor in matrices.items():
            found[f"{key_format.prefixes[0]}{name}.{ending}"] = tensor
    return found


def adapter_fields(lora: Lora, prefix: str) -> dict[str, Any]:
    """Return the fields of `lora_adapter_metadata`, where diffusers finds rank and
    alpha; in files that dstrain writes they are equal. There are none of LoKr, for
    which diffusers reads them off the shapes.
    """
    if lora.type == "lokr":
        return {}
    ranks = {name: layer.rank for name, layer in lora.layers.items()}
    rank = max(ranks.values())
    others = peft_exceptions(ranks, rank)
    targets = sorted(lora.layers)
    if "targets" in lora.header:
        targets = lora.header["targets"].split(",")
    fields = {
        "r": rank,
        "lora_alpha": rank,
        "target_modules": targets,
        "rank_pattern": others,
        "alpha_pattern": others,
        "use_dora": {} if lora.type == "lora" else True,
    }
    return {prefix + name: value for name, value in fields.items() if value != {}}


def in_header(name: str, numbers: Mapping[str, float], usual: float) -> dict[str, Any]:
    """Return the header's entries for the ranks or alphas of layers: the usual one, and
    those of the layers that have another.
    """
    others = {layer: number for layer, number in numbers.items() if number != usual}
    return {name: usual, **({f"{name}s": others} if others else {})}


def peft_exceptions(numbers: Mapping[str, int], usual: int) -> dict[str, int]:
    """Return peft's patterns for the layers that have another rank than the usual one."""
    found = {}
    for name, number in numbers.items():
        if number == usual:
            continue
        # peft also matches layers whose names end with a pattern.
        is_ending = any(other.endswith(f".{name}") for other in numbers)
        found[f"^{name}" if is_ending else name] = number
    return found


def key_format_of(
    source: Path | str,
    component: str,
    family: ModelFamily,
    program: str,
) -> LoraKeyFormat:
    """Return a program's names for a component; raises UsageError if it has none."""
    found = key_formats(components_of(family)[component], family)
    if program not in found:
        what = f"{program} has no key names for LoRA on {component}, but {source} has layers of it"
        line = f"{component} has names in {', '.join(found)}"
        raise UsageError("--format", what, line)
    return found[program]


def _matrices(layer: Layer, program: str) -> dict[str, Tensor]:
    if isinstance(layer, LokrLayer):
        parts = layer.parts()
        if program != "diffusers":
            parts["alpha"] = torch.tensor(layer.alpha)
        return parts
    # DiffSynth-Studio's trainer writes `lora_A.default.weight`, which not all of its
    # loaders find; all of them find these.
    if program in ("diffusers", "diffsynth"):
        found = {"lora_A.weight": layer.down, "lora_B.weight": layer.up}
        if layer.magnitude is not None:
            found["lora_magnitude_vector"] = layer.magnitude
        return found
    alpha = torch.tensor(layer.alpha)
    found = {"lora_down.weight": layer.down, "lora_up.weight": layer.up, "alpha": alpha}
    if layer.magnitude is not None:
        # ComfyUI multiplies the weight with it.
        found["dora_scale"] = layer.magnitude[:, None]
    return found
