"""FLUX's denoiser with a network beside it: one call of both."""

from typing import Any

import torch
from dstrain.plugin import InputError
from dstrain.plugin.functional import around_blocks, pack
from torch import Tensor

from dstrain_flux.model_fn import call, denoise


def predict_controlnet(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    pooled_emb: Tensor,
    control_latents: Tensor,
    embedded_guidance: float = 1.0,
    controlnet_scale: float = 1.0,
    *,
    dit: Any,
    controlnet: Any,
) -> Tensor:
    """Predict as `model_fn.predict` does; what the ControlNet makes of the control image
    is added to the image's tokens after each block.

    Args:
        noisy_latents: As in `model_fn.predict`, like what follows.
        timestep: The ControlNet gets it, too, as it gets the prompt.
        prompt_emb: Text.
        pooled_emb: Text.
        control_latents: (batch, 16 or more, h, w): the control image.
        embedded_guidance: Given to each of the two networks that embeds it.
        controlnet_scale: Factor of what is added.
        dit: The denoiser.
        controlnet: The ControlNet.
    """
    given = (timestep, prompt_emb, pooled_emb, embedded_guidance)
    control = (control_latents, controlnet_scale)
    return _controlled(dit, controlnet, noisy_latents, given, *control)


def predict_controlnet_union(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    pooled_emb: Tensor,
    control_latents: Tensor,
    control_mode: Tensor,
    embedded_guidance: float = 1.0,
    controlnet_scale: float = 1.0,
    *,
    dit: Any,
    controlnet: Any,
) -> Tensor:
    """Predict as `predict_controlnet` does; control_mode, (batch, 1) integers, says what
    kind of image each control image is.
    """
    given = (timestep, prompt_emb, pooled_emb, embedded_guidance)
    control = (control_latents, controlnet_scale, control_mode)
    return _controlled(dit, controlnet, noisy_latents, given, *control)


def predict_ipadapter(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    pooled_emb: Tensor,
    image_embs: Tensor,
    embedded_guidance: float = 1.0,
    ipadapter_scale: float = 1.0,
    *,
    dit: Any,
    ipadapter: Any,
    branch: str,
) -> Tensor:
    """Predict as `model_fn.predict` does; each block also attends to images.

    Args:
        noisy_latents: As in `model_fn.predict`, like the next three.
        timestep: Noise level.
        prompt_emb: Text.
        pooled_emb: Text.
        image_embs: (batch, images, channels), from SigLIP; zeros in the negative branch, as
            in DiffSynth-Studio.
        embedded_guidance: As in `model_fn.predict`.
        ipadapter_scale: Factor of what is added to the attention of each block.
        dit: The denoiser.
        ipadapter: The IP-Adapter.
        branch: The branch of guidance.
    """
    if branch == "negative":
        image_embs = torch.zeros_like(image_embs)
    # Of the whole network, whose call puts its weights together where it is sharded.
    tokens = ipadapter(image_embs)
    layers = _layers_by_block(dit, ipadapter)

    def attend(name: str, block: Any, *arguments: Any, **named: Any) -> Any:
        attention = dit.get_submodule(name).attn
        with layers[name].beside(attention, tokens, ipadapter_scale):
            return block(*arguments, **named)

    with around_blocks(dit, attend):
        given = (timestep, prompt_emb, pooled_emb, embedded_guidance)
        return denoise(dit, [noisy_latents], *given)


def _layers_by_block(dit: Any, ipadapter: Any) -> dict[str, Any]:
    """Return the layers of an IP-Adapter by the names of the denoiser's blocks; raises
    InputError where their numbers differ.
    """
    names = [
        f"{kind}.{i}"
        for kind in ("transformer_blocks", "single_transformer_blocks")
        for i in range(len(getattr(dit, kind)))
    ]
    layers = ipadapter.ip_adapter
    if len(layers) != len(names):
        what = f"is for {len(layers)} blocks, and the denoiser has {len(names)}"
        raise InputError("ipadapter", what)
    return dict(zip(names, layers, strict=True))


def _controlled(
    dit: Any,
    controlnet: Any,
    noisy_latents: Tensor,
    given: tuple[Any, ...],
    control_latents: Tensor,
    scale: float,
    mode: Tensor | None = None,
) -> Tensor:
    """Predict with what a ControlNet makes of the control image; `given` as `call` takes it."""
    joint, single = call(
        controlnet,
        [noisy_latents],
        *given,
        controlnet_cond=pack(control_latents),
        controlnet_mode=mode,
        conditioning_scale=scale,
    )
    added = {
        "controlnet_block_samples": joint,
        "controlnet_single_block_samples": single,
    }
    return denoise(dit, [noisy_latents], *given, **added)
