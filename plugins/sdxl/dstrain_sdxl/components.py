"""SDXL's components: how their files are recognized, configured and loaded, and toys."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from dstrain.plugin import (
    Component,
    DiffusersNetwork,
    Files,
    Tokenizer,
    TransformersNetwork,
    read_key_maps,
    toy_writer,
)

from dstrain_sdxl import BASE, INPAINT, NOOB_V, TOKENIZERS

CONFIGS = Path(__file__).parent / "configs"
IDS = (BASE, NOOB_V, INPAINT)
KEY_MAPS = read_key_maps(CONFIGS / "key_maps.json")


def clip(name: str, network_class: str) -> Component:
    """Return a text encoder."""
    return Component(
        name,
        network=TransformersNetwork(network_class, "CLIPTextConfig"),
        folder=name,
        version=1,
        default_configs=dict.fromkeys(IDS, CONFIGS / f"{name}.json"),
        **KEY_MAPS[name],
    )


class Vae(DiffusersNetwork):
    """The VAE, in fp32 where its configuration says that it overflows in fp16."""

    def build(self, configuration: Any) -> Any:
        """Build the network, its weights random."""
        network: Any = super().build(configuration)
        if configuration.force_upcast:
            network.weights_dtype = torch.float32
        return network


class Unet(Component):
    """The denoiser, also in a single file with a mark of v-prediction."""

    def part_of(self, files: Files, names: list[str]) -> Files | None:
        """Return its part of files with these keys; None if they have none of it."""
        found = super().part_of(files, names)
        if found is not None and "v_pred" in names:
            implied = (("prediction_type", "v_prediction"),)
            marked = replace(found.checkpoint_format, implies=implied)
            found = replace(found, checkpoint_format=marked)
        return found


COMPONENTS = (
    Unet(
        "unet",
        network=DiffusersNetwork("UNet2DConditionModel"),
        folder="unet",
        version=1,
        default_configs={
            **dict.fromkeys(IDS, CONFIGS / "unet.json"),
            INPAINT: CONFIGS / "unet_inpaint.json",
        },
        as_loaded=("time_embedding.*", "add_embedding.*"),
        **KEY_MAPS["unet"],
    ),
    clip("text_encoder", "CLIPTextModel"),
    clip("text_encoder_2", "CLIPTextModelWithProjection"),
    Component(
        "vae",
        network=Vae("AutoencoderKL"),
        folder="vae",
        version=2,
        default_configs=dict.fromkeys(IDS, CONFIGS / "vae.json"),
        original_filenames=("sdxl_vae*",),
        **KEY_MAPS["vae"],
    ),
    *(
        Component(name, network=Tokenizer("CLIPTokenizer"), folder=name, version=1)
        for name in TOKENIZERS
    ),
)
write_toy = toy_writer(COMPONENTS, **json.loads((CONFIGS / "toy.json").read_bytes()))
