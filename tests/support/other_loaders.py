"""How ComfyUI and DiffSynth-Studio load LoRA files and weights: their key names and their
use of alpha, restated.

From comfy/lora.py, comfy/weight_adapter/lora.py and comfy/utils.py of Comfy-Org/ComfyUI,
and from diffsynth/utils/lora, diffsynth/models and diffsynth/core/loader of
modelscope/DiffSynth-Studio. Nothing here uses dstrain's own key tables.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


class Part(NamedTuple):
    """Rows of a layer of another program's network, in equal parts of all its rows."""

    layer: str
    start: int = 0
    stop: int = 1
    parts: int = 1


class Applied(NamedTuple):
    """What a program makes of a LoRA file."""

    changes: dict[str, Tensor]
    """Weight, as diffusers names it -> what is added to it."""
    unused: set[str]
    """The keys that it does not use."""


# The networks. Each table turns a name of diffusers' network into one of another
# program's, line after line.

WAN = (
    (r"condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
    (r"condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
    (r"condition_embedder\.time_proj", "time_projection.1"),
    (r"condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
    (r"condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
    (r"condition_embedder\.image_embedder\.norm1", "img_emb.proj.0"),
    (r"condition_embedder\.image_embedder\.ff\.net\.0\.proj", "img_emb.proj.1"),
    (r"condition_embedder\.image_embedder\.ff\.net\.2", "img_emb.proj.3"),
    (r"condition_embedder\.image_embedder\.norm2", "img_emb.proj.4"),
    (r"^scale_shift_table", "head.modulation"),
    (r"^proj_out", "head.head"),
    (r"\.scale_shift_table", ".modulation"),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_([qkv])\b", r".\1"),
    (r"\.to_out\.0", ".o"),
    (r"\.add_([kv])_proj", r".\1_img"),
    (r"\.norm_added_k", ".norm_k_img"),
    (r"^(blocks\.\d+)\.norm2", r"\1.norm3"),
    (r"\.ffn\.net\.0\.proj", ".ffn.0"),
    (r"\.ffn\.net\.2", ".ffn.2"),
)
FLUX_BLOCKS = MappingProxyType(
    {
        "norm1.linear": Part("img_mod.lin"),
        "norm1_context.linear": Part("txt_mod.lin"),
        "attn.to_q": Part("img_attn.qkv", 0, 1, 3),
        "attn.to_k": Part("img_attn.qkv", 1, 2, 3),
        "attn.to_v": Part("img_attn.qkv", 2, 3, 3),
        "attn.add_q_proj": Part("txt_attn.qkv", 0, 1, 3),
        "attn.add_k_proj": Part("txt_attn.qkv", 1, 2, 3),
        "attn.add_v_proj": Part("txt_attn.qkv", 2, 3, 3),
        "attn.to_out.0": Part("img_attn.proj"),
        "attn.to_add_out": Part("txt_attn.proj"),
        "ff.net.0.proj": Part("img_mlp.0"),
        "ff.net.2": Part("img_mlp.2"),
        "ff_context.net.0.proj": Part("txt_mlp.0"),
        "ff_context.net.2": Part("txt_mlp.2"),
        "ff.linear_in": Part("img_mlp.0"),
        "ff.linear_out": Part("img_mlp.2"),
        "ff_context.linear_in": Part("txt_mlp.0"),
        "ff_context.linear_out": Part("txt_mlp.2"),
    }
)
"""The layers of FLUX's blocks, and of FLUX.2's, which has other names for the last four."""
FLUX_SINGLE_BLOCKS = MappingProxyType(
    {
        "norm.linear": Part("modulation.lin"),
        "attn.to_q": Part("linear1", 0, 1, 7),
        "attn.to_k": Part("linear1", 1, 2, 7),
        "attn.to_v": Part("linear1", 2, 3, 7),
        "proj_mlp": Part("linear1", 3, 7, 7),
        "proj_out": Part("linear2"),
        "attn.to_qkv_mlp_proj": Part("linear1"),
        "attn.to_out": Part("linear2"),
    }
)
DIFFSYNTH_FLUX = MappingProxyType(
    {
        "img_mod.lin": "norm1_a.linear",
        "txt_mod.lin": "norm1_b.linear",
        "img_attn.qkv": "attn.a_to_qkv",
        "txt_attn.qkv": "attn.b_to_qkv",
        "img_attn.proj": "attn.a_to_out",
        "txt_attn.proj": "attn.b_to_out",
        "img_mlp": "ff_a",
        "txt_mlp": "ff_b",
        "modulation.lin": "norm.linear",
        "linear1": "to_qkv_mlp",
        "linear2": "proj_out",
    }
)
DIFFSYNTH_FLUX_OTHERS = (
    (r"\.attn\.norm_added_([qk])", r".attn.norm_\1_b"),
    (r"^(transformer_blocks\.\d+\.attn\.norm_[qk])\b(?!_b)", r"\1_a"),
    (r"^(single_transformer_blocks\.\d+)\.attn\.(norm_[qk])", r"\1.\2_a"),
    (r"^single_transformer_blocks", "single_blocks"),
    (r"^transformer_blocks", "blocks"),
    (r"^time_text_embed\.text_embedder\.linear_1", "pooled_text_embedder.0"),
    (r"^time_text_embed\.text_embedder\.linear_2", "pooled_text_embedder.2"),
    (
        r"^time_text_embed\.timestep_embedder\.linear_1",
        "time_embedder.timestep_embedder.0",
    ),
    (
        r"^time_text_embed\.timestep_embedder\.linear_2",
        "time_embedder.timestep_embedder.2",
    ),
    (
        r"^time_text_embed\.guidance_embedder\.linear_1",
        "guidance_embedder.timestep_embedder.0",
    ),
    (
        r"^time_text_embed\.guidance_embedder\.linear_2",
        "guidance_embedder.timestep_embedder.2",
    ),
    (r"^norm_out\.linear", "final_norm_out.linear"),
    (r"^proj_out", "final_proj_out"),
)


def renamed(name: str, lines: Iterable[tuple[str, str]]) -> str:
    """Replace what each line matches, one line after the other."""
    for pattern, replacement in lines:
        name = re.sub(pattern, replacement, name)
    return name


def flux_part(layer: str) -> Part | None:
    """Where a layer of FLUX's blocks is in the original network."""
    hit = re.fullmatch(r"(single_)?transformer_blocks\.(\d+)\.(.+)", layer)
    if hit is None:
        return None
    single, number, name = hit.groups()
    part = (FLUX_SINGLE_BLOCKS if single else FLUX_BLOCKS).get(name)
    if part is None:
        return None
    blocks = "single_blocks" if single else "double_blocks"
    return part._replace(layer=f"{blocks}.{number}.{part.layer}")


def diffsynth_flux_part(layer: str) -> Part | None:
    """Where a layer of FLUX's blocks is in DiffSynth-Studio's network."""
    part = flux_part(layer)
    if part is None:
        return None
    blocks, number, name = part.layer.split(".", 2)
    for original, own in DIFFSYNTH_FLUX.items():
        if name == original or name.startswith(f"{original}."):
            name = own + name.removeprefix(original)
            break
    return part._replace(layer=f"{blocks.removeprefix('double_')}.{number}.{name}")


def part_of(program: str, family: str, layer: str) -> Part | None:
    """Where a layer of diffusers' network is in another program's."""
    if family.startswith("flux") and program == "comfyui":
        return flux_part(layer)
    if family == "flux":
        return diffsynth_flux_part(layer)
    if family == "z_image" and program == "comfyui":
        return z_image_part(layer)
    if family == "sdxl" and program == "comfyui":
        return sdxl_part(layer)
    # Qwen-Image's network has diffusers' names in both programs, FLUX.2's in the second.
    return Part(renamed(layer, WAN) if family == "wan" else layer)


def z_image_part(layer: str) -> Part:
    """Where a layer of Z-Image's blocks is in the original network (z_image_to_diffusers of
    comfy/utils.py).
    """
    block, _, name = layer.rpartition(".attention.")
    if name in ("to_q", "to_k", "to_v"):
        place = ("to_q", "to_k", "to_v").index(name)
        return Part(f"{block}.attention.qkv", place, place + 1, 3)
    return Part(layer.replace(".attention.to_out.0", ".attention.out"))


def sdxl_part(layer: str) -> Part | None:
    """Where a layer of an attention of SDXL's U-Net is in the original network, of two
    layers in a block (unet_to_diffusers of comfy/utils.py); None for others.
    """
    hit = re.match(r"(down|up|mid)_blocks?(?:\.(\d+))?\.attentions\.(\d+)\.", layer)
    if hit is None:
        return None
    side, block, number = hit[1], int(hit[2] or 0), int(hit[3])
    place = {
        "down": f"input_blocks.{1 + 3 * block + number}.1",
        "up": f"output_blocks.{3 * block + number}.1",
        "mid": "middle_block.1",
    }[side]
    return Part(f"{place}.{layer[hit.end() :]}")


# LoRA files.

PAIRS = (
    ("lora_up.weight", "lora_down.weight"),
    ("lora_B.weight", "lora_A.weight"),
    ("lora_B.default.weight", "lora_A.default.weight"),
)
"""Endings of the keys of a layer's two matrices, in the order in which ComfyUI tries them."""


def comfyui_names(family: str, layers: Iterable[str]) -> dict[str, dict[str, Part]]:
    """Names that ComfyUI looks for -> the layers of diffusers' network they stand for."""
    names: dict[str, dict[str, Part]] = defaultdict(dict)
    for layer in layers:
        part = part_of("comfyui", family, layer)
        if part is None:
            continue
        names[f"diffusion_model.{part.layer}"][layer] = part
        names[f"lora_unet_{part.layer.replace('.', '_')}"][layer] = part
        if family == "sdxl":
            flat = layer.replace(".", "_")
            own = layer.replace(".to_", ".processor.to_").replace(
                ".to_out.0", ".to_out"
            )
            for name in (f"lora_unet_{flat}", f"lycoris_{flat}", own, f"unet.{own}"):
                names[name] = {layer: Part(layer)}
        if family not in ("wan", "sdxl"):
            flat = layer.replace(".", "_")
            own = [f"transformer.{layer}", layer, f"lycoris_{flat}"]
            if family.startswith("flux"):
                own.append(f"lora_transformer_{flat}")
            if family == "z_image":
                own.append(f"diffusion_model.{layer}")
            names |= {name: {layer: Part(layer)} for name in own}
    return names


def comfyui(family: str, weights: Tensors, tensors: Tensors) -> Applied:
    """Apply a file as ComfyUI does: alpha is a key beside the matrices, and without it
    the scale is 1.
    """
    applied = Applied({}, set(tensors))
    layers = [name.removesuffix(".weight") for name in weights]
    for name, parts in comfyui_names(family, layers).items():
        for up, down in PAIRS:
            if f"{name}.{up}" not in tensors:
                continue
            alpha = tensors.get(f"{name}.alpha")
            below = tensors[f"{name}.{down}"].double()
            scale = 1.0 if alpha is None else alpha.item() / len(below)
            change = scale * tensors[f"{name}.{up}"].double() @ below
            add(applied.changes, change, parts)
            used = {f"{name}.{end}" for end in (up, down, "alpha")}
            applied.unused.difference_update(used)
            break
        product = comfyui_product(name, tensors)
        if product is not None:
            change, used = product
            add(applied.changes, change, parts)
            applied.unused.difference_update(used)
    for name, weight in comfyui_parameters(family, weights).items():
        if name in tensors:
            applied.changes[weight] = tensors[name].double()
            applied.unused.discard(name)
    return applied


def comfyui_product(name: str, tensors: Tensors) -> tuple[Tensor, set[str]] | None:
    """What LyCORIS' matrices of a layer add to its weight, and their keys, by
    comfy/weight_adapter/loha.py and lokr.py; alpha counts where there is a rank.
    """
    used = {
        key
        for key in tensors
        if re.fullmatch(
            rf"{re.escape(name)}\.(hada_w._[ab]|lokr_w.(_[ab])?|alpha)", key
        )
    }
    parts = {key.rpartition(".")[2]: tensors[key].double() for key in used}
    if "hada_w1_a" in parts:
        rank = len(parts["hada_w1_b"])
        change = (parts["hada_w1_a"] @ parts["hada_w1_b"]) * (
            parts["hada_w2_a"] @ parts["hada_w2_b"]
        )
    elif any(key.startswith("lokr") for key in parts):
        rank = 0
        matrices = []
        for one in ("lokr_w1", "lokr_w2"):
            if one in parts:
                matrices.append(parts[one])
                continue
            rank = len(parts[f"{one}_b"])
            matrices.append(parts[f"{one}_a"] @ parts[f"{one}_b"])
        change = torch.kron(*matrices)
    else:
        return None
    if rank and "alpha" in parts:
        change = parts["alpha"].item() / rank * change
    return change, used


def comfyui_parameters(family: str, weights: Iterable[str]) -> dict[str, str]:
    """Keys of differences that ComfyUI looks for -> the parameter, as diffusers names
    it: it has none for a fused layer's parts here.
    """
    names = {}
    for weight in weights:
        layer, _, end = weight.rpartition(".")
        if family != "wan":
            continue
        own = f"diffusion_model.{renamed(weight, WAN)}"
        if end in ("weight", "bias"):
            own = f"diffusion_model.{renamed(layer, WAN)}"
        names[own + (".diff_b" if end == "bias" else ".diff")] = weight
    return names


def diffsynth(family: str, weights: Tensors, tensors: Tensors) -> Applied:
    """Apply a file as DiffSynth-Studio's `pipe.load_lora(pipe.dit, file)` does."""
    applied = Applied({}, set(tensors))
    modules: dict[str, dict[str, Part]] = defaultdict(dict)
    for name in weights:
        layer = name.removesuffix(".weight")
        part = part_of("diffsynth", family, layer)
        if part is not None:
            modules[part.layer][layer] = part
    read = diffsynth_flux_pairs if family == "flux" else diffsynth_pairs
    for name, (up, down, keys) in read(tensors).items():
        if name in modules:  # others are left out without a word
            add(applied.changes, up.double() @ down.double(), modules[name])
            applied.unused.difference_update(keys)
        elif family == "flux" and name.startswith("transformer."):
            # diffusers' names: its loader joins them into fused layers.
            layer = name.removeprefix("transformer.")
            assert f"{layer}.weight" in weights
            add(applied.changes, up.double() @ down.double(), {layer: Part(layer)})
            applied.unused.difference_update(keys)
    return applied


Pairs = dict[str, tuple[Tensor, Tensor, set[str]]]
"""Layer -> up, down and the keys they come from."""


def diffsynth_pairs(tensors: Tensors) -> Pairs:
    """Read a file as its general loader does: `diffusion_model.` is removed, and an alpha
    key beside the matrices is part of the scale.
    """
    pairs: Pairs = {}
    for key, up in tensors.items():
        mark = "lora_up" if ".lora_up." in key else "lora_B"
        words = key.split(".")
        if mark not in words:
            continue
        layer = words[: words.index(mark)]
        if layer[0] == "diffusion_model":
            layer = layer[1:]
        down_key = key.replace(mark, {"lora_up": "lora_down", "lora_B": "lora_A"}[mark])
        down = tensors[down_key]
        alpha_key = re.sub(rf"{mark}(\.default)?\.weight", "alpha", key)
        if alpha_key in tensors:
            down = down * (tensors[alpha_key].item() / len(down))
        pairs[".".join(layer)] = up, down, {key, down_key, alpha_key}
    return pairs


def diffsynth_flux_pairs(tensors: Tensors) -> Pairs:
    """Read a file as its loader for FLUX does. One alpha key is the alpha of all layers."""
    if any("lora_unet_" in key for key in tensors):
        return kohya_flux_pairs(tensors)
    is_diffusers = any(key.startswith("transformer.") for key in tensors)
    pairs: Pairs = {}
    for key, up in tensors.items():
        if key.endswith(
            ".lora_B.weight"
        ):  # the name of an adapter would be an obstacle
            name = key.removesuffix(".lora_B.weight")
            down_key = f"{name}.lora_A.weight"
            pairs[name] = up, tensors[down_key], {key, down_key}
    for layer in pairs if is_diffusers else ():
        q, k, v = ("to_q", "to_k", "to_v")
        if ".attn.add_" in layer:
            q, k, v = ("add_q_proj", "add_k_proj", "add_v_proj")
        if layer.endswith(f".{q}"):
            ends = [layer.removesuffix(q) + end for end in (q, k, v)]
            ranks = {len(pairs[end][1]) for end in ends}  # it has all three or fails
            assert len(ranks) == 1, ends
    return pairs


def kohya_flux_pairs(tensors: Tensors) -> Pairs:
    scales = [
        tensors[key].item() / len(tensors[key.replace(".alpha", ".lora_down.weight")])
        for key in tensors
        if key.endswith(".alpha")
    ]
    factor = math.sqrt(scales[0]) if scales else 1.0
    known = {
        f"lora_unet_{blocks}_{number}_{name}": f"{blocks}.{number}.{name}"
        for blocks in ("double_blocks", "single_blocks")
        for number in range(100)
        for name in kohya_flux_names()
    }
    pairs: Pairs = {}
    for key, up in tensors.items():
        name = key.removesuffix(".lora_up.weight")
        if name == key or name not in known:
            continue
        blocks, number, original = known[name].split(".")
        dotted = kohya_flux_names()[original]
        own = next(
            own + dotted.removeprefix(start)
            for start, own in DIFFSYNTH_FLUX.items()
            if dotted == start or dotted.startswith(f"{start}.")
        )
        down_key = f"{name}.lora_down.weight"
        layer = f"{blocks.removeprefix('double_')}.{number}.{own}"
        keys = {key, down_key, f"{name}.alpha"}
        pairs[layer] = factor * up, factor * tensors[down_key], keys
    return pairs


def kohya_flux_names() -> dict[str, str]:
    parts = (*FLUX_BLOCKS.values(), *FLUX_SINGLE_BLOCKS.values())
    return {part.layer.replace(".", "_"): part.layer for part in parts}


def add(changes: dict[str, Tensor], change: Tensor, parts: Mapping[str, Part]) -> None:
    """Add the rows of a layer's change to the weights that they are of."""
    for layer, part in parts.items():
        height = len(change) // part.parts
        rows = change[part.start * height : part.stop * height]
        name = f"{layer}.weight"
        changes[name] = changes.get(name, torch.zeros_like(rows)) + rows


# Weights in full.


def diffsynth_weights(family: str, weights: Tensors) -> dict[str, Tensor]:
    """A network's weights as DiffSynth-Studio's own network has them: its
    `load_state_dict` takes these names and shapes, and no others.
    """
    pieces: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, value in weights.items():
        layer, _, end = name.rpartition(".")
        part = part_of("diffsynth", family, layer) if family == "flux" else None
        if part is not None:
            pieces[f"{part.layer}.{end}"][part.start] = value
            continue
        if family == "flux" and layer == "norm_out.linear":
            # diffusers has scale, then shift; the original has shift, then scale.
            value = torch.cat(value.chunk(2)[::-1])
        lines = {"flux": DIFFSYNTH_FLUX_OTHERS, "wan": WAN}.get(family, ())
        pieces[renamed(name, lines)][0] = value
    return {
        name: torch.cat([parts[start] for start in sorted(parts)])
        for name, parts in pieces.items()
    }
