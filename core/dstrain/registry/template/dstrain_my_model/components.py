"""The components: how their files are recognised, configured and loaded."""

from dstrain.plugin import Component, DiffusersNetwork

DENOISER = DiffusersNetwork("dstrain_my_model.networks:Denoiser")
TEXT_ENCODER = DiffusersNetwork("dstrain_my_model.networks:TextEncoder")
VAE = DiffusersNetwork("dstrain_my_model.networks:Vae")

COMPONENTS: tuple[Component, ...] = (
    Component(
        name="dit",
        folders=("transformer",),
        load=DENOISER.load,
        key_patterns=("proj_in.weight", "blocks.*.to_q.weight"),
        configure=DENOISER.configure,
    ),
    Component(
        name="text_encoder",
        folders=("text_encoder",),
        load=TEXT_ENCODER.load,
        key_patterns=("embed.weight", "layer.weight"),
        configure=TEXT_ENCODER.configure,
    ),
    Component(
        name="vae",
        folders=("vae",),
        load=VAE.load,
        key_patterns=("encoder.weight", "decoder.weight"),
        configure=VAE.configure,
    ),
)
