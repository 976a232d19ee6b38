"""The variants: their schedule, and which one a model's files are of."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from dstrain.cli.main import main
from dstrain_flux import MODEL
from PIL import Image

from tests.support.noise_images import noise_image
from tests.support.toys import toy

TOLD = {"fill": "fill", "redux": "redux", "ip-adapter": "ip-adapter", "dev": "dev"}
"""Variant of a folder -> the one that it is loaded as, if it tells."""
TOLD |= dict.fromkeys(("kontext", "eligen"), "dev")


@pytest.mark.parametrize(("steps", "tokens"), [(2, 4), (6, 24), (28, 256), (50, 4096)])
def test_sigmas_are_bit_equal_to_the_published_scheduler(
    steps: int, tokens: int
) -> None:
    folder, schedule = toy("flux", "dev"), MODEL.spec("dev").schedule
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
    plain = np.linspace(1.0, 1 / steps, steps)
    scheduler.set_timesteps(sigmas=plain, mu=schedule.mu(tokens))
    assert torch.equal(scheduler.sigmas, schedule.sigmas(steps, tokens))


def test_training_draws_from_diffsynths_table() -> None:
    """Shift 3 over 1000 values from 1 to sigma_min = .003 / 1.002, whatever the size."""
    plain = np.linspace(1.0, 0.003 / 1.002, 1000)
    shifted = 3 * plain / (1 + 2 * plain)
    table = MODEL.spec("dev").schedule.table.numpy()
    assert np.abs(table - shifted).max() < 1e-7


def test_generate_starts_from_a_file_in_its_own_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    noise_image(70, 40).save("image.png")
    words = ["generate", "--model_id", str(toy("flux", "dev")), "--variant", "dev"]
    words += ["--prompt", "dog", "--num_inference_steps", "2", "--output", "new.png"]
    words += ["--input", "input_image=image.png"]
    assert main([*words, "--denoising_strength", "0"]) == 2
    # Nothing starts from it.
    assert main(words) == 2
    assert main([*words, "--denoising_strength", "0.5"]) == 0
    with Image.open("new.png") as made:
        assert made.size == (64, 32)
        assert made.text["denoising_strength"] == "0.5"
