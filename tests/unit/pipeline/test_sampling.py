"""Inference: Euler's rule on the family's schedule, with its hold and guidance."""

from dataclasses import replace
from itertools import pairwise
from typing import Any, TypedDict

import pytest
import torch
from dstrain import Pipeline, Rng, UsageError
from dstrain.graph import make_plan
from dstrain.pipeline import generate_task, inference_sigmas, plan_inference
from dstrain.pipeline.sampling import check_noise, points_on_path
from dstrain.plugin import InferenceOnly, LatentConstraint, Unit
from torch import Tensor

from tests.support.family import (
    DecodedImage,
    build,
    decode as tiny_decode,
    encode_prompt,
)


class Plain(TypedDict):
    plain_emb: Tensor
    prompt_mask: Tensor


pytestmark = pytest.mark.usefixtures("tiny")


@pytest.mark.parametrize(("is_video", "third"), [(True, "latent frames"), (False, "5")])
def test_the_third_axis_of_latents_is_frames_only_where_videos_are_made(
    is_video: bool, third: str
) -> None:
    words = rf"\(1, channels, {third}, height 16 / 8, width 24 / 8\), got list"
    with pytest.raises(UsageError, match=words):
        check_noise([], (1, 4, 5, 2, 3), {"height": 16, "width": 24}, is_video)


def collected(pipe: Pipeline, **arguments: Any) -> tuple[list[Tensor], Any]:
    """The latents after each step, and the image."""
    seen: list[Tensor] = []
    image = pipe(
        **arguments, on_step=lambda i, latents: seen.append(latents.clone()) or None
    )
    return seen, image


@torch.no_grad()
def by_hand(
    pipe: Pipeline,
    noise: Tensor,
    steps: int,
    prompt: str,
    negative: str | None,
    scale: float,
) -> list[Tensor]:
    parts = {
        "text_encoder": pipe.components["text_encoder"],
        "tokenizer": pipe.components["tokenizer"],
    }
    sigmas = pipe.spec.schedule.sigmas(steps, noise[0, 0].numel())
    seen, latents = [], noise
    for now, then in pairwise(sigmas):

        def call(text: str, now: float = now, latents: Tensor = latents) -> Tensor:
            made = encode_prompt(text, **parts)
            moment = (now * 1000).view(1)
            out: Tensor = pipe.components["dit"](
                latents, moment, made["prompt_emb"], made["prompt_mask"]
            )
            return out

        prediction = call(prompt)
        if negative is not None:
            prediction = call(negative) + scale * (prediction - call(negative))
        latents = latents + (then - now) * prediction
        seen.append(latents)
    return seen


@pytest.mark.parametrize(
    ("flags", "negative", "scale"),
    [
        ({}, None, 1.0),
        ({"guidance_scale": 1.0, "negative_prompt": "bad"}, None, 1.0),
        ({"guidance_scale": 3.0, "negative_prompt": "bad"}, "bad", 3.0),
        ({"guidance_scale": 3.0}, "", 3.0),
    ],
)
def test_steps_are_those_of_euler_with_guidance_only_where_it_was_asked_for(
    flags: dict[str, Any], negative: str | None, scale: float, pipe: Pipeline
) -> None:
    noise = torch.randn(1, 4, 2, 3, generator=torch.Generator().manual_seed(0))
    seen, image = collected(
        pipe,
        prompt="dog",
        height=16,
        width=24,
        num_inference_steps=5,
        latents=noise,
        **flags,
    )
    wanted = by_hand(pipe, noise, 5, "dog", negative, scale)
    assert len(seen) == 5
    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(seen, wanted, strict=True)
    )
    assert (image.size, image.mode) == ((24, 16), "RGB")


