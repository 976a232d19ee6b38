"""The family's pipeline spec: its schedule, its experts, its inputs, and which variant a
configuration means.
"""

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from dstrain import (
    SFT,
    Frames,
    Pipeline,
    Rng,
    SampleKey,
    TimestepSampler,
    TrainConfig,
    UsageError,
    run,
)
from dstrain.data import write_video
from dstrain.graph import make_plan
from dstrain.pipeline.variant_choice import fitting_variants
from dstrain.plugin import Column
from dstrain.runs.resolve import resolve
from dstrain_wan import MODEL
from dstrain_wan.components import COMPONENTS
from dstrain_wan.pipeline import PIPELINES, SCHEDULE

ROW = frozenset({"prompt", "input_video", "height", "width", "num_frames"})


@pytest.mark.parametrize("steps", [1, 2, 4, 40, 50])
def test_sigmas_are_bit_equal_to_diffusers_euler_scheduler(steps: int) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps))
    assert torch.equal(scheduler.sigmas, SCHEDULE.sigmas(steps, 100))
    assert torch.equal(scheduler.timesteps, SCHEDULE.sigmas(steps, 100)[:-1] * 1000)


@pytest.mark.parametrize(
    ("variant", "fraction", "least"),
    [("t2v-a14b", 0.417, 875.0), ("i2v-a14b", 0.358, 900.0)],
)
def test_the_experts_share_the_timesteps_at_the_published_boundary(
    variant: str, fraction: float, least: float
) -> None:
    experts = MODEL.spec(variant).experts
    assert experts is not None
    assert [
        experts.choose(t) for t in (1000.0, least, np.nextafter(least, 0), 0.0)
    ] == [
        "dit",
        "dit",
        "dit2",
        "dit2",
    ]
    high = TimestepSampler(SCHEDULE, max_boundary=fraction)
    low = TimestepSampler(SCHEDULE, min_boundary=fraction)
    edge = SCHEDULE.table[low._index(fraction)].item() * 1000
    assert abs(edge - least) < 1, (
        "the published index fraction is that of the boundary at shift 5"
    )
    assert high.schedule is low.schedule


def test_each_expert_is_called_for_its_own_timesteps(
    bind_components: Callable[..., dict[str, Any]],
) -> None:
    loaded, called = bind_components("t2v-a14b"), []
    for name in ("dit", "dit2"):
        loaded[name].register_forward_hook(lambda *_, name=name: called.append(name))
    size = {"height": 32, "width": 32, "num_frames": 5}
    pipe = Pipeline(
        MODEL.spec("t2v-a14b"),
        MODEL,
        {n: loaded[n] for n in loaded},
        {"vae": loaded["vae_config"]},
    )
    pipe(prompt="x", num_inference_steps=4, guidance_scale=1.0, **size)
    assert called == ["dit", "dit", "dit2", "dit2"]  # sigmas 1, .9375, .8333, .625
    wanted = r"\[1, 16, 2, 4, 4\] \(1, channels, latent frames, height 32 / 8, width 32"
    with pytest.raises(UsageError, match=f"latents: .*{wanted}"):
        pipe(prompt="x", latents=torch.zeros(1, 16, 5, 4, 4), **size)


@pytest.mark.parametrize(
    ("variant", "cached_values"),
    [
        ("t2v-a14b", ("input_latents", "prompt_emb")),
        ("i2v-a14b", ("input_latents", "prompt_emb", "y")),
    ],
)
def test_one_expert_leaves_the_other_out_and_one_cache_serves_both(
    variant: str, cached_values: tuple[str, ...]
) -> None:
    spec = MODEL.spec(variant)
    given = (ROW | {"input_image"}) & set(spec.inputs)
    one, other = (make_plan(spec, given, SFT, (name,)) for name in ("dit", "dit2"))
    assert (one.components["train"], other.components["train"]) == (("dit",), ("dit2",))
    assert (
        one.components["data_process"]
        == other.components["data_process"]
        == ("text_encoder", "vae", "tokenizer")
    )
    assert one.cached_steps == other.cached_steps
    assert one.cached_values == other.cached_values == cached_values


