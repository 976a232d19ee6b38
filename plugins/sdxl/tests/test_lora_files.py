"""LoRA files of SDXL in every program's naming: each makes of them what is trained here, and
they come back.
"""

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from dstrain.cli.main import main
from dstrain.config import LoraFile
from dstrain.lora import base_shapes, read_lora
from dstrain.models import components_of
from dstrain.testing import LoraCase, LoraFiles, LoraReader
from dstrain_sdxl import MODEL
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.layouts import assert_lora_is_loaded_as_said, network_of_noise
from tests.support.toys import dataset, toy

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


@pytest.mark.parametrize(
    "pair", ["lora_linear_layer.down lora_linear_layer.up", "lora_A lora_B"]
)
def test_diffusers_names_of_the_first_text_encoder_are_read(
    pair: str, tmp_path: Path
) -> None:
    """Those of its scripts before peft, whose alpha is the rank, and those of its
    pipelines, whose header names the component alone.
    """
    network = network_of_noise(BY_NAME["text_encoder"], toy("sdxl", "base"))
    down, up = torch.randn(2, 32), torch.randn(32, 2)
    key = f"text_encoder.text_model.{LAYER}"
    tensors = {
        f"{key}.{name}.weight": one
        for name, one in zip(pair.split(), (down, up), strict=True)
    }
    adapter = {"text_encoder.r": 2, "text_encoder.lora_alpha": 4}
    is_old = "linear" in pair
    header = {} if is_old else {"lora_adapter_metadata": json.dumps(adapter)}
    save_file(tensors, tmp_path / "theirs.safetensors", header)
    file = LoraFile(tmp_path / "theirs.safetensors", alpha="rank" if is_old else None)
    (lora,) = read_lora(file, MODEL, {"text_encoder": base_shapes(network)})
    ((name, layer),) = lora.layers.items()
    assert name == LAYER
    assert layer.alpha == (2 if is_old else 4)
    assert torch.equal(layer.parts()["lora_A.weight"], down)
    assert torch.equal(layer.parts()["lora_B.weight"], up)


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
