"""What a ControlNet beside the denoiser takes, and one call of both."""

from typing import Any, TypedDict

import torch
from dstrain.plugin import versioned
from dstrain.plugin.functional import around_blocks, convert_image
from PIL import Image
from torch import Tensor

from dstrain_z_image.model_fn import predict
from dstrain_z_image.units import encode_with_vae


class Control(TypedDict):
    """A control image in the VAE's latent space, normalized."""

    control_latents: Tensor
    """(1, 16, height / 8, width / 8), fp32."""


@versioned(1)
def encode_control_image(
    controlnet_image: Image.Image,
    height: int,
    width: int,
    *,
    vae: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> Control:
    """Encode a control image, such as edges or depths, at the size of the image to
    generate.
    """
    image = convert_image(controlnet_image, "RGB")
    resized = image.resize((width, height), Image.Resampling.LANCZOS)
    return {"control_latents": encode_with_vae(resized, vae, device, dtype)}


def predict_controlled(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_mask: Tensor,
    control_latents: Tensor,
    controlnet_scale: float = 1.0,
    *,
    dit: Any,
    controlnet: Any,
) -> Tensor:
    """Predict as `predict` does; a layer of the ControlNet adds to the tokens after the
    block that it is beside, times controlnet_scale.
    """
    # Of the whole network, whose call puts its weights together where it is sharded.
    control = controlnet(control_latents)
    refiners, places = (
        controlnet.control_noise_refiner,
        controlnet.control_layers_places,
    )
    layers = {f"noise_refiner.{i}": one for i, one in enumerate(refiners)}
    for place, layer in zip(places, controlnet.control_layers, strict=True):
        layers[f"layers.{place}"] = layer
    names = list(layers)
    passed: dict[str, Tensor] = {}

    def add_control(name: str, block: Any, tokens: Tensor, *given: Any) -> Any:
        if name not in layers:
            return block(tokens, *given)
        if name == names[0]:
            missing = tokens.shape[1] - control.shape[1]
            padding = dit.x_pad_token.to(control).expand(len(control), missing, -1)
            before = torch.cat([control, padding], dim=1)
        else:
            before = passed[names[names.index(name) - 1]]
        if name == "layers.0":
            before = torch.cat([before, tokens[:, before.shape[1] :]], dim=1)
        first = layers[name].block_id == 0
        # The mask, the positions and the time of the block.
        hint, after = layers[name](
            before if first else before[None], tokens, *given[:3]
        )
        # A block that is recomputed finds what it found before.
        passed.setdefault(name, after)
        return block(tokens, *given) + controlnet_scale * hint

    with around_blocks(dit, add_control):
        return predict(noisy_latents, timestep, prompt_emb, prompt_mask, dit=dit)
