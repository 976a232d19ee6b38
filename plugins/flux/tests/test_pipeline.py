"""The variants: their schedule, and which one a model's files are of."""

import numpy as np
import pytest
from dstrain.cli.main import main
from dstrain_flux import MODEL
from PIL import Image

from tests.support.noise_images import noise_image
from tests.support.toys import toy

TOLD = {"fill": "fill", "redux": "redux", "ip-adapter": "ip-adapter", "dev": "dev"}
"""Variant of a folder -> the one that it is loaded as, if it tells."""
TOLD |= dict.fromkeys(("kontext", "eligen"), "dev")


def test_training_draws_from_diffsynths_table() -> None:
    """Shift 3 over 1000 values from 1 to sigma_min = .003 / 1.002, whatever the size."""
    plain = np.linspace(1.0, 0.003 / 1.002, 1000)
    shifted = 3 * plain / (1 + 2 * plain)
    table = MODEL.spec("dev").schedule.table.numpy()
    assert np.abs(table - shifted).max() < 1e-7


def test_the_area_of_an_edited_image_has_at_least_the_pixels_of_one_multiple() -> None:
    words = ["graph", "--model", "flux", "--variant", "kontext", "--kontext_pixels"]
    assert [main([*words, least]) for least in ("256", "255")] == [0, 2]


@pytest.mark.usefixtures("empty")
def test_generate_starts_from_a_file_in_its_own_size() -> None:
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
