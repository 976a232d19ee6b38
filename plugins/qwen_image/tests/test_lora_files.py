"""LoRA files of Qwen-Image in every program's naming: each makes of them what is
trained here, and they come back.
"""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from diffusers import QwenImagePipeline
from dstrain.models import components_of
from dstrain.testing import LoraCase, LoraFiles, LoraReader
from dstrain_qwen_image import MODEL
from torch import Tensor

from tests.support.layouts import assert_lora_is_loaded_as_said

(PUBLISHED_TEXT_ENCODER,) = components_of(MODEL)["text_encoder"].formats


class TestLoraFiles(LoraFiles):
    """ComfyUI's network has the names of diffusers' (its
    comfy/ldm/qwen_image/model.py).
    """

    family = "qwen_image"
    everyday = ("base", "edit", "edit-2509")
    readers = MappingProxyType(
        {
            "dit": {
                "comfyui": LoraReader(None, "diffusion_model."),
                "kohya": LoraReader(None, "lora_unet_", underscored=True),
                "diffsynth": LoraReader(None),
            },
            "text_encoder": {
                "comfyui": LoraReader(
                    PUBLISHED_TEXT_ENCODER, "text_encoders.qwen25_7b.transformer."
                ),
                "diffsynth": LoraReader(None),
            },
        }
    )
    names = MappingProxyType(
        {
            "dit": {
                "diffusers": "transformer.transformer_blocks.0.attn.to_q",
                "comfyui": "diffusion_model.transformer_blocks.0.attn.to_q",
                "kohya": "lora_unet_transformer_blocks_0_attn_to_q",
                "diffsynth": "transformer_blocks.0.attn.to_q",
            },
            "text_encoder": {
                "diffusers": "text_encoder.model.language_model.layers.0.self_attn.q_proj",
                "comfyui": "text_encoders.qwen25_7b.transformer.model.layers.0.self_attn.q_proj",
                "diffsynth": "model.language_model.layers.0.self_attn.q_proj",
            },
        }
    )
    targets = MappingProxyType(
        {
            "blocks": ("img_mlp.net.0.proj", "txt_mlp.net.0.proj"),
            "around": (
                "img_in",
                "txt_in",
                "linear_1",
                "linear_2",
                "norm_out.linear",
                "proj_out",
            ),
        }
    )

    @staticmethod
    def prediction(component: str, network: Any) -> Tensor:
        """Of some tokens, or of latents with other conditions."""
        if component == "text_encoder":
            text: Tensor = network.model(
                torch.tensor([[3, 1, 4, 1, 5]])
            ).last_hidden_state
            return text
        draw, dtype = torch.Generator().manual_seed(3), network.dtype
        latents, prompt = (
            torch.randn(1, *shape, generator=draw).to(dtype)
            for shape in ((24, 64), (7, 32))
        )
        time = torch.tensor([0.5], dtype=dtype)
        # Layered's network is told which of the images are layers.
        kind = torch.tensor([0]) if network.config.use_additional_t_cond else None
        made: Tensor = network(
            latents,
            prompt,
            None,
            time,
            [[(1, 4, 6)]],
            additional_t_cond=kind,
            return_dict=False,
        )[0]
        return made

    @staticmethod
    def load_published(case: LoraCase, file: Path, parts: dict[str, Any]) -> None:
        """The loader of the pipelines for editing is the same."""
        published = QwenImagePipeline(
            None,
            parts["vae"],
            parts["text_encoder"],
            parts.get("tokenizer"),
            parts["dit"],
        )
        published.load_lora_weights(file.parent, weight_name=file.name)

    @staticmethod
    def published_takes(case: LoraCase, program: str) -> bool:
        """It reads no LoRA of the text encoder, and others' names by its converter."""
        return case.component == "dit" and program != "diffsynth"


def test_diffusers_loads_lora_on_the_components_that_are_said_to_be() -> None:
    assert_lora_is_loaded_as_said(MODEL, QwenImagePipeline)
