"""Inference: Euler's rule on the family's schedule, with its hold and guidance."""

from dataclasses import replace
from itertools import pairwise
from typing import Any, TypedDict

import pytest
import torch
from dstrain import Pipeline, Rng, UsageError
from dstrain.data import Cell
from dstrain.lazy import import_name
from dstrain.pipeline import plan_inference
from dstrain.plugin import InferenceOnly, LatentConstraint
from dstrain.plugin.noise import Diffusion, diffusers_sampler
from torch import Tensor

from tests.support.family import DecodedImage, build, decode, encode_prompt

pytestmark = pytest.mark.usefixtures("tiny")

FLOW_OF_UNIPC = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


def states(pipe: Pipeline, **arguments: Any) -> list[Tensor]:
    seen: list[Tensor] = []
    pipe(
        prompt="dog",
        on_step=lambda _, latents: seen.append(latents.clone()),
        **arguments,
    )
    return seen


@torch.no_grad()
def by_hand(
    pipe: Pipeline, noise: Tensor, steps: int, negative: str | None, scale: float
) -> list[Tensor]:
    names = ("text_encoder", "tokenizer")
    encoders = {name: pipe.components[name] for name in names}
    sigmas = pipe.spec.schedule.sigmas(steps, noise[0, 0].numel())
    seen, latents = [], noise
    for now, then in pairwise(sigmas):

        def call(text: str, now: float = now, latents: Tensor = latents) -> Tensor:
            made = encode_prompt(text, **encoders)
            moment = (now * 1000).view(1)
            out: Tensor = pipe.components["dit"](
                latents, moment, made["prompt_emb"], made["prompt_mask"]
            )
            return out

        prediction = call("dog")
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
    size = {"height": 16, "width": 24, "num_inference_steps": 5}
    seen = states(pipe, latents=noise, **size, **flags)
    wanted = by_hand(pipe, noise, 5, negative, scale)
    assert all(map(torch.equal, seen, wanted)) and len(seen) == 5
    image = pipe(prompt="dog", latents=noise, **size)
    assert (image.size, image.mode) == ((24, 16), "RGB")


def test_the_seed_alone_decides_the_noise(pipe: Pipeline) -> None:
    one, again, other = (states(pipe, seed=seed) for seed in (3, 3, 4))
    assert all(map(torch.equal, one, again))
    assert torch.equal(states(pipe, seed=3, rand_device=" ")[0], one[0])
    assert len(one) == pipe.spec.defaults["num_inference_steps"]
    assert one[0].shape == (1, 4, 2, 2)
    assert not torch.equal(one[-1], other[-1])
    noise = torch.randn((1, 4, 2, 2), generator=torch.Generator().manual_seed(3))
    assert torch.equal(states(pipe, latents=noise)[-1], one[-1])


def test_constrained_latents_are_kept_at_every_step(pipe: Pipeline) -> None:
    """The first row of the latents is given; it is noised as the step asks and clean at
    last.
    """
    first = torch.full((1, 4, 1, 2), 0.5)
    timesteps: list[float] = []
    decoded: list[Tensor] = []

    def constrain_latents(
        latents: Tensor, timestep: Tensor, noise: Tensor, height: int
    ) -> LatentConstraint:
        level = (timestep / 1000).view(-1, 1, 1, 1)
        timesteps.append(float(timestep))
        kept = (1 - level) * first + level * noise[:, :, :1]
        return LatentConstraint(torch.cat([kept, latents[:, :, 1:]], 2), timestep)

    def look(latents: Tensor, *, vae: Any) -> DecodedImage:
        decoded.append(latents)
        return decode(latents, vae=vae)

    changes = {"constrain_latents": constrain_latents, "decoders": (look,)}
    pipe.spec = replace(pipe.spec, **changes)
    seen: list[tuple[Tensor, Tensor]] = []
    pipe.components["dit"].register_forward_hook(
        lambda _, given, made: seen.append((given[0], made))
    )
    latents = states(pipe, num_inference_steps=3)
    sigmas = pipe.spec.schedule.sigmas(3, 4)
    for i, (noisy_latents, prediction) in enumerate(seen):
        stepped = noisy_latents + (sigmas[i + 1] - sigmas[i]) * prediction
        assert torch.equal(latents[i][:, :, 1:], stepped[:, :, 1:])
    for i, (noisy_latents, _) in enumerate(seen[1:]):
        assert torch.equal(latents[i], noisy_latents)
    assert torch.equal(latents[-1], decoded[0])
    assert torch.equal(decoded[0][:, :, :1], first)
    assert (len(timesteps), timesteps[0], timesteps[-1]) == (4, 1000.0, 0.0)