def test_without_an_image_ti2v_makes_a_video_from_text_alone() -> None:
    plan = make_plan(MODEL.spec("ti2v-5b"), ROW, SFT, ("dit",))
    assert plan.cached_values == ("input_latents", "prompt_emb")
    assert plan.skipped == {"encode_first_frame": "absent: input_image"}
    with pytest.raises(UsageError, match="no column 'video'"):
        make_plan(MODEL.spec("i2v"), ROW, SFT, ("dit",))


@pytest.mark.parametrize("variant", MODEL.variants)
def test_videos_are_cut_to_what_the_vae_can_encode(variant: str) -> None:
    columns = [
        source
        for source in MODEL.spec(variant).inputs.values()
        if isinstance(source, Column) and source.from_video
    ]
    multiple, fps = (32, 24.0) if variant == "ti2v-5b" else (16, 16.0)
    assert {
        (column.multiple, column.frame_multiple, column.fps) for column in columns
    } == {(multiple, 4, fps)}


def test_a_configuration_tells_the_variants_it_can_be() -> None:
    meant = {
        model_id: fitting_variants(MODEL, content)
        for model_id, content in COMPONENTS[0].published.items()
    }
    for model_id, variants in meant.items():
        named = [
            v
            for v, patterns in MODEL.model_ids.items()
            if any(fnmatch(model_id, p) for p in patterns)
        ]
        assert named[1:] in ([], ["speedcontrol"])
        assert named[0] in variants
    alike = ["t2v", "t2v-a14b", "speedcontrol", "vace", "vace-a14b"]
    assert fitting_variants(MODEL, {"in_channels": 16}) == alike
    assert fitting_variants(MODEL, {"in_channels": 33}) == []


def test_the_record_names_the_variants_that_are_wired() -> None:
    assert [MODEL.spec(variant).variant for variant in MODEL.variants] == list(
        PIPELINES
    )


@pytest.mark.parametrize(
    ("variant", "fraction"), [("t2v-a14b", 0.417), ("i2v-a14b", 0.358)]
)
def test_one_trained_expert_draws_its_own_timesteps_as_with_the_published_boundaries(
    variant: str, fraction: float
) -> None:
    for part, flags in (
        ("dit", {"max_timestep_boundary": fraction}),
        ("dit2", {"min_timestep_boundary": fraction}),
    ):
        config = TrainConfig(
            model="wan", variant=variant, toy=True, lora_base_model=part
        )
        timestep_sampler = resolve(config).build_timestep_sampler()
        assert (
            timestep_sampler
            == resolve(replace(config, **flags)).build_timestep_sampler()
        )
        drawn = (
            torch.cat(
                [
                    timestep_sampler.draw(Rng([SampleKey(0, 0, 0, row)]))
                    for row in range(2000)
                ]
            )
            * 1000
        )
        least, greatest = MODEL.spec(variant).experts.ranges[part]
        assert least - 0.1 <= drawn.min() <= least + 10
        assert greatest - 10 <= drawn.max() <= greatest


def test_clips_that_are_shorter_than_asked_for_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, frames in (("long", 9), ("short", 6)):
        write_video(
            Frames(torch.zeros(frames, 32, 32, 3, dtype=torch.uint8), 16.0),
            tmp_path / f"{name}.mp4",
        )
    (tmp_path / "metadata.csv").write_text("video,prompt\nlong.mp4,a\nshort.mp4,b\n")
    flags = {
        "model": "wan",
        "variant": "t2v",
        "toy": True,
        "task": "sft:data_process",
        "dataset_base_path": tmp_path,
    }
    run(TrainConfig(**flags, num_frames=9, feature_cache=tmp_path / "cache"))
    assert (
        "1 of 2 clips have fewer than --num_frames 9 frames; the shortest has 5"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("speed", "said"),
    [(0.0, ""), (100.0, ""), (127.0, "expected 0 to 100, got 127")],
)
def test_a_speed_beyond_those_that_are_embedded_is_refused(
    speed: float, said: str
) -> None:
    column = PIPELINES["speedcontrol"].inputs["motion_bucket_id"]
    assert isinstance(column, Column) and column.check is not None
    assert column.check(speed) == said
