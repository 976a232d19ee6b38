"""A part of an image is generated anew, and the rest is kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import InputError
from dstrain.cli.main import main
from dstrain.plugin import Unit
from dstrain_qwen_image import inpaint
from PIL import Image

from tests.support.noise_images import noise_image


def half_mask(width: int, height: int) -> Image.Image:
    mask = Image.new("L", (width, height))
    mask.paste(255, (width // 2 - 3, 0, width, height))
    return mask


@torch.no_grad()
def test_what_is_outside_the_mask_is_the_image_as_noisy_as_the_rest(
    loaded: dict[str, Any],
) -> None:
    values = {"input_image": noise_image(48, 32), "inpaint_mask": half_mask(48, 32)}
    made = Unit(inpaint.encode_inpainted).run(
        {**values, "height": 32, "width": 48}, loaded
    )
    assert made["inpaint_region"][0, 0, 0].tolist() == [[0, 0, 0, 1, 1, 1]] * 4
    latents, noise = (
        torch.full((2, 16, 1, 4, 6), 9.0),
        torch.full((2, 16, 1, 4, 6), 2.0),
    )
    times = torch.tensor([0.0, 250.0])
    found = inpaint.keep_outside(latents, times, noise, **made)
    assert (found.latents[..., 3:] == 9).all()
    kept = made["input_latents"][0, ..., :3]
    assert torch.equal(found.latents[0, ..., :3], kept)
    assert torch.allclose(found.latents[1, ..., :3], 0.25 * 2 + 0.75 * kept)
    assert torch.equal(found.mask, made["inpaint_region"])


@torch.no_grad()
def test_a_fine_mask_has_the_latents_that_it_touches(loaded: dict[str, Any]) -> None:
    mask = Image.new("L", (48, 32))
    mask.paste(255, (9, 1, 12, 3))
    given = {"input_image": noise_image(48, 32), "inpaint_mask": mask}
    made = Unit(inpaint.encode_inpainted).run(
        {**given, "height": 32, "width": 48}, loaded
    )
    assert made["inpaint_region"].nonzero()[:, 3:].tolist() == [[0, 1]]


def test_a_black_mask_is_refused(loaded: dict[str, Any]) -> None:
    given = {
        "input_image": noise_image(48, 32),
        "inpaint_mask": Image.new("L", (48, 32)),
    }
    with pytest.raises(InputError, match="inpaint_mask: is black"):
        Unit(inpaint.encode_inpainted).run({**given, "height": 32, "width": 48}, loaded)


def test_generate_repaints_a_part_of_a_file(
    toy_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    noise_image(64, 32).save("image.png")
    half_mask(64, 32).save("mask.png")
    words = ["generate", "--model", "qwen_image", "--model_id", str(toy_of("base"))]
    words += ["--prompt", "a dog", "--height", "32", "--width", "64"]
    words += ["--num_inference_steps", "1", "--input", "input_image=image.png"]
    assert main([*words, "--output", "new.png"]) != 0
    words += ["--input", "inpaint_mask=mask.png"]
    assert main([*words, "--output", "new.png"]) == 0
    with Image.open("new.png") as made:
        assert made.size == (64, 32)
