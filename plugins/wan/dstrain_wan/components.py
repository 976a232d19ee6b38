"""Wan's components: how their files are recognized, configured and loaded."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from dstrain.plugin import (
    Component,
    DiffusersNetwork,
    Shapes,
    Tokenizer,
    TransformersNetwork,
    read_key_maps,
)

from dstrain_wan import DOWNSCALE, KREA, ORIGINALS, SPEED_CONTROL, diffusers_id

CONFIGS = Path(__file__).parent / "configs"
HEAD = 128
"""Channels of an attention head, in every published transformer."""
EMBEDDER = "condition_embedder"


def read(name: str) -> dict[str, Any]:
    """Return the content of a configuration of this package."""
    content: dict[str, Any] = json.loads((CONFIGS / name).read_bytes())
    return content


SHARED_WITH_VACE = ("num_attention_heads", "attention_head_dim", "ffn_dim")
SMALL = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
"""What the transformers of 1.3B have otherwise than those of 14B."""
TEXT, IMAGE = read("dit_t2v_14b.json"), read("dit_i2v_14b.json")
SMALL_IMAGE = {**IMAGE, **SMALL, "added_kv_proj_dim": 12 * HEAD}
PUBLISHED = {
    "Wan-AI/Wan2.1-T2V-1.3B": read("dit_t2v_1_3b.json"),
    "Wan-AI/Wan2.1-T2V-14B": TEXT,
    KREA: TEXT,
    "Wan-AI/Wan2.1-I2V-14B-480P": IMAGE,
    "Wan-AI/Wan2.1-I2V-14B-720P": IMAGE,
    "Wan-AI/Wan2.1-FLF2V-14B-720P": {**IMAGE, "pos_embed_seq_len": 514},
    "Wan-AI/Wan2.1-VACE-1.3B": read("dit_t2v_1_3b.json"),
    "Wan-AI/Wan2.1-VACE-14B": TEXT,
    "iic/VACE-Wan2.1-1.3B-Preview": read("dit_t2v_1_3b.json"),
    "PAI/Wan2.2-VACE-Fun-A14B": TEXT,
    **{
        f"PAI/Wan2.1-Fun-{version}{size}-{kind}": {**config, **entries}
        for size, config in {"1.3B": SMALL_IMAGE, "14B": IMAGE}.items()
        for version, kind, entries in (
            ("", "InP", {}),
            ("V1.1-", "InP", {}),
            ("", "Control", {"in_channels": 48}),
            ("V1.1-", "Control", {"in_channels": 48, "ref_channels": 16}),
            ("V1.1-", "Control-Camera", {"in_channels": 32, "camera_channels": 24}),
        )
    },
    "Wan-AI/Wan2.2-T2V-A14B": TEXT,
    "Wan-AI/Wan2.2-I2V-A14B": read("dit_i2v_a14b.json"),
    "PAI/Wan2.2-Fun-A14B-InP": read("dit_i2v_a14b.json"),
    "PAI/Wan2.2-Fun-A14B-Control": {**TEXT, "in_channels": 52, "ref_channels": 16},
    "PAI/Wan2.2-Fun-A14B-Control-Camera": {
        **TEXT,
        "in_channels": 36,
        "camera_channels": 24,
    },
    "Wan-AI/Wan2.2-TI2V-5B": read("dit_ti2v_5b.json"),
}
"""Model id in the original layout -> its transformer's configuration."""


