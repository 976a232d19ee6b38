"""Speed control: how fast what a video shows moves."""

from typing import Any, TypedDict

import torch
from dstrain.plugin import versioned
from dstrain.plugin.functional import around_blocks
from torch import Tensor

from dstrain_wan import model_fn

GREATEST_SPEED = 100
"""The least is 0 (WanMotionControllerModel of DiffSynth-Studio embeds ten times as much)."""


class Speed(TypedDict):
    """How fast a video is."""

    speed: Tensor
    """(1,), fp32, 0 to 100."""


@versioned(1)
def encode_speed(motion_bucket_id: float) -> Speed:
    """Return the speed as a tensor, so that each sample of a batch has its own."""
    return {"speed": torch.tensor([motion_bucket_id], dtype=torch.float32)}


def predict(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    speed: Tensor,
    *,
    dit: Any,
    motion_controller: Any,
) -> Tensor:
    """Predict as `model_fn.predict` does, with the speed, (batch,), in the modulation of
    each block.
    """
    added = motion_controller(speed)

    def call(
        name: str,
        block: Any,
        tokens: Tensor,
        text: Tensor,
        modulation: Tensor,
        rotary: Any,
    ) -> Any:
        return block(tokens, text, modulation + added, rotary)

    with around_blocks(dit, call):
        return model_fn.predict(noisy_latents, timestep, prompt_emb, dit=dit)
