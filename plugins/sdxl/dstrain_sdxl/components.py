"""SDXL's components: how their files are recognized, configured and loaded."""

from pathlib import Path

from dstrain.plugin import (
    Component,
    DiffusersNetwork,
    Tokenizer,
    TransformersNetwork,
    read_key_maps,
)

from dstrain_sdxl import BASE

CONFIGS = Path(__file__).parent / "configs"
KEY_MAPS = read_key_maps(CONFIGS / "key_maps.json")

COMPONENTS = (
    Component(
        "unet",
        network=DiffusersNetwork("UNet2DConditionModel"),
        folder="unet",
        version=1,
        default_configs={BASE: CONFIGS / "unet.json"},
        as_loaded=("time_embedding.*", "add_embedding.*"),
        **KEY_MAPS["unet"],
    ),
    Component(
        "text_encoder",
        network=TransformersNetwork("CLIPTextModel", "CLIPTextConfig"),
        folder="text_encoder",
        version=1,
        default_configs={BASE: CONFIGS / "text_encoder.json"},
        **KEY_MAPS["text_encoder"],
    ),
    Component(
        "text_encoder_2",
        network=TransformersNetwork("CLIPTextModelWithProjection", "CLIPTextConfig"),
        folder="text_encoder_2",
        version=1,
        default_configs={BASE: CONFIGS / "text_encoder_2.json"},
        **KEY_MAPS["text_encoder_2"],
    ),
    Component(
        "vae",
        network=DiffusersNetwork("AutoencoderKL"),
        folder="vae",
        version=1,
        default_configs={BASE: CONFIGS / "vae.json"},
        original_filenames=("sdxl_vae*",),
        **KEY_MAPS["vae"],
    ),
    Component(
        "tokenizer", network=Tokenizer("CLIPTokenizer"), folder="tokenizer", version=1
    ),
    Component(
        "tokenizer_2",
        network=Tokenizer("CLIPTokenizer"),
        folder="tokenizer_2",
        version=1,
    ),
)
