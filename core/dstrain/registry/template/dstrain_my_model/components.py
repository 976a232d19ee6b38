"""Components: how their files are recognized and loaded."""

from dstrain.plugin import Component, DiffusersNetwork

COMPONENTS = (
    Component(
        "dit",
        network=DiffusersNetwork("dstrain_my_model.networks:Denoiser"),
        folder="transformer",
        key_patterns=("proj_in.weight", "blocks.*.to_k.weight"),
    ),
    Component(
        "text_encoder",
        network=DiffusersNetwork("dstrain_my_model.networks:TextEncoder"),
        folder="text_encoder",
        key_patterns=("embed.weight", "layer.weight"),
    ),
    Component(
        "vae",
        network=DiffusersNetwork("dstrain_my_model.networks:Vae"),
        folder="vae",
        key_patterns=("encoder.weight", "decoder.weight"),
    ),
)