@pytest.mark.parametrize(("scale", "calls"), [(0.5, 3), (1.0, 3), (1.5, 6)])
def test_the_negative_branch_is_computed_only_with_guidance(
    scale: float, calls: int, pipe: Pipeline
) -> None:
    counted: list[int] = []
    encoded: list[int] = []
    pipe.components["dit"].register_forward_hook(lambda *_: counted.append(1))
    pipe.components["text_encoder"].register_forward_hook(lambda *_: encoded.append(1))
    pipe(
        prompt="dog", negative_prompt="cat", guidance_scale=scale, num_inference_steps=3
    )
    assert (len(counted), len(encoded)) == (calls, calls // 3)


def test_the_seed_alone_decides_the_noise_and_what_is_not_given_is_the_familys(
    pipe: Pipeline,
) -> None:
    one, again, other = (collected(pipe, prompt="dog", seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one[0], again[0], strict=True))
    assert len(one[0]) == pipe.spec.defaults["num_inference_steps"]
    assert one[0][0].shape == (1, 4, 2, 2)
    assert not torch.equal(one[0][-1], other[0][-1])
    noise = torch.randn((1, 4, 2, 2), generator=torch.Generator().manual_seed(3))
    assert torch.equal(collected(pipe, prompt="dog", latents=noise)[0][-1], one[0][-1])


def test_generation_needs_what_the_latents_shape_and_the_decoders_read(
    pipe: Pipeline,
) -> None:
    task = generate_task(pipe.spec, guided=True)
    assert task.branches == ("positive", "negative")
    assert task.loss.inputs == {"height": True, "width": True}
    assert task.loss.components == ("vae",)
    plan = make_plan(
        pipe.spec, frozenset({"prompt", "negative_prompt", "height", "width"}), task
    )
    assert {step.unit.name for step in plan.cached_steps} == {"encode_prompt"}
    assert "negative.prompt_emb" in plan.loss_inputs
    assert generate_task(pipe.spec, guided=False).branches == ("positive",)


def test_constrained_latents_are_kept_at_every_step_and_at_the_end(
    pipe: Pipeline,
) -> None:
    """The first row of the latents is given; it is noised as the step asks and clean at
    last.
    """
    first = torch.full((1, 4, 1, 2), 0.5)
    calls: list[float] = []

    def constrain_latents(
        latents: Tensor, timestep: Tensor, noise: Tensor, height: int
    ) -> LatentConstraint:
        level = (timestep / 1000).view(-1, 1, 1, 1)
        calls.append(float(timestep))
        kept = (1 - level) * first + level * noise[:, :, :1]
        return LatentConstraint(torch.cat([kept, latents[:, :, 1:]], 2), timestep)

    pipe.spec = replace(
        pipe.spec,
        constrain_latents=constrain_latents,
    )
    decoded: list[Tensor] = []
    decoder = pipe.spec.decoders[0]

    def look(latents: Tensor, *, vae: Any) -> DecodedImage:
        decoded.append(latents)
        return decoder.function(latents, vae=vae)

    pipe.spec = replace(pipe.spec, decoders=(look,))
    seen: list[tuple[Tensor, Tensor]] = []
    pipe.components["dit"].register_forward_hook(
        lambda _, given, made: seen.append((given[0], made))
    )
    latents, _ = collected(pipe, prompt="dog", num_inference_steps=3)
    sigmas = pipe.spec.schedule.sigmas(3, 4)
    for i, (noisy_latents, prediction) in enumerate(seen):
        stepped = noisy_latents + (sigmas[i + 1] - sigmas[i]) * prediction
        assert torch.equal(latents[i][:, :, 1:], stepped[:, :, 1:])
    for i, (noisy_latents, _) in enumerate(seen[1:]):
        assert torch.equal(latents[i], noisy_latents)
    assert torch.equal(latents[-1], decoded[0])
    assert torch.equal(decoded[0][:, :, :1], first)
    assert len(calls) == 4
    assert calls[0] == 1000.0
    assert calls[-1] == 0.0


def test_inference_keeps_no_gradients(pipe: Pipeline) -> None:
    pipe.components["dit"].requires_grad_(True)
    seen, _ = collected(pipe, prompt="dog", num_inference_steps=1)
    assert not seen[0].requires_grad


def in_steps(pipe: Pipeline, **arguments: Any) -> Tensor:
    """The last latents of a short inference."""
    return collected(pipe, prompt="dog", num_inference_steps=2, **arguments)[0][-1]


def test_a_scale_that_is_asked_for_guides_though_no_negative_prompt_is_known(
    pipe: Pipeline,
) -> None:
    blank = in_steps(pipe, guidance_scale=3.0, negative_prompt="")
    known = {
        name: value
        for name, value in pipe.spec.defaults.items()
        if name != "negative_prompt"
    }
    pipe.spec = replace(pipe.spec, defaults=known)
    assert torch.equal(in_steps(pipe, guidance_scale=3.0), blank)
    plain = in_steps(pipe)
    assert not torch.equal(plain, blank)
    assert torch.equal(in_steps(pipe, guidance_scale=3.0, negative_prompt=None), plain)
    pipe.spec = replace(pipe.spec, defaults={**known, "guidance_scale": 3.0})
    assert torch.equal(in_steps(pipe), plain)


def test_a_negative_branch_that_no_text_can_be_is_refused_where_it_is_absent() -> None:
    spec = replace(
        build("base"),
        inputs={**build("base").inputs, "worse_image": InferenceOnly("image")},
        cfg_inputs={"prompt": "negative_prompt", "input_image": "worse_image"},
    )
    with pytest.raises(
        UsageError, match="guidance_scale: above 1 needs input 'worse_image'"
    ):
        plan_inference(
            spec, {"prompt": "dog", "input_image": "an image", "guidance_scale": 2.0}
        )
    assert plan_inference(
        spec, {"prompt": "dog", "guidance_scale": 2.0}
    ).plan.task.branches == (
        "positive",
        "negative",
    )


class Jitter(TypedDict):
    prompt_emb: Tensor


def test_a_unit_that_draws_random_numbers_runs_in_inference_and_the_seed_decides_them(
    pipe: Pipeline,
) -> None:
    drawn: list[Tensor] = []

    def jitter(plain_emb: Tensor, *, rng: Rng) -> Jitter:
        drawn.append(rng.normal("jitter", plain_emb.shape[1:]))
        return {"prompt_emb": plain_emb + drawn[-1]}

    first = pipe.spec.units[
        [unit.name for unit in pipe.spec.units].index("encode_prompt")
    ]

    def encode_plain(prompt: str, *, text_encoder: Any, tokenizer: Any) -> Plain:
        made = first.function(prompt, text_encoder=text_encoder, tokenizer=tokenizer)
        return {"plain_emb": made["prompt_emb"], "prompt_mask": made["prompt_mask"]}

    others = tuple(unit for unit in pipe.spec.units if unit is not first)
    pipe.spec = replace(pipe.spec, units=(Unit(encode_plain), Unit(jitter), *others))
    for seed in (1, 1, 2):
        pipe(
            prompt="dog",
            height=16,
            width=16,
            num_inference_steps=1,
            guidance_scale=1.0,
            seed=seed,
        )
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_a_decoder_draws_random_numbers_from_the_seed(pipe: Pipeline) -> None:
    def decode(latents: Tensor, *, vae: Any, rng: Any) -> DecodedImage:
        noise = rng.normal("pixels", latents.shape[1:]).to(latents.dtype)
        made: DecodedImage = tiny_decode(latents + noise, vae=vae)
        return made

    pipe.spec = replace(pipe.spec, decoders=(decode,))
    one, again, other = (
        pipe(prompt="dog", num_inference_steps=1, seed=seed).tobytes()
        for seed in (1, 1, 2)
    )
    assert one == again != other


def test_the_points_of_a_path_are_its_states_or_lie_straight_between_them() -> None:
    states = [torch.full((1, 2), value) for value in (4.0, 3.0, -1.0, 0.0)]
    taken = torch.tensor([1.0, 0.75, 0.25, 0.0])
    assert points_on_path(states, taken, taken) == states  # themselves, not equal ones
    between = points_on_path(states, taken, torch.tensor([1.0, 0.5, 0.125, 0.0]))
    assert [point[0, 0].item() for point in between] == [4.0, 1.0, -0.5, 0.0]


def test_the_sigmas_of_inference_depend_on_the_size_of_the_latents(
    pipe: Pipeline,
) -> None:
    schedule = replace(pipe.spec.schedule, shift=None, latents_per_token=4)
    small, large = (
        inference_sigmas(schedule, torch.zeros(1, 16, side, side), 4)
        for side in (8, 64)
    )
    assert torch.equal(small, schedule.sigmas(4, 16))
    assert torch.equal(large, schedule.sigmas(4, 1024))
