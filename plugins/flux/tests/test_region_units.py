"""Prompts of regions are encoded as prompts are, and masks are as large as latents."""

from typing import Any

import numpy as np
import pytest
import torch
from dstrain import UsageError
from dstrain_flux.model_fn import region_mask
from dstrain_flux.region_units import encode_entities, resize_entity_masks
from dstrain_flux.units import encode_prompt
from PIL import Image

CPU = torch.device("cpu")


def test_each_prompt_is_encoded_alone(loaded: dict[str, Any]) -> None:
    parts = {name: loaded[name] for name in ("text_encoder_2", "tokenizer_2", "device")}
    made = encode_entities(["a dog", "a red cat"], **parts)["entity_emb"]
    for i, prompt in enumerate(("a dog", "a red cat")):
        assert torch.equal(made[:, i], encode_prompt(prompt, **parts)["prompt_emb"])


def test_of_each_eight_by_eight_pixels_one_tells_and_half_grey_is_white() -> None:
    pixels = np.zeros((32, 48), dtype=np.uint8)
    pixels[4, 4], pixels[12, 20], pixels[0, 0] = 128, 127, 255
    masks = [Image.fromarray(pixels), Image.new("RGB", (10, 10), "white")]
    made = resize_entity_masks(masks, ["a", "b"], 32, 48, device=CPU)["entity_masks"]
    assert made.shape == (1, 2, 4, 6)
    assert made[0, 0].nonzero().tolist() == [[0, 0]]
    assert made[0, 1].all()


def test_a_region_without_a_prompt_is_refused() -> None:
    masks = [Image.new("L", (16, 16))] * 2
    with pytest.raises(UsageError, match="masks: 2, prompts: 1; each region"):
        resize_entity_masks(masks, ["a"], 16, 16, device=CPU)


def test_a_prompt_sees_itself_and_its_region() -> None:
    masks = torch.zeros(1, 2, 4, 4, dtype=torch.bool)
    masks[0, 0, 1, 1] = masks[0, 1, 2, 3] = True
    mask = region_mask(masks, 2)[0, 0]
    # Two tokens of each of three prompts, then the image's 2 x 2.
    wanted = torch.zeros(10, 10, dtype=torch.bool)
    for start in (0, 2, 4):
        wanted[start : start + 2, start : start + 2] = True
    wanted[0:2, 6] = wanted[2:4, 9] = wanted[4:6, 6:] = True
    wanted |= wanted.T.clone()
    wanted[6:, 6:] = True
    assert torch.equal(mask, wanted)
