"""The pipelines of diffusers, and which of its parts a component here is."""

from types import MappingProxyType

from diffusers import (
    Flux2KleinPipeline,
    FluxPipeline,
    QwenImagePipeline,
    StableDiffusionXLPipeline,
    WanPipeline,
    ZImagePipeline,
)

PIPELINES = MappingProxyType(
    {
        "qwen_image": QwenImagePipeline,
        "flux": FluxPipeline,
        "flux2": Flux2KleinPipeline,
        "wan": WanPipeline,
        "z_image": ZImagePipeline,
        "sdxl": StableDiffusionXLPipeline,
    }
)

_OF_ONE = {"transformer": "dit"} | {
    name: name for name in ("vae", "text_encoder", "tokenizer")
}
PIPELINE_PARTS = MappingProxyType(
    {
        "qwen_image": _OF_ONE,
        "flux": {
            "transformer": "dit",
            "vae": "vae",
            "text_encoder": "text_encoder_1",
            "tokenizer": "tokenizer_1",
            "text_encoder_2": "text_encoder_2",
            "tokenizer_2": "tokenizer_2",
        },
        "flux2": _OF_ONE,
        "wan": _OF_ONE,
        "z_image": _OF_ONE,
        "sdxl": {
            name: name
            for name in (
                *("unet", "vae", "text_encoder", "text_encoder_2"),
                *("tokenizer", "tokenizer_2"),
            )
        },
    }
)