def test_a_scale_guides_though_no_negative_prompt_is_known(pipe: Pipeline) -> None:
    def last(**arguments: Any) -> Tensor:
        return states(pipe, num_inference_steps=2, **arguments)[-1]

    blank = last(guidance_scale=3.0, negative_prompt="")
    known = dict(pipe.spec.defaults)
    del known["negative_prompt"]
    pipe.spec = replace(pipe.spec, defaults=known)
    assert torch.equal(last(guidance_scale=3.0), blank)
    plain = last()
    assert not torch.equal(plain, blank)
    assert torch.equal(last(guidance_scale=3.0, negative_prompt=None), plain)
    pipe.spec = replace(pipe.spec, defaults={**known, "guidance_scale": 3.0})
    assert torch.equal(last(), plain)


def test_a_negative_branch_that_no_text_can_be_is_refused_where_it_is_absent() -> None:
    spec = replace(
        build("base"),
        inputs={**build("base").inputs, "worse_image": InferenceOnly("image")},
        cfg_inputs={"prompt": "negative_prompt", "input_image": "worse_image"},
    )
    given = {"prompt": "dog", "guidance_scale": 2.0}
    with pytest.raises(UsageError, match=r"guidance_scale: .*'worse_image'"):
        plan_inference(spec, {"input_image": "an image", **given})
    assert plan_inference(spec, given).plan.task.branches == ("positive", "negative")


def predict_by_branch(
    noisy_latents: Tensor, timestep: Tensor, prompt_emb: Tensor, *, branch: str
) -> Tensor:
    return noisy_latents


def test_a_denoiser_that_is_told_its_branch_is_guided_without_a_negative_input() -> (
    None
):
    spec = replace(build("base"), cfg_inputs={}, model_fn=predict_by_branch)
    given = {"prompt": "dog", "guidance_scale": 2.0}
    assert plan_inference(spec, given).plan.task.branches == ("positive", "negative")
    spec = replace(build("base"), cfg_inputs={})
    with pytest.raises(UsageError, match="guidance_scale: has no effect"):
        plan_inference(spec, given)


def test_defaults_follow_from_an_input_that_is_loaded() -> None:
    def sides(prompt: str) -> dict[str, int]:
        return {"height": 8 * len(prompt)}

    spec = replace(build("base"), defaults_from={"prompt": sides})
    assert plan_inference(spec, {"prompt": "dog"}).inputs["height"] == 24
    given = {"prompt": "dog", "height": 8}
    assert plan_inference(spec, given).inputs["height"] == 8
    cell = {"prompt": Cell("text", "dog")}
    assert plan_inference(spec, cell).inputs["height"] == spec.defaults["height"]
    for unknown in ("unknown", "seed"):
        with pytest.raises(UsageError, match="defaults_from"):
            replace(spec, defaults_from={unknown: sides})
    spec = replace(spec, defaults_from={"prompt": lambda _: {"hieght": 8}})
    with pytest.raises(UsageError, match="hieght"):
        plan_inference(spec, {"prompt": "dog"})


class Plain(TypedDict):
    plain_emb: Tensor
    prompt_mask: Tensor


class Jitter(TypedDict):
    prompt_emb: Tensor


def test_a_unit_that_draws_random_numbers_runs_in_inference_and_the_seed_decides_them(
    pipe: Pipeline,
) -> None:
    drawn: list[Tensor] = []

    def encode_plain(prompt: str, *, text_encoder: Any, tokenizer: Any) -> Plain:
        made = encode_prompt(prompt, text_encoder=text_encoder, tokenizer=tokenizer)
        return {"plain_emb": made["prompt_emb"], "prompt_mask": made["prompt_mask"]}

    def jitter(plain_emb: Tensor, *, rng: Rng) -> Jitter:
        drawn.append(rng.normal("jitter", plain_emb.shape[1:]))
        return {"prompt_emb": plain_emb + drawn[-1]}

    pipe.spec = replace(pipe.spec, units=(encode_plain, jitter))
    for seed in (1, 1, 2):
        states(pipe, num_inference_steps=1, seed=seed)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
