"""A run's file predicts as its module did, and inference is followed step by step."""

from pathlib import Path

import numpy as np
import torch
from dstrain import Frames
from dstrain.testing.family_under_test import FamilyUnderTest
from dstrain.testing.round_trips import STEPS, generate, pixels, train_and_save
from dstrain.testing.rows import arguments
from dstrain.testing.trained_sets import TrainedSet
from PIL import Image


def test_a_saved_lora_predicts_as_the_module_that_trained_it(
    fine: FamilyUnderTest, tmp_path: Path
) -> None:
    saved = train_and_save(fine, TrainedSet(lora="dit"), tmp_path / "out")
    assert saved.file.name == f"step-{STEPS}.safetensors"
    pipeline = fine.open()
    untrained, trained = saved.predictions(pipeline)
    assert not torch.equal(untrained, trained)
    pipeline.load_lora(saved.file)
    loaded, trained = saved.predictions(pipeline)
    assert torch.allclose(loaded, trained, rtol=0, atol=1e-6)
    assert not torch.allclose(untrained, trained, rtol=0, atol=1e-4)


def test_the_latents_of_each_step_are_kept(fine: FamilyUnderTest) -> None:
    given = arguments(fine.spec, guided=False)
    latents, made = generate(fine.pipeline, given)
    assert len(latents) == given["num_inference_steps"]
    assert isinstance(made, Image.Image)


def test_pixels_of_images_videos_and_arrays_have_one_shape() -> None:
    image = Image.new("RGB", (3, 2), "red")
    frames = torch.zeros(4, 2, 3, 3, dtype=torch.uint8)
    assert pixels(image).shape == (1, 2, 3, 3)
    assert pixels(image)[0, 0, 0].tolist() == [255, 0, 0]
    assert torch.equal(pixels(Frames(frames, 8.0)), frames)
    assert pixels(np.zeros((4, 2, 3, 3), np.uint8)).shape == (4, 2, 3, 3)
