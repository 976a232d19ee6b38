"""Write a LoRA, in the format of diffusers or of another program, with what it was trained
on in its header, and compare that with the model in use.

Files use the keys that diffusers loads, `<prefix>.<layer>.lora_A.weight`. They contain
(alpha / rank) B in place of B, because many programs do not find alpha and use B A as it
is.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dstrain.console import get_logger
from dstrain.installed import NamingPlugin
from dstrain.lora.adapters import ADAPTER, UP, lora_layers, lora_state
from dstrain.lora.alphas import ADAPTER_HEADER
from dstrain.lora.file_formats import OWN, asking, format_named
from dstrain.lora.layer_names import base_shapes, prefix_of
from dstrain.lora.layers import Layer, LoraConfig, rescaled
from dstrain.lora.stored import FOLDED, Lora
from dstrain.lora.types import type_named
from dstrain.models import Files, components_of
from dstrain.registry import ModelFamily
from dstrain.storage import write_tensors

logger = get_logger(__name__)
BLOCKS = 64
BLOCK_BYTES = 4096


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
        module: The network with the layers of `lora_config`.
        lora_config: What `inject` added.
        prefix: What diffusers calls the component ('transformer').
        metadata: Family, base, step and the like; what is no text is stored as JSON.
    """
    # Once: of a network that is sharded, the other processes take part in this one.
    state = lora_state(module)
    layers = lora_layers(module, state)
    header = lora_header(module, lora_config, layers, metadata)
    kind = type_named(lora_config.type)
    if not kind.diffusers:
        tensors = {
            f"{prefix}.{name}.{part}": value.float()
            for name, layer in layers.items()
            for part, value in layer.folded().parts().items()
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
    adapter |= {f"{prefix}.{name}": value for name, value in kind.fields.items()}
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
    """Write the trained LoRA weights as `save_lora` does, in the format of a program."""
    if program == OWN.name:
        prefix = prefix_of(lora_config.component, family)
        save_lora(path, network, lora_config, prefix, metadata)
        return
    layers = lora_layers(network)
    lora = Lora(lora_config.component, layers, {})
    own = format_named(program)
    with asking(own, path):
        named = own.write(lora, family, base_shapes(network))
        tensors = {name: value.float() for name, value in named.items()}
    header = lora_header(network, lora_config, layers, metadata)
    write_tensors(path, tensors, header, checksum=True)


def check_names(
    network: nn.Module, lora_config: LoraConfig, family: ModelFamily, program: str
) -> None:
    """Raise UsageError if the trained layers cannot be written in a program's format,
    before anything is trained.
    """
    own = format_named(program)
    with NamingPlugin(own.plugin, f"its LoRA format {program}"):
        own.check(
            list(lora_layers(network)),
            lora_config.type,
            components_of(family)[lora_config.component],
            family,
            base_shapes(network),
        )


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
    usual = lora_config.rank if lora_config.alpha is None else lora_config.alpha
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
    fields |= dict(lora_config.settings)
    if lora_config.dropout:
        fields["dropout"] = lora_config.dropout
    header = {"format": "pt"}
    for name, value in fields.items():
        is_text = isinstance(value, str)
        header[name] = value if is_text else json.dumps(value, sort_keys=True)
    return header


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


def base_weights(files: Files) -> dict[str, str]:
    """Return the model id, if any, and the digest of the weights under a LoRA."""
    base = {"digest": sample_digest(files.paths)}
    if files.model_id:
        base["model_id"] = files.model_id
    return base


def sample_digest(paths: Sequence[Path]) -> str:
    """Return a digest of files, whatever their names, from the size and 64 blocks of 4
    KiB of each.

    That tells models apart, since further training changes every weight, and takes no
    time; it does not detect damage.
    """
    digests = []
    for path in paths:
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with path.open("rb") as file:
            for block in range(BLOCKS):
                file.seek(block * max(size - BLOCK_BYTES, 0) // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
        digests.append(digest.hexdigest())
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()[:40]


def log_differences(lora: Lora, path: Path, variant: str, files: Files | None) -> None:
    """Log a warning for each thing that differs between a LoRA's training, as its header
    records it, and the model in use; their family is the same.
    """
    recorded = lora.header.get("variant", variant)
    if recorded != variant:
        logger.warning(f"{path}: was trained for variant {recorded}, not {variant}")
    try:
        base = json.loads(lora.header.get("base", "{}"))
        digest = base.get("digest")
        name = base.get("model_id", "other files")
    except (ValueError, AttributeError, RecursionError):
        return
    if digest and files is not None and digest != sample_digest(files.paths):
        used = files.model_id or files.paths[0].name
        other = f"other weights of {lora.component} ({name}), not on {used}"
        logger.warning(f"{path}: was trained on {other}")
