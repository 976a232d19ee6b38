"""LoRA files of SDXL in every program's naming: each makes of them what is trained here, and
they come back.
"""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from diffusers import StableDiffusionXLPipeline
from dstrain.cli.main import main
from dstrain.models import components_of
from dstrain.testing import LoraCase, LoraFiles, LoraReader
from dstrain_sdxl import MODEL
from safetensors.torch import load_file
from torch import Tensor

from tests.support.layouts import assert_lora_is_loaded_as_said
from tests.support.toys import dataset

BY_NAME = components_of(MODEL)
(UNET,) = BY_NAME["unet"].formats
(CLIP,) = BY_NAME["text_encoder"].formats
BLOCK = "attentions.0.transformer_blocks.0.attn1.to_q"
LAYER = "encoder.layers.0.self_attn.q_proj"


class TestLoraFiles(LoraFiles):
    family = "sdxl"
    everyday = ("base",)
    readers = MappingProxyType(
        {
            "unet": {
                "comfyui": LoraReader(UNET, "diffusion_model."),
                "kohya": LoraReader(UNET, "lora_unet_", underscored=True),
                "diffsynth": LoraReader(None),
            },
            "text_encoder": {
                "comfyui": LoraReader(CLIP, "text_encoders.clip_l.transformer."),
                "kohya": LoraReader(CLIP, "lora_te1_", underscored=True),
                "diffsynth": LoraReader(None),
            },
            "text_encoder_2": {
                "comfyui": LoraReader(None, "text_encoders.clip_g.transformer."),
                "kohya": LoraReader(None, "lora_te2_", underscored=True),
                "diffsynth": LoraReader(None),
            },
        }
    )
    names = MappingProxyType(
        {
            "unet": {
                "diffusers": f"unet.down_blocks.1.{BLOCK}",
                "comfyui": "diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_q",
                "kohya": "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q",
                "diffsynth": f"down_blocks.1.{BLOCK}",
            },
            "text_encoder": {
                "diffusers": f"text_encoder.{LAYER}",
                "comfyui": f"text_encoders.clip_l.transformer.text_model.{LAYER}",
                "kohya": "lora_te1_text_model_encoder_layers_0_self_attn_q_proj",
                "diffsynth": LAYER,
            },
            "text_encoder_2": {
                "diffusers": f"text_encoder_2.text_model.{LAYER}",
                "comfyui": f"text_encoders.clip_g.transformer.text_model.{LAYER}",
                "kohya": "lora_te2_text_model_encoder_layers_0_self_attn_q_proj",
                "diffsynth": f"text_model.{LAYER}",
            },
        }
    )

    @staticmethod
    def prediction(component: str, network: Any) -> Tensor:
        """Of some tokens, or of noise with some conditions."""
        if component != "unet":
            ids = torch.tensor([[519, 1, 4, 1, 5, 520]])
            text: Tensor = network(ids, output_hidden_states=True).hidden_states[-2]
            return text
        draw, dtype = torch.Generator().manual_seed(3), network.dtype
        latents, prompt, pooled, sizes = (
            torch.randn(1, *s, generator=draw).to(dtype)
            for s in ((network.config.in_channels, 4, 4), (5, 56), (16,), (6,))
        )
        conditions = {"text_embeds": pooled, "time_ids": sizes}
        made: Tensor = network(
            latents, 500, prompt, added_cond_kwargs=conditions, return_dict=False
        )[0]
        return made

    @staticmethod
    def load_published(case: LoraCase, file: Path, parts: dict[str, Any]) -> None:
        published = StableDiffusionXLPipeline(scheduler=None, **parts)
        published.load_lora_weights(file.parent, weight_name=file.name)

    @staticmethod
    def published_takes(case: LoraCase, program: str) -> bool:
        """Of other programs' its converter knows kohya's U-Net."""
        is_unet = case.component == "unet"
        return program == "diffusers" or (is_unet and program == "kohya")


def test_diffusers_loads_what_the_family_says() -> None:
    assert_lora_is_loaded_as_said(MODEL, StableDiffusionXLPipeline)


def test_the_flag_of_the_reference_saves_kohyas_names(tmp_path: Path) -> None:
    words = [
        "--model",
        "sdxl",
        "--toy",
        "--dataset_base_path",
        str(dataset("sdxl", "base")),
    ]
    words += ["--max_steps", "1", "--output_path", str(tmp_path / "out")]
    assert main([*words, "--align_to_opensource_format"]) == 0
    keys = load_file(tmp_path / "out/step-1.safetensors").keys()
    assert all(key.startswith("lora_unet_") for key in keys)
    assert "lora_unet_middle_block_1_proj_in.lora_down.weight" in keys
