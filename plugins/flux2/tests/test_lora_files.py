"""LoRA files of FLUX.2 in every program's naming: each makes of them what is trained here,
and they come back.
"""

from types import MappingProxyType
from typing import Any

import pytest
import torch
from diffusers import Flux2Pipeline
from dstrain.lora import LoraConfig, inject
from dstrain.models import components_of
from dstrain.testing import LoraCase, LoraFiles, LoraReader
from dstrain_flux2 import DIT_LORA_TARGETS, MODEL
from torch import Tensor, nn

from tests.support.layouts import assert_lora_is_loaded_as_said
from tests.support.toys import opened

(ORIGINAL_DIT,) = components_of(MODEL)["dit"].formats


class TestLoraFiles(LoraFiles):
    """ComfyUI and kohya's musubi-tuner have the publisher's network, as ai-toolkit's files
    have; DiffSynth-Studio's has the names of diffusers'.
    """

    family = "flux2"
    everyday = ("dev",)
    readers = MappingProxyType(
        {
            "dit": {
                "comfyui": LoraReader(ORIGINAL_DIT, "diffusion_model."),
                "kohya": LoraReader(ORIGINAL_DIT, "lora_unet_", underscored=True),
                "diffsynth": LoraReader(None),
            },
            "text_encoder": {"diffsynth": LoraReader(None)},
        }
    )
    names = MappingProxyType(
        {
            "dit": {
                "diffusers": "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj",
                "comfyui": "diffusion_model.double_blocks.0.img_attn.qkv",
                "kohya": "lora_unet_single_blocks_0_linear1",
                "diffsynth": "transformer_blocks.0.ff_context.linear_in",
            },
            "text_encoder": {
                "diffusers": "text_encoder.model.language_model.layers.0.self_attn.q_proj",
                "diffsynth": "model.language_model.layers.0.self_attn.q_proj",
            },
        }
    )
    # Of fused layers one slice or two; what modulates, what is turned round, and what is in
    # no block.
    targets = MappingProxyType(
        {
            "slices": ("attn.to_k", "attn.add_q_proj", "attn.add_v_proj"),
            "around": (
                *("x_embedder", "context_embedder", "linear_1", "linear_2"),
                *("double_stream_modulation_img.linear", "norm_out.linear", "proj_out"),
            ),
        }
    )

    @staticmethod
    def prediction(component: str, network: Any) -> Tensor:
        """Of some tokens, with a text and guidance for the transformer."""
        if component != "dit":
            words = torch.tensor([[3, 1, 4, 1, 5]])
            states = network.model(input_ids=words, output_hidden_states=True)
            text: Tensor = states.hidden_states[3]
            return text
        draw, dtype = torch.Generator().manual_seed(3), network.dtype
        latents, prompt = (
            torch.randn(1, *shape, generator=draw).to(dtype)
            for shape in ((6, 128), (5, 96))
        )
        time = torch.full((1,), 0.5, dtype=dtype)
        made: Tensor = network(
            hidden_states=latents,
            encoder_hidden_states=prompt,
            timestep=time,
            guidance=time if network.config.guidance_embeds else None,
            img_ids=torch.arange(24).view(6, 4),
            txt_ids=torch.arange(20).view(5, 4),
            return_dict=False,
        )[0]
        return made

    @staticmethod
    def load_published(case: LoraCase, file: Any, parts: dict[str, Any]) -> None:
        names = ("scheduler", "vae", "text_encoder", "tokenizer")
        published = Flux2Pipeline(**dict.fromkeys(names), transformer=parts["dit"])
        published.load_lora_weights(file.parent, weight_name=file.name)

    @staticmethod
    def published_takes(case: LoraCase, program: str) -> bool:
        """Of other programs' names it takes kohya's, of which it has those of the blocks and
        a few more; it takes a file of ComfyUI's names for one of kohya's.
        """
        if case.component != "dit":
            return False
        return program == "diffusers" or (
            program == "kohya" and case.targets != "around"
        )


def test_a_text_encoders_lora_is_loaded_by_nobody_else() -> None:
    assert_lora_is_loaded_as_said(MODEL, Flux2Pipeline)


def test_the_default_targets_are_those_of_the_published_commands() -> None:
    """One joint block and two single ones, whose last layers the commands name one by one."""
    dit = opened("flux2", "dev").components["dit"]
    linear = {
        name for name, layer in dit.named_modules() if isinstance(layer, nn.Linear)
    }
    inject(dit, LoraConfig("dit", DIT_LORA_TARGETS, 2, 2.0), MODEL.lora_aliases)
    found = {
        name
        for name in linear
        if isinstance(getattr(dit.get_submodule(name), "base_layer", None), nn.Linear)
    }
    assert found == {name for name in linear if "_blocks." in name}


@pytest.mark.parametrize("number", [0, 1])
def test_a_block_is_named_alone(number: int) -> None:
    dit = opened("flux2", "klein").components["dit"]
    target = f"single_transformer_blocks.{number}.attn.to_out"
    assert inject(dit, LoraConfig("dit", (target,), 2, 2.0), {}) == {target: 1}
