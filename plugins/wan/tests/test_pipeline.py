"""The variants: their schedule, their experts, how videos are loaded, and which one a
model's files are of.
"""

import json
import shutil
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dstrain import Frames, ModelConfig, Rng, SampleKey, TrainConfig, UsageError
from dstrain.models import components_of
from dstrain.pipeline import choose_variant, plan_inference
from dstrain.plugin import Column
from dstrain.runs.resolve import resolve
from dstrain_wan import MODEL

from tests.support.toys import opened, toy

ALIKE = ("t2v", "t2v-a14b", "speedcontrol", "vace", "vace-a14b")
"""Variants whose denoisers have one configuration."""


@pytest.mark.parametrize(
    ("variant", "fraction", "boundary"),
    [("t2v-a14b", 0.417, 875.0), ("i2v-a14b", 0.358, 900.0)],
)
def test_an_expert_is_trained_at_its_own_timesteps_as_with_the_published_boundaries(
    variant: str, fraction: float, boundary: float
) -> None:
    for part, least, greatest, flags in (
        ("dit", boundary, 1000.0, {"max_timestep_boundary": fraction}),
        ("dit2", 0.0, boundary, {"min_timestep_boundary": fraction}),
    ):
        config = TrainConfig(
            model="wan", variant=variant, toy=True, lora_base_model=part
        )
        sampler = resolve(config).build_timestep_sampler()
        published = resolve(replace(config, **flags)).build_timestep_sampler()
        assert sampler == published
        keys = [SampleKey(0, 0, 0, row) for row in range(2000)]
        drawn = torch.cat([sampler.draw(Rng([key])) for key in keys]) * 1000
        assert least - 0.1 <= drawn.min() <= least + 10
        assert greatest - 10 <= drawn.max() <= greatest
        experts = MODEL.spec(variant).experts
        assert experts is not None
        assert experts.ranges[part] == (least, greatest)


@pytest.mark.parametrize("variant", MODEL.variants)
def test_videos_are_loaded_at_the_models_frames_per_second(variant: str) -> None:
    rates = {
        source.fps
        for source in MODEL.spec(variant).inputs.values()
        if isinstance(source, Column) and source.from_video
    }
    assert rates == {24.0 if variant == "ti2v-5b" else 16.0}
    assert MODEL.spec(variant).constants["fps"].value in rates


def test_a_published_configuration_tells_the_variant_of_its_id(tmp_path: Path) -> None:
    dit = components_of(MODEL)["dit"]
    shutil.copytree(toy("wan", "t2v") / "transformer", tmp_path / "transformer")
    files = sorted(map(str, (tmp_path / "transformer").glob("*.safetensors")))
    for model_id, content in dit.published.items():
        (tmp_path / "transformer/config.json").write_text(json.dumps(dict(content)))
        named = [
            variant
            for variant, patterns in MODEL.model_ids.items()
            if any(fnmatch(model_id, one) for one in patterns)
        ]
        try:
            told = choose_variant(MODEL, None, (ModelConfig(path=files),))
        except UsageError:
            told = ALIKE[0]
        assert told == (ALIKE[0] if named[0] in ALIKE else named[0]), model_id


@pytest.mark.parametrize(("speed", "is_known"), [(0, True), (100, True), (127, False)])
def test_a_speed_beyond_those_that_are_embedded_is_refused(
    speed: float, is_known: bool
) -> None:
    column = MODEL.spec("speedcontrol").inputs["motion_bucket_id"]
    assert isinstance(column, Column) and column.check is not None
    assert (column.check(speed) == "") is is_known


def video(frames: int, height: int = 32, width: int = 48) -> Frames:
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (frames, height, width, 3), np.uint8)
    return Frames(torch.from_numpy(pixels), 16.0)


def test_a_video_is_cut_to_the_frames_and_the_size_that_are_generated() -> None:
    pipe = opened("wan", "t2v")
    given: dict[str, Any] = {
        "prompt": "x",
        "input_video": video(7, 40, 56),
        "denoising_strength": 0.5,
        "num_inference_steps": 2,
        "guidance_scale": 1.0,
    }
    assert pipe(**given).pixels.shape == (5, 32, 48, 3)
    other = pipe(**given, height=48, width=32, num_frames=1)
    assert other.pixels.shape == (1, 48, 32, 3)
    with pytest.raises(UsageError, match=r"frames: 7, .* 9"):
        pipe(**given, num_frames=9)


@pytest.mark.parametrize("variant", MODEL.variants)
def test_every_variant_starts_from_a_video(variant: str) -> None:
    spec = MODEL.spec(variant)
    given = {**dict.fromkeys(spec.inputs, ""), "denoising_strength": 0.5}
    assert "input_video" in plan_inference(spec, given).plan.used_inputs
