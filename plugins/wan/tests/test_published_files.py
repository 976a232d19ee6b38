"""Published files are told by their places and by the names and shapes of their weights."""

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from dstrain.models import components_of
from dstrain.models.configs import infer_config
from dstrain.plugin import Files
from dstrain_wan import MODEL
from transformers import CLIPVisionModel, UMT5EncoderModel

from tests.support.layouts import PublishedFiles, digest_of, layout_shapes, settings

COMPONENTS = components_of(MODEL)
I2V = "Wan-AI/Wan2.1-I2V-14B-480P"
SPEED = "DiffSynth-Studio/Wan2.1-1.3b-speedcontrol-v1"
# The digests as DiffSynth-Studio lists published files.
TRANSFORMERS = {
    "Wan-AI/Wan2.1-T2V-1.3B": "9269f8db9040a9d860eaca435be61814",
    "Wan-AI/Wan2.1-T2V-14B": "aafcfd9672c3a2456dc46e1cb6e52c70",
    I2V: "6bfcfb3b342cb286ce886889d519a77e",
    "Wan-AI/Wan2.1-FLF2V-14B-720P": "3ef3b1f8e1dab83d5b71fd7b617f859f",
    "PAI/Wan2.1-Fun-1.3B-InP": "6d6ccde6845b95ad9114ab993d917893",
    "PAI/Wan2.1-Fun-14B-InP": "6bfcfb3b342cb286ce886889d519a77e",
    "PAI/Wan2.1-Fun-1.3B-Control": "349723183fc063b2bfc10bb2835cf677",
    "PAI/Wan2.1-Fun-14B-Control": "efa44cddf936c70abd0ea28b6cbe946c",
    "PAI/Wan2.1-Fun-V1.1-1.3B-Control": "70ddad9d3a133785da5ea371aae09504",
    "PAI/Wan2.1-Fun-V1.1-14B-Control": "26bde73488a92e64cc20b0a7485b9e5b",
    "PAI/Wan2.1-Fun-V1.1-1.3B-Control-Camera": "ac6a5aa74f4a0aab6f64eb9a72f19901",
    "PAI/Wan2.1-Fun-V1.1-14B-Control-Camera": "b61c605c2adbd23124d152ed28e049ae",
    "PAI/Wan2.2-Fun-A14B-Control": "2267d489f0ceb9f21836532952852ee5",
    "PAI/Wan2.2-Fun-A14B-Control-Camera": "47dbeab5e560db3180adf51dc0232fb1",
    "Wan-AI/Wan2.2-I2V-A14B": "5b013604280dd715f8457c6ed6d6a626",
    "Wan-AI/Wan2.2-TI2V-5B": "1f5ab7703c6fc803fdded85ff040c316",
}


class TestPublishedFiles(PublishedFiles):
    family = MODEL
    files = (
        *(("dit", model_id, 0, digest) for model_id, digest in TRANSFORMERS.items()),
        ("vae", "Wan-AI/Wan2.1-T2V-14B", 1, "ccc42284ea13e1ad04693284c7a09be6"),
        ("vae", "Wan-AI/Wan2.2-TI2V-5B", 0, "e1de6c02cdac79f8b739f4d3698cd216"),
        ("text_encoder", I2V, 0, "9c8818c2cbea55eca56c7b447df170da"),
        ("motion_controller", SPEED, None, "dbd5ec76bbf977983f972c151d545389"),
    )
    told = tuple(("dit", model_id) for model_id in TRANSFORMERS)
    libraries = (
        ("i2v", "dit", WanTransformer3DModel),
        ("t2v-a14b", "dit2", WanTransformer3DModel),
        ("ti2v-5b", "vae", AutoencoderKLWan),
        ("i2v", "text_encoder", UMT5EncoderModel),
        ("i2v", "image_encoder", CLIPVisionModel),
    )
    places = (
        ("diffusion_pytorch_model*.safetensors", "dit"),
        ("high_noise_model/diffusion_pytorch_model*.safetensors", "dit"),
        ("low_noise_model/diffusion_pytorch_model*.safetensors", "dit2"),
        ("models_t5_umt5-xxl-enc-bf16.pth", "text_encoder"),
        ("Wan2.1_VAE.pth", "vae"),
        ("Wan2.2_VAE.pth", "vae"),
        ("models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth", "image_encoder"),
        ("google/umt5-xxl/", "tokenizer"),
    )


def test_the_transformer_of_krea_has_a_prefix() -> None:
    dit = COMPONENTS["dit"]
    config = dit.published["krea/krea-realtime-video"]
    shapes = layout_shapes(dit, config, dit.formats[0])
    named = {f"model.{name}": shape for name, shape in shapes.items()}
    assert digest_of(named) == "5ec04e02b42d2580483ad69f4e76346a"
    part = dit.part_of(Files((Path("model.safetensors"),)), list(named))
    assert part is not None
    assert (part.prefix, part.checkpoint_format) == ("model.", dit.formats[0])


@pytest.mark.parametrize(
    ("model_id", "digest"),
    [
        ("iic/VACE-Wan2.1-1.3B-Preview", "a61453409b67cd3246cf0c3bebad47ba"),
        ("Wan-AI/Wan2.1-VACE-14B", "7a513e1f257a861512b1afd387a8ecd9"),
    ],
)
def test_one_file_has_the_denoiser_and_vace(model_id: str, digest: str) -> None:
    shapes = {}
    for name in ("dit", "vace"):
        one = COMPONENTS[name]
        shapes |= layout_shapes(one, one.published[model_id], one.formats[0])
    assert digest_of(shapes) == digest


@pytest.mark.parametrize("model_id", ["Wan-AI/Wan2.1-T2V-14B", "Wan-AI/Wan2.2-TI2V-5B"])
def test_a_vae_is_told_by_its_weights(model_id: str) -> None:
    vae = COMPONENTS["vae"]
    content = vae.published[model_id]
    assert infer_config(vae, layout_shapes(vae, content)) == content
    assert len(content["latents_mean"]) == len(content["latents_std"])


def test_the_vae_of_2_1_is_the_librarys_default() -> None:
    vae = COMPONENTS["vae"]
    content = vae.published["Wan-AI/Wan2.1-T2V-14B"]
    assert settings(vae, content) == settings(vae, {})


def test_the_image_encoder_has_the_published_size() -> None:
    encoder = COMPONENTS["image_encoder"]
    shapes = layout_shapes(encoder, encoder.published[I2V])
    assert sum(map(torch.Size.numel, map(torch.Size, shapes.values()))) == 630_766_080
