"""From an image, every step equals that of diffusers' pipeline."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxImg2ImgPipeline
from diffusers.pipelines.flux import pipeline_flux_img2img
from dstrain import Pipeline
from dstrain.cli.main import main
from dstrain.models import pack
from dstrain_flux import MODEL
from PIL import Image
from torch import Tensor

from tests.support.noise_images import noise_image
from tests.support.published_steps import add_to, assert_equal_steps, encode_the_mode

PROMPT, NEGATIVE = "a dog and the cat on a red table", "blurry, ugly"
PARTS = {
    "transformer": "dit",
    "text_encoder": "text_encoder_1",
    "text_encoder_2": "text_encoder_2",
    "tokenizer": "tokenizer_1",
    "tokenizer_2": "tokenizer_2",
    "vae": "vae",
}


@pytest.mark.parametrize(
    ("strength", "scale"), [(0.05, 1.0), (0.5, 1.0), (0.72, 3.0), (1.0, 1.0)]
)
def test_every_step_equals_that_of_flux_img2img_pipeline(
    strength: float,
    scale: float,
    toy_folder: Path,
    loaded: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode_the_mode(monkeypatch, pipeline_flux_img2img)
    published = FluxImg2ImgPipeline(
        **{name: loaded[ours] for name, ours in PARTS.items()},
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(
            toy_folder / "scheduler"
        ),
    )
    published.set_progress_bar_config(disable=True)
    image, theirs, ours = noise_image(96, 64), [], []

    common = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "num_inference_steps": 7}
    wanted = published(
        **common, image=image, height=64, width=96, strength=strength,
        true_cfg_scale=scale, guidance_scale=3.5, callback_on_step_end=add_to(theirs),
        generator=torch.Generator().manual_seed(5),
    ).images[0]  # fmt: skip

    def on_step(step: int, latents: Tensor) -> None:
        assert step == len(ours)
        ours.append(pack(latents))

    pipe = Pipeline(
        MODEL.spec("dev"), MODEL, {one: loaded[one] for one in PARTS.values()}
    )
    made = pipe(
        **common, input_image=image, denoising_strength=strength, seed=5,
        guidance_scale=scale, on_step=on_step,
    )  # fmt: skip
    assert_equal_steps(ours, theirs, {0.05: 1, 0.5: 4, 0.72: 6, 1.0: 7}[strength])
    assert np.array_equal(np.asarray(made), np.asarray(wanted))


def test_generate_starts_from_a_file_in_its_own_size(
    toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    noise_image(70, 40).save("image.png")
    words = ["generate", "--model", "flux", "--model_id", str(toy_folder)]
    words += ["--prompt", "a dog", "--num_inference_steps", "2", "--output", "new.png"]
    words += ["--input", "input_image=image.png"]
    assert main([*words, "--denoising_strength", "0"]) == 2
    assert main(words) == 2  # nothing starts from it
    assert main([*words, "--denoising_strength", "0.5"]) == 0
    with Image.open("new.png") as made:
        assert made.size == (64, 32)
        assert made.text["denoising_strength"] == "0.5"
