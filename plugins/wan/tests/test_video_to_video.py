"""From a video, every step equals that of diffusers' pipeline."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanVideoToVideoPipeline
from diffusers.pipelines.wan import pipeline_wan_video2video
from dstrain import Frames, Pipeline, UsageError
from dstrain.pipeline import plan_inference
from dstrain_wan import MODEL
from PIL import Image
from torch import Tensor

from tests.support.published_steps import add_to, assert_equal_steps

PARTS = {"transformer": "dit", "text_encoder": "text_encoder"}
PARTS |= {name: name for name in ("tokenizer", "vae")}
STEPS = 10


def video(frames: int, height: int = 32, width: int = 48) -> Frames:
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (frames, height, width, 3), np.uint8)
    return Frames(torch.from_numpy(pixels), 16.0)


def pipeline_of(variant: str, loaded: dict[str, Any]) -> Pipeline:
    spec = MODEL.spec(variant)
    return Pipeline(
        spec,
        MODEL,
        {name: loaded[name] for name in spec.components},
        {"vae": loaded["vae_config"]},
    )


@pytest.mark.parametrize(
    ("strength", "scale", "steps"), [(0.1, 1.0, 1), (0.8, 5.0, 8), (1.0, 1.0, 10)]
)
def test_every_step_equals_that_of_wan_video_to_video_pipeline(
    strength: float,
    scale: float,
    steps: int,
    bind_components: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As without ftfy, which leaves letters as they are: the pipeline calls it though it
    # is absent.
    ftfy = SimpleNamespace(fix_text=str)
    monkeypatch.setattr(pipeline_wan_video2video, "ftfy", ftfy, raising=False)
    loaded = bind_components("t2v")
    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    plain = scheduler.set_timesteps
    # The sigmas of Wan's own code.
    scheduler.set_timesteps = lambda count, device=None: plain(
        sigmas=np.linspace(1.0, 1 / STEPS, STEPS), device=device
    )
    published = WanVideoToVideoPipeline(
        **{name: loaded[ours] for name, ours in PARTS.items()}, scheduler=scheduler
    )
    published.set_progress_bar_config(disable=True)
    start = video(5)
    theirs: list[Tensor] = []
    ours: list[Tensor] = []

    common = {
        "prompt": "a red ball rolls", "negative_prompt": "blurry",
        "num_inference_steps": STEPS, "guidance_scale": scale,
    }  # fmt: skip
    wanted = published(
        **common, video=[Image.fromarray(frame.numpy()) for frame in start.pixels],
        height=32, width=48, strength=strength, callback_on_step_end=add_to(theirs),
        generator=torch.Generator().manual_seed(5),
    ).frames[0]  # fmt: skip
    made = pipeline_of("t2v", loaded)(
        **common, input_video=start, denoising_strength=strength, seed=5,
        on_step=lambda i, latents: ours.append(latents),
    )  # fmt: skip
    assert_equal_steps(ours, theirs, steps)
    pixels = np.round(wanted * 255).astype(np.uint8)
    assert np.array_equal(made.pixels.numpy(), pixels)


def test_a_video_is_cut_to_the_frames_and_the_size_that_are_generated(
    bind_components: Callable[..., dict[str, Any]],
) -> None:
    pipe = pipeline_of("t2v", bind_components("t2v"))
    given = {
        "prompt": "x", "input_video": video(7, 40, 56), "denoising_strength": 0.5,
        "num_inference_steps": 2, "guidance_scale": 1.0,
    }  # fmt: skip
    assert pipe(**given).pixels.shape == (5, 32, 48, 3)
    assert pipe(**given, height=48, width=32, num_frames=1).pixels.shape == (
        1,
        48,
        32,
        3,
    )
    with pytest.raises(UsageError, match="frames: 7, but the video to generate has 9"):
        pipe(**given, num_frames=9)


def test_experts_take_their_steps_from_a_video_too(
    bind_components: Callable[..., dict[str, Any]],
) -> None:
    loaded, called = bind_components("t2v-a14b"), []
    for name in ("dit", "dit2"):
        loaded[name].register_forward_hook(lambda *_, name=name: called.append(name))
    pipeline_of("t2v-a14b", loaded)(
        prompt="x", input_video=video(5), denoising_strength=0.75, guidance_scale=1.0,
        num_inference_steps=4,
    )  # fmt: skip
    assert called == ["dit", "dit2", "dit2"]  # sigmas .9375, .8333, .625


@pytest.mark.parametrize("variant", MODEL.variants)
def test_every_variant_starts_from_a_video(variant: str) -> None:
    spec = MODEL.spec(variant)
    given = {**dict.fromkeys(spec.inputs, ""), "denoising_strength": 0.5}
    assert "input_video" in plan_inference(spec, given).plan.used_inputs
    del given["input_video"]
    with pytest.raises(UsageError, match="needs input 'input_video', the video"):
        plan_inference(spec, given)
