"""Z-Image's denoiser: its time is 1 - timestep / 1000, and it predicts x_0 - noise."""

from typing import Any

import torch
from dstrain.plugin import functional, versioned
from torch import Tensor

SIDE_MULTIPLE = 16
"""Pixels of a patch of 2x2 latents, along each side."""


def predict(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_parts: Tensor,
    *,
    dit: Any,
) -> Tensor:
    """Predict noise - x_0, as noisy_latents, (batch, 16, h, w); prompt_parts pads with 0."""
    texts = [emb[part > 0] for emb, part in zip(prompt_emb, prompt_parts, strict=True)]
    return denoise(dit, list(noisy_latents[:, :, None]), timestep, texts)


def predict_edit(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_parts: Tensor,
    edit_latents: list[Tensor] | None = None,
    edit_embs: list[Tensor] | None = None,
    *,
    dit: Any,
) -> Tensor:
    """Predict as `predict` does, beside images to edit, (batch, 16, h, w) each, with their
    SigLIP embeddings, (batch, rows, columns, channels); the transformer sees them at time 1.
    """
    latents, embeddings = edit_latents or [], edit_embs or []
    numbers = range(1, len(latents) + 3 if latents else 2)
    images, texts, visions = [], [], []
    for i, noisy in enumerate(noisy_latents):
        images.append([*(one[i, :, None] for one in latents), noisy[:, None]])
        texts.append([prompt_emb[i][prompt_parts[i] == number] for number in numbers])
        visions.append([*(one[i] for one in embeddings), None] if latents else None)
    named = {"siglip_feats": visions}
    named["image_noise_mask"] = [[0] * len(latents) + [1]] * len(images)
    return denoise(dit, images, timestep, texts, **named)


def predict_controlled(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    prompt_parts: Tensor,
    control_latents: Tensor,
    controlnet_scale: float = 1.0,
    *,
    dit: Any,
    controlnet: Any,
) -> Tensor:
    """Predict as `predict` does; layers of the ControlNet add to what blocks make."""
    # Of the whole network, whose call puts its weights together where it is sharded.
    control = controlnet(control_latents)
    layers = controlnet.layers_by_block
    passed: dict[str, Tensor] = {}

    def add_control(name: str, block: Any, tokens: Tensor, *given: Any) -> Any:
        if name not in layers:
            return block(tokens, *given)
        layer, previous = layers[name]
        before = passed.get(previous, control)
        # With the image's padding, then with its texts, as the block has them.
        whole = torch.cat([before, tokens[:, before.shape[1] :]], dim=1)
        entry = whole if layer.block_id == 0 else whole[None]
        hint, after = layer(entry, tokens, *given[:3])  # mask, positions, time
        passed.setdefault(name, after)  # a block that is recomputed finds what it found
        return block(tokens, *given) + controlnet_scale * hint

    with functional.around_blocks(dit, add_control):
        return predict(noisy_latents, timestep, prompt_emb, prompt_parts, dit=dit)


def denoise(
    dit: Any, images: list[Any], timestep: Tensor, texts: list[Any], **named: Any
) -> Tensor:
    """Return what is predicted for the (last) image of each sample, (batch, 16, h, w)."""
    time = (1000 - timestep) / 1000
    predicted = dit(images, time, texts, return_dict=False, **named)[0]
    return -torch.stack(predicted)[:, :, 0]


def apply_guidance(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """Apply classifier-free guidance, off at 0, as the publisher and diffusers do."""
    return positive + scale * (positive - negative)


@versioned(1)
def latent_shape(height: int, width: int) -> tuple[int, ...]:
    """Return (1, 16, height / 8, width / 8); refuses sides that are no multiples of 16."""
    functional.check_sides(height, width, SIDE_MULTIPLE)
    return (1, 16, height // 8, width // 8)
