"""Qwen-Image's components: how their files are recognised, configured and loaded."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from dstrain.plugin import (
    CheckpointFormat,
    Component,
    DiffusersNetwork,
    Files,
    KeyMap,
    LoraKeyFormat,
    Shapes,
    Tokenizer,
    TransformersNetwork,
    same_config,
)

from dstrain_qwen_image.processor import Processor

CONFIGS = Path(__file__).parent / "configs"
# Models whose text encoder, VAE and (but for the last one's zero_cond_t) transformer
# are alike but for the weights.
IDS = (
    "Qwen/Qwen-Image",
    "Qwen/Qwen-Image-2512",
    "Qwen/Qwen-Image-Edit",
    "Qwen/Qwen-Image-Edit-2509",
    "Qwen/Qwen-Image-Edit-2511",
)

# The names of transformers before version 5, as published.
PUBLISHED_TEXT_ENCODER_LAYOUT = CheckpointFormat(
    key_patterns=("model.embed_tokens.weight", "visual.patch_embed.proj.weight"),
    rows=(KeyMap("model.visual", "visual"), KeyMap("model.language_model", "model")),
    configuration=same_config,
)

# comfy/lora.py of ComfyUI, model_lora_keys_clip.
COMFYUI_TEXT_ENCODER_LORA = LoraKeyFormat(
    "comfyui", ("text_encoders.qwen25_7b.transformer.",), PUBLISHED_TEXT_ENCODER_LAYOUT
)


def infer_dit(shapes: Shapes) -> Mapping[str, Any] | None:
    """Return the published transformer's configuration for any number of layers and
    heads of 128 channels.
    """
    config: dict[str, Any] = json.loads((CONFIGS / "dit.json").read_bytes())
    head = config["attention_head_dim"]
    if shapes["transformer_blocks.0.attn.norm_q.weight"] != (head,):
        return None
    width, channels = shapes["img_in.weight"]
    blocks = [name for name in shapes if name.startswith("transformer_blocks.")]
    return config | {
        "in_channels": channels,
        "num_layers": 1 + max(int(name.split(".")[1]) for name in blocks),
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["txt_in.weight"][1],
    }


class ProcessorFolder:
    """The processor, which has neither configuration nor dtype."""

    def load(self, files: Files, configuration: Any, dtype: torch.dtype) -> Processor:
        """Load it from its folder."""
        return Processor.from_folder(files.folder)


COMPONENTS = (
    Component(
        "dit",
        network=DiffusersNetwork("QwenImageTransformer2DModel"),
        folder="transformer",
        key_patterns=(
            "txt_norm.weight",
            "transformer_blocks.*.img_mod.1.weight",
            "proj_out.weight",
        ),
        default_configs={
            **dict.fromkeys(IDS, CONFIGS / "dit.json"),
            "Qwen/Qwen-Image-Edit-2511": CONFIGS / "dit_edit_2511.json",
        },
        infer=infer_dit,
        prefixes=("model.diffusion_model.", "diffusion_model."),
    ),
    Component(
        "text_encoder",
        network=TransformersNetwork(
            "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig"
        ),
        folder="text_encoder",
        key_patterns=(
            "model.language_model.embed_tokens.weight",
            "model.visual.patch_embed.proj.weight",
        ),
        formats=(PUBLISHED_TEXT_ENCODER_LAYOUT,),
        lora=(COMFYUI_TEXT_ENCODER_LORA,),
        default_configs=dict.fromkeys(IDS, CONFIGS / "text_encoder.json"),
    ),
    Component(
        "vae",
        network=DiffusersNetwork("AutoencoderKLQwenImage"),
        folder="vae",
        key_patterns=(
            "post_quant_conv.weight",
            "encoder.*.gamma",
            "decoder.up_blocks.*",
        ),
        default_configs=dict.fromkeys(IDS, CONFIGS / "vae.json"),
    ),
    Component("tokenizer", network=Tokenizer("Qwen2Tokenizer"), folder="tokenizer"),
    Component("processor", network=ProcessorFolder(), folder="processor"),
)