def of_published(configs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return model id -> configuration, for the published models in their original format
    and, where there is a copy, in that of diffusers.
    """
    copies = {
        diffusers_id(name): configs[name] for name in configs if name in ORIGINALS
    }
    return {**configs, **copies}


def of_component(name: str) -> Mapping[str, Any]:
    """Return model id -> the configuration that a component has in all of them."""
    return of_published(dict.fromkeys(PUBLISHED, CONFIGS / name))


def infer_dit(shapes: Shapes) -> Mapping[str, Any] | None:
    """Return the configuration of a transformer with heads of 128 channels, as all
    published ones have.
    """
    width, channels, *patch = shapes["patch_embedding.weight"]
    if width % HEAD:
        return None
    blocks = [name for name in shapes if name.startswith("blocks.")]
    return {
        **_dit_config(shapes),
        "patch_size": patch,
        "num_attention_heads": width // HEAD,
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0] // prod(patch),
        "freq_dim": shapes[f"{EMBEDDER}.time_embedder.linear_1.weight"][1],
        "ffn_dim": shapes["blocks.0.ffn.net.0.proj.weight"][0],
        "num_layers": 1 + max(int(name.split(".")[1]) for name in blocks),
        "cross_attn_norm": "blocks.0.norm2.weight" in shapes,
    }


def infer_motion_controller(shapes: Shapes) -> Mapping[str, Any]:
    """Return the configuration of a motion controller, which is published with none."""
    width, waves = shapes["linear.0.weight"]
    return {"freq_dim": waves, "width": width}


def original_config(
    config: Mapping[str, Any], shapes: Shapes
) -> Mapping[str, Any] | None:
    """Return config.json of the original repositories in the terms of diffusers; None
    for another component's.

    Patches, norms and the widths of text and image features, which the original leaves
    to its code, are as published or as the shapes tell.
    """
    if not {"dim", "num_heads", "ffn_dim"} <= set(config):
        return None
    return {
        **_dit_config(shapes),
        "num_attention_heads": config["num_heads"],
        "attention_head_dim": config["dim"] // config["num_heads"],
        "in_channels": config["in_dim"],
        "out_channels": config["out_dim"],
        "freq_dim": config["freq_dim"],
        "ffn_dim": config["ffn_dim"],
        "num_layers": config["num_layers"],
    }


def _dit_config(shapes: Shapes) -> dict[str, Any]:
    """Return the published transformer's configuration, with the widths of its
    conditions.
    """
    text = shapes.get(f"{EMBEDDER}.text_embedder.linear_1.weight")
    image = shapes.get(f"{EMBEDDER}.image_embedder.norm1.weight")
    ends = shapes.get(f"{EMBEDDER}.image_embedder.pos_embed")
    added = shapes.get("blocks.0.attn2.add_k_proj.weight")
    reference = shapes.get("ref_conv.weight")
    camera = shapes.get("control_adapter.conv.weight")
    return TEXT | {
        "text_dim": text[1] if text else TEXT["text_dim"],
        "image_dim": image[0] if image else None,
        "added_kv_proj_dim": added[1] if added else None,
        "pos_embed_seq_len": ends[1] if ends else None,
        "ref_channels": reference[1] if reference else None,
        "camera_channels": camera[1] // DOWNSCALE**2 if camera else None,
    }


def vace_config(config: Mapping[str, Any], shapes: Shapes) -> Mapping[str, Any] | None:
    """Return the part of VACE in the config.json of its denoiser, an original one or that
    of diffusers; None for another component's.
    """
    layers = config.get("vace_layers")
    if layers is None:
        return None
    shared = original_config(config, {}) or config
    return {
        **{name: shared[name] for name in SHARED_WITH_VACE if name in shared},
        "vace_layers": layers,
        "vace_in_channels": config.get(
            "vace_in_dim", config.get("vace_in_channels", 96)
        ),
    }


def dit_config_of_vace(
    config: Mapping[str, Any], shapes: Shapes
) -> Mapping[str, Any] | None:
    """Return the denoiser's part of a config.json of WanVACETransformer3DModel."""
    if "vace_layers" not in config:
        return None
    return {
        name: value
        for name, value in config.items()
        if not name.startswith(("_", "vace_"))
    }


KEY_MAPS = read_key_maps(
    CONFIGS / "key_maps.json",
    {
        "original": original_config,
        "vace": vace_config,
        "diffusers_vace": dit_config_of_vace,
    },
)


def _dit(name: str, folder: str, original: str, *filenames: str) -> Component:
    """Return one of the two experts, or the only transformer: they differ in their
    folders and, in those of ComfyUI, in the files' names alone.
    """
    return Component(
        name,
        network=DiffusersNetwork("dstrain_wan.networks:WanTransformer3DModel"),
        folder=folder,
        version=1,
        other_folders=(original,),
        default_configs=of_published(PUBLISHED),
        infer=infer_dit,
        original_filenames=filenames,
        expert_filenames=(f"*{original.partition('_')[0]}*noise*",),
        as_loaded=("condition_embedder.*", "proj_out"),
        **KEY_MAPS["dit"],
    )


def _vace(name: str, folders: tuple[str, ...], *filenames: str) -> Component:
    """Return VACE, or that of one of two experts: it is in the denoiser's files."""
    configs = {}
    for model, dit in PUBLISHED.items():
        if "VACE" not in model:
            continue
        step = 2 if dit["num_layers"] == SMALL["num_layers"] else 5
        layers = tuple(range(0, dit["num_layers"], step))
        configs[model] = vace_config({**dit, "vace_layers": layers}, {})
    return Component(
        name,
        network=DiffusersNetwork("dstrain_wan.networks:Vace"),
        folder=name,
        version=1,
        other_folders=folders,
        original_filenames=filenames,
        default_configs=of_published(configs),
        **KEY_MAPS["vace"],
    )


COMPONENTS = (
    _dit(
        "dit",
        "transformer",
        "high_noise_model",
        "diffusion_pytorch_model*",
        "krea-realtime-video*",
    ),
    _dit("dit2", "transformer_2", "low_noise_model"),
    _vace("vace", ("transformer", "high_noise_model"), "diffusion_pytorch_model*"),
    _vace("vace2", ("transformer_2", "low_noise_model")),
    Component(
        "motion_controller",
        network=DiffusersNetwork("dstrain_wan.networks:MotionController"),
        folder="motion_controller",
        version=1,
        original_filenames=("model.safetensors",),
        infer=infer_motion_controller,
        default_configs={SPEED_CONTROL: {"freq_dim": 256, "width": 1536}},
        **KEY_MAPS["motion_controller"],
    ),
    Component(
        "text_encoder",
        network=TransformersNetwork("UMT5EncoderModel", "UMT5Config"),
        folder="text_encoder",
        version=1,
        default_configs=of_component("text_encoder.json"),
        original_filenames=("models_t5_umt5*",),
        **KEY_MAPS["text_encoder"],
    ),
    Component(
        "vae",
        network=DiffusersNetwork("AutoencoderKLWan"),
        folder="vae",
        version=1,
        default_configs={
            **of_component("vae_2_1.json"),
            **of_published({"Wan-AI/Wan2.2-TI2V-5B": CONFIGS / "vae_2_2.json"}),
        },
        original_filenames=("Wan2.*_VAE.*",),
        **KEY_MAPS["vae"],
    ),
    Component(
        "image_encoder",
        network=TransformersNetwork("CLIPVisionModel", "CLIPVisionConfig"),
        folder="image_encoder",
        version=1,
        default_configs=of_component("image_encoder.json"),
        original_filenames=("models_clip_*",),
        **KEY_MAPS["image_encoder"],
    ),
    Component(
        "tokenizer",
        network=Tokenizer("T5TokenizerFast"),
        folder="tokenizer",
        version=1,
        other_folders=("google/umt5-xxl",),
    ),
)
