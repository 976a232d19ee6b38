"""Published files, folders and single ones, are told by the names and shapes of their weights,
and their names are those that diffusers' converters know.
"""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.loaders.single_file_utils import (
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
    convert_open_clip_checkpoint,
)
from dstrain.models import components_of, recognize, to_checkpoint
from dstrain.pipeline.variant_choice import fitting_variants
from dstrain.plugin import Files
from dstrain_sdxl import BASE, INPAINT, MODEL
from safetensors.torch import load_file
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from tests.support.layouts import (
    PublishedFiles,
    assert_equal,
    digest_of,
    layout_shapes,
    network_of_noise,
    saved,
)
from tests.support.toys import toy

COMPONENTS = components_of(MODEL)
CLASSES = {
    "unet": UNet2DConditionModel,
    "text_encoder": CLIPTextModel,
    "text_encoder_2": CLIPTextModelWithProjection,
    "vae": AutoencoderKL,
}
PREFIXES = {
    "unet": "model.diffusion_model.",
    "text_encoder": "conditioner.embedders.0.transformer.",
    "text_encoder_2": "conditioner.embedders.1.model.",
    "vae": "first_stage_model.",
}
LOGIT_SCALE = "conditioner.embedders.1.model.logit_scale"
POSITIONS = "conditioner.embedders.0.transformer.text_model.embeddings.position_ids"

POSITIONS_2 = (
    "conditioner.embedders.1.model.transformer.text_model.embeddings.position_ids"
)


class TestPublishedFiles(PublishedFiles):
    family = MODEL
    files = (
        ("unet", BASE, None, "142b114f67f5ab3a6d83fb5788f12ded"),
        ("text_encoder_2", BASE, None, "98cc34ccc5b54ae0e56bdea8688dcd5a"),
        ("vae", BASE, None, "13115dd45a6e1c39860f91ab073b8a78"),
    )
    libraries = tuple(("base", name, kind) for name, kind in CLASSES.items())
    places = (
        ("unet/diffusion_pytorch_model.safetensors", "unet"),
        ("text_encoder/model.safetensors", "text_encoder"),
        ("text_encoder_2/model.safetensors", "text_encoder_2"),
        ("sdxl_vae.safetensors", "vae"),
    )
    told = (("unet", INPAINT), *((name, BASE) for name in CLASSES))


def with_convolutions(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a weight in a single file, where the VAE's attention is made of
    convolutions.
    """
    is_one = ".attn_1." in name and len(shape) == 2
    return (*shape, 1, 1) if is_one else shape


def test_a_single_file_has_the_published_layout() -> None:
    """With the first encoder's positions, it is sd_xl_base_1.0.safetensors; the other two are
    listed without a name: without positions, and with those of both encoders.
    """
    whole: dict[str, tuple[int, ...]] = {LOGIT_SCALE: ()}
    for name, prefix in PREFIXES.items():
        component = COMPONENTS[name]
        shapes = layout_shapes(
            component, component.published[BASE], component.formats[0]
        )
        for key, shape in shapes.items():
            whole[prefix + key] = with_convolutions(key, shape)
    assert digest_of(whole) == "d34167ecd389f17d58f6c907b65173fa"
    whole[POSITIONS] = (1, 77)
    assert digest_of(whole) == "4cf64a799d04260df438c6f33c9a047e"
    whole[POSITIONS_2] = (1, 77)
    assert digest_of(whole) == "1a9744a6f0c0e54ef40805c9d2b79ec6"


def test_one_file_holds_all_networks_as_diffusers_converters_read_them(
    tmp_path: Path,
) -> None:
    folder = toy("sdxl", "base")
    networks = {name: network_of_noise(COMPONENTS[name], folder) for name in PREFIXES}
    weights = {LOGIT_SCALE: torch.ones(()), POSITIONS: torch.arange(77)[None]}
    weights[POSITIONS_2] = weights[POSITIONS]
    # Marks of the file, which belong to no network.
    weights |= {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}
    for name, prefix in PREFIXES.items():
        file = to_checkpoint(COMPONENTS[name].formats[0], networks[name].state_dict())
        for key, weight in file.items():
            shape = with_convolutions(key, tuple(weight.shape))
            weights[prefix + key] = weight.reshape(shape)
    path = saved(tmp_path / "illustrious.safetensors", weights)

    states = {name: network.state_dict() for name, network in networks.items()}
    known = recognize(Files((path,)), list(COMPONENTS.values()))
    assert {one.name for (one,), _ in known} == set(PREFIXES)
    (unet,) = (files for (one,), files in known if one.name == "unet")
    implied = dict(unet.checkpoint_format.implies)
    assert fitting_variants(MODEL, {"in_channels": 4, **implied}) == ["v"]
    assert fitting_variants(MODEL, {"in_channels": 4}) == ["base", "v"]
    assert fitting_variants(MODEL, {"in_channels": 9}) == ["inpaint"]
    for (component,), files in known:
        place = folder / component.folder / "config.json"
        config = component.configure(json.loads(place.read_bytes()))
        loaded: Any = component.network.load(files, config, torch.float32)
        assert_equal(loaded.state_dict(), states[component.name])

    file = load_file(path)
    del file[POSITIONS_2]
    unet = convert_ldm_unet_checkpoint(dict(file), networks["unet"].config)
    assert_equal(unet, states["unet"])
    encoder = networks["text_encoder_2"]
    prefix = PREFIXES["text_encoder_2"]
    found = convert_open_clip_checkpoint(encoder, dict(file), prefix)
    assert_equal(found, states["text_encoder_2"])
    vae = convert_ldm_vae_checkpoint(dict(file), networks["vae"].config)
    assert_equal(
        {key: one.reshape(states["vae"][key].shape) for key, one in vae.items()},
        states["vae"],
    )
