"""LoRA files of Z-Image in every program's naming: each makes of them what is trained
here, and they come back.
"""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from diffusers import ZImagePipeline
from dstrain import Pipeline
from dstrain.models import components_of
from dstrain.testing import LoraCase, LoraFiles, LoraReader
from dstrain_z_image import MODEL
from safetensors.torch import save_file
from torch import Tensor

from tests.support.layouts import assert_lora_is_loaded_as_said
from tests.support.toys import opened

(ORIGINAL,) = components_of(MODEL)["dit"].formats
ENCODER = "text_encoders.qwen3_4b.transformer."


class TestLoraFiles(LoraFiles):
    family = "z_image"
    everyday = ("base",)
    readers = MappingProxyType(
        {
            "dit": {
                "comfyui": LoraReader(None, "diffusion_model."),
                "kohya": LoraReader(None, "lora_unet_", underscored=True),
                "diffsynth": LoraReader(None),
            },
            "text_encoder": {
                "comfyui": LoraReader(None, ENCODER),
                "diffsynth": LoraReader(None),
            },
        }
    )
    names = MappingProxyType(
        {
            "dit": {
                "diffusers": "transformer.layers.0.attention.to_q",
                "comfyui": "diffusion_model.layers.0.attention.to_q",
                "kohya": "lora_unet_layers_0_attention_to_q",
                "diffsynth": "layers.0.attention.to_q",
            },
            "text_encoder": {
                "diffusers": "text_encoder.model.layers.0.self_attn.q_proj",
                "comfyui": f"{ENCODER}model.layers.0.self_attn.q_proj",
                "diffsynth": "model.layers.0.self_attn.q_proj",
            },
        }
    )
    targets = MappingProxyType(
        {
            "around": (
                "all_x_embedder.2-1",
                "cap_embedder.1",
                "t_embedder.mlp.0",
                "layers.*.adaLN_modulation.0",
                "all_final_layer.2-1.linear",
            )
        }
    )

    @staticmethod
    def prediction(component: str, network: Any) -> Tensor:
        """Of an image and a text for the transformer."""
        draw, dtype = torch.Generator().manual_seed(3), network.dtype
        if component == "text_encoder":
            states: Tensor = network(torch.tensor([[3, 1, 4, 1, 5]])).logits
            return states
        latents = torch.randn(1, 16, 8, 8, generator=draw).to(dtype)
        text = torch.randn(5, network.config.cap_feat_dim, generator=draw).to(dtype)
        time = torch.full((1,), 0.5, dtype=dtype)
        images = list(latents[:, :, None])
        if network.config.siglip_feat_dim is None:
            made = network(images, time, [text], return_dict=False)[0]
        else:
            given = {"siglip_feats": [None], "image_noise_mask": [[1]]}
            made = network([images], time, [[text]], return_dict=False, **given)[0]
        prediction: Tensor = made[0]
        return prediction

    @staticmethod
    def load_published(case: LoraCase, file: Path, parts: dict[str, Any]) -> None:
        """With the loader of the plain pipeline."""
        names = ("vae", "text_encoder", "tokenizer")
        published = ZImagePipeline(
            scheduler=None,
            transformer=parts["dit"],
            **{one: parts[one] for one in names},
        )
        published.load_lora_weights(file.parent, weight_name=file.name)

    @staticmethod
    def published_takes(case: LoraCase, program: str) -> bool:
        """It reads no LoRA of other components."""
        return case.component == "dit" and program in ("diffusers", "comfyui", "kohya")


def test_diffusers_loads_lora_on_the_components_that_are_said_to_be() -> None:
    assert_lora_is_loaded_as_said(MODEL, ZImagePipeline)


def changed_weight(pipe: Pipeline, layer: str) -> Tensor:
    """Return what LoRA adds to the weight of a layer of the denoiser."""
    one = pipe.components["dit"].get_submodule(layer)
    return sum(one.get_delta_weight(name) for name in one.active_adapters)


@pytest.mark.parametrize("underscored", [False, True])
def test_a_layer_of_original_files_is_three_of_ours(
    underscored: bool, tmp_path: Path
) -> None:
    """Query, key and value are one layer in the files of ComfyUI's networks."""
    draw = torch.Generator().manual_seed(0)
    name = "diffusion_model.noise_refiner.0.attention.qkv"
    if underscored:
        name = "lora_unet_noise_refiner_0_attention_qkv"
    down = torch.randn(2, 32, generator=draw)
    up = torch.randn(96, 2, generator=draw)
    file = tmp_path / "fused.safetensors"
    tensors = {"lora_down.weight": down, "lora_up.weight": up}
    tensors["alpha"] = torch.tensor(2.0)
    save_file({f"{name}.{end}": one for end, one in tensors.items()}, file)
    pipe = opened("z_image", "base")
    pipe.load_lora(file)
    found = [
        changed_weight(pipe, f"noise_refiner.0.attention.{one}")
        for one in ("to_q", "to_k", "to_v")
    ]
    torch.testing.assert_close(torch.cat(found), up @ down)


def test_the_training_adapter_of_ai_toolkit_is_read(tmp_path: Path) -> None:
    """Its keys are those that ai-toolkit asks for (load_training_adapter in its
    z_image.py); they state no alpha.
    """
    draw = torch.Generator().manual_seed(0)
    layer = "layers.0.attention.to_k"
    down = torch.randn(4, 32, generator=draw)
    up = torch.randn(32, 4, generator=draw)
    file = tmp_path / "zimage_turbo_training_adapter_v2.safetensors"
    key = f"diffusion_model.{layer}.lora"
    save_file({f"{key}_A.weight": down, f"{key}_B.weight": up}, file)
    pipe = opened("z_image", "turbo")
    pipe.load_lora(file, alpha="rank")
    torch.testing.assert_close(changed_weight(pipe, layer), up @ down)


def test_an_output_layer_may_have_its_original_name_beside_others_of_ours(
    tmp_path: Path,
) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors, wanted = {}, {}
    for theirs, ours in (("to_q", "to_q"), ("out", "to_out.0")):
        down = torch.randn(2, 32, generator=draw)
        up = torch.randn(32, 2, generator=draw)
        key = f"diffusion_model.layers.1.attention.{theirs}.lora"
        tensors |= {f"{key}_A.weight": down, f"{key}_B.weight": up}
        wanted[f"layers.1.attention.{ours}"] = up @ down
    save_file(tensors, tmp_path / "mixed.safetensors")
    pipe = opened("z_image", "base")
    pipe.load_lora(tmp_path / "mixed.safetensors", alpha="rank")
    for layer, change in wanted.items():
        torch.testing.assert_close(changed_weight(pipe, layer), change)
