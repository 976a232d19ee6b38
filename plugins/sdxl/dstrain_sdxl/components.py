"""SDXL's components: how their files are recognized, configured and loaded."""

from pathlib import Path

from dstrain.plugin import (
    Component,
    DiffusersNetwork,
    Tokenizer,
    TransformersNetwork,
    read_key_maps,
)

from dstrain_sdxl import BASE, INPAINT, NOOB_V

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


COMPONENTS = (
    Component(
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
        network=DiffusersNetwork("AutoencoderKL"),
        folder="vae",
        version=1,
        default_configs=dict.fromkeys(IDS, CONFIGS / "vae.json"),
        original_filenames=("sdxl_vae*",),
        **KEY_MAPS["vae"],
    ),
    *(
        Component(name, network=Tokenizer("CLIPTokenizer"), folder=name, version=1)
        for name in ("tokenizer", "tokenizer_2")
    ),
)