def test_a_scheduler_of_diffusers_steps_as_by_hand(pipe: Pipeline) -> None:
    """DPM-Solver++ remembers its last step; the noise of DDPM is that of the seed."""
    config = {"beta_schedule": "scaled_linear", "prediction_type": "v_prediction"}
    names = ("DPMSolverMultistepScheduler", "DDPMScheduler", "HeunDiscreteScheduler")
    samplers = {name: diffusers_sampler(name, **config) for name in names}
    defaults = {**pipe.spec.defaults, "sampler": names[0]}
    changes = {"schedule": Diffusion("v"), "samplers": samplers, "defaults": defaults}
    pipe.spec = replace(pipe.spec, **changes)
    noise = torch.randn(1, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    seen = states(pipe, latents=noise, num_inference_steps=4)
    names = ("text_encoder", "tokenizer")
    prompt = encode_prompt("dog", **{name: pipe.components[name] for name in names})
    scheduler = import_name("diffusers", "DPMSolverMultistepScheduler")(**config)
    scheduler.set_timesteps(4)
    latents = noise
    for index, timestep in enumerate(scheduler.timesteps):
        with torch.no_grad():
            conditions = prompt["prompt_emb"], prompt["prompt_mask"]
            at = timestep.float().view(1)
            prediction = pipe.components["dit"](latents, at, *conditions)
        latents = scheduler.step(prediction, timestep, latents).prev_sample
        torch.testing.assert_close(seen[index], latents, rtol=1e-5, atol=1e-6)
    one, again, other = (
        states(pipe, latents=noise, seed=seed, sampler="DDPMScheduler")[-1]
        for seed in (3, 3, 4)
    )
    assert torch.equal(one, again) and not torch.equal(one, other)
    with pytest.raises(UsageError, match="calls the denoiser 7 times in 4 steps"):
        states(pipe, sampler="HeunDiscreteScheduler", num_inference_steps=4)
    wrong = replace(pipe.spec, schedule=Diffusion("epsilon"))
    with pytest.raises(UsageError, match="v_prediction; expected epsilon"):
        plan_inference(wrong, {"prompt": "dog"})
    with pytest.raises(UsageError, match="expected DPMSolverMultistepScheduler, DDPM"):
        states(pipe, sampler="euler")


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "config", "steps"),
    [
        ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}, 4),
        # From 201 steps on, its first timesteps are equal.
        ("UniPCMultistepScheduler", {"flow_shift": 5.0, **FLOW_OF_UNIPC}, 250),
    ],
)
def test_schedulers_of_flow_matching_go_to_the_end(
    name: str, config: dict[str, Any], steps: int, pipe: Pipeline
) -> None:
    samplers = {"published": diffusers_sampler(name, **config)}
    pipe.spec = replace(pipe.spec, samplers=samplers)
    given: dict[str, Any] = {"sampler": "published", "num_inference_steps": steps}
    seen = states(pipe, **given)
    assert len(seen) == steps and bool(seen[-1].isfinite().all())
    image = pipe(prompt="dog", num_inference_steps=2)
    start = {"input_image": image, "denoising_strength": 0.5}
    assert len(states(pipe, **given, **start)) == steps // 2


def test_a_variant_says_which_levels_and_scales_are_guided(pipe: Pipeline) -> None:
    told: list[float] = []

    def apply(
        positive: Tensor, negative: Tensor, scale: float, timestep: Tensor
    ) -> Any:
        told.append(float(timestep))
        return positive + scale * (positive - negative)

    changes: dict[str, Any] = {"no_guidance": 0.0, "apply_guidance": apply}
    pipe.spec = replace(pipe.spec, guidance_interval=(400.0, 900.0), **changes)
    timesteps = (1000 * pipe.spec.schedule.sigmas(6, 1)[:-1]).tolist()
    states(pipe, num_inference_steps=6, guidance_scale=0.5)
    assert told == [one for one in timesteps if 400 <= one <= 900] != timesteps
    told.clear()
    states(pipe, num_inference_steps=6, guidance_scale=0.0)
    assert not told
