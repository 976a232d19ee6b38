"""The denoiser's call: exact timesteps, one per token, guidance, shapes, and the first
frame held clean.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dstrain import LoraConfig, Rng, SampleKey, TimestepSampler, UsageError, flow_match
from dstrain.lora import inject
from dstrain_wan import MODEL
from dstrain_wan.model_fn import (
    keep_first_frame,
    latent_shape,
    predict,
    predict_from_first_frame,
    predict_from_first_frame_and_clip,
)
from dstrain_wan.pipeline import SCHEDULE
from torch import Tensor

VAE_2_1 = SimpleNamespace(scale_factor_spatial=8, scale_factor_temporal=4, z_dim=16)
VAE_2_2 = SimpleNamespace(scale_factor_spatial=16, scale_factor_temporal=4, z_dim=48)


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def given(variant: str = "t2v", batch: int = 2, tokens: int = 7) -> dict[str, Tensor]:
    return {
        "noisy_latents": draw(batch, 48 if variant == "ti2v-5b" else 16, 3, 4, 6),
        "prompt_emb": draw(batch, tokens, 32),
    }


def embedded(dit: Any, timestep: Tensor) -> Tensor:
    """What the transformer's blocks get of the timestep."""
    seen: list[Tensor] = []
    handle = dit.condition_embedder.register_forward_hook(
        lambda _, arguments, output: seen.append(output[1].detach())
    )
    predict(timestep=timestep, **given(), dit=dit)
    handle.remove()
    return seen[0]


@pytest.mark.filterwarnings(
    "ignore:Mismatch dtype"
)  # of norms, whose fused form wants one dtype
@pytest.mark.parametrize(
    "autocast", [False, True], ids=["bf16 weights", "bf16 autocast over fp32 weights"]
)
def test_in_bf16_neighbouring_timesteps_embed_differently(
    autocast: bool, bind_components: Callable[..., dict[str, Any]]
) -> None:
    dit = bind_components("t2v", torch.float32 if autocast else torch.bfloat16)["dit"]
    with torch.autocast("cpu", torch.bfloat16):
        one, other = embedded(dit, torch.tensor([500.0, 501.0]))
    assert one.dtype == torch.bfloat16
    assert not torch.equal(one, other)
    assert torch.equal(one, embedded_alone(dit, 500.0))


def embedded_alone(dit: Any, timestep: float) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return embedded(dit, torch.tensor([timestep] * 2))[0]


def test_a_prompt_is_filled_up_with_zeros_to_512_tokens(
    bind_components: Callable[..., dict[str, Any]],
) -> None:
    dit, values, timestep = (
        bind_components("t2v")["dit"],
        given(),
        torch.tensor([500.0, 20.0]),
    )
    filled = torch.cat([values["prompt_emb"], torch.zeros(2, 505, 32)], dim=1)
    wanted = dit(values["noisy_latents"], timestep, filled, return_dict=False)[0]
    assert torch.equal(predict(timestep=timestep, **values, dit=dit), wanted)
    values["prompt_emb"] = filled[:, :30]
    assert torch.equal(predict(timestep=timestep, **values, dit=dit), wanted)


def test_conditions_follow_the_noisy_latents_as_channels(
    bind_components: Callable[..., dict[str, Any]],
) -> None:
    values, timestep, y, clip = (
        given(),
        torch.tensor([500.0, 20.0]),
        draw(2, 20, 3, 4, 6, seed=4),
        draw(2, 5, 16),
    )
    text = torch.nn.functional.pad(values["prompt_emb"], (0, 0, 0, 505))
    both = torch.cat([values["noisy_latents"], y], dim=1)
    dit = bind_components("i2v")["dit"]
    wanted = dit(both, timestep, text, clip, return_dict=False)[0]
    assert torch.equal(
        predict_from_first_frame_and_clip(
            timestep=timestep, **values, y=y, clip_feature=clip, dit=dit
        ),
        wanted,
    )
    dit = bind_components("i2v-a14b")["dit"]
    wanted = dit(both, timestep, text, return_dict=False)[0]
    assert torch.equal(
        predict_from_first_frame(timestep=timestep, **values, y=y, dit=dit), wanted
    )


def test_parts_of_a_sample_have_timesteps_of_their_own(
    bind_components: Callable[..., dict[str, Any]],
) -> None:
    dit, values = bind_components("ti2v-5b")["dit"], given("ti2v-5b")
    each = torch.tensor([500.0, 20.0]).view(2, 1, 1, 1, 1) * torch.tensor(
        [0.0, 1.0, 1.0]
    ).view(1, 1, 3, 1, 1)
    tokens = each.view(2, 3, 1).expand(2, 3, 6).reshape(2, 18)
    text = torch.nn.functional.pad(values["prompt_emb"], (0, 0, 0, 505))
    wanted = dit(values["noisy_latents"], tokens, text, return_dict=False)[0]
    assert torch.equal(predict(timestep=each, **values, dit=dit), wanted)
    equal = torch.tensor([500.0, 20.0])
    spread = predict(timestep=equal.view(2, 1, 1, 1, 1), **values, dit=dit)
    assert (spread - predict(timestep=equal, **values, dit=dit)).abs().max() < 1e-5


def gradients(dit: Any, dtype: torch.dtype) -> dict[str, Tensor | None]:
    dit.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        prediction = predict(timestep=torch.tensor([500.0, 501.0]), **given(), dit=dit)
    prediction.float().square().mean().backward()
    return {name: weight.grad for name, weight in dit.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_checkpointing_changes_no_gradient(
    dtype: torch.dtype, bind_components: Callable[..., dict[str, Any]]
) -> None:
    dit = bind_components("t2v")["dit"].requires_grad_(True)
    plain = gradients(dit, dtype)
    dit.enable_gradient_checkpointing()
    checkpointed = gradients(dit, dtype)
    assert [
        name for name in plain if not torch.equal(plain[name], checkpointed[name])
    ] == []


@pytest.mark.parametrize("variant", ["t2v", "i2v"])
def test_names_of_the_published_code_mean_the_same_layers(
    variant: str, bind_components: Callable[..., dict[str, Any]]
) -> None:
    counts = [
        inject(
            bind_components(variant)["dit"],
            LoraConfig("dit", targets, 4, 4.0),
            MODEL.lora_aliases,
        )
        for targets in (
            MODEL.lora_targets["dit"],
            ("q", "k", "v", "o", "ffn.0", "ffn.2"),
        )
    ]
    assert list(counts[0].values()) == list(counts[1].values()) == [4, 4, 4, 4, 2, 2]


def test_the_shape_of_the_latents() -> None:
    assert latent_shape(480, 832, 81, vae_config=VAE_2_1) == (1, 16, 21, 60, 104)
    assert latent_shape(704, 1280, 121, vae_config=VAE_2_2) == (1, 48, 31, 44, 80)
    assert latent_shape(16, 16, 1, vae_config=VAE_2_1) == (1, 16, 1, 2, 2)
    for vae, size, words in (
        (VAE_2_1, (472, 832, 81), "height: expected a multiple of 16, got 472"),
        (VAE_2_2, (704, 1264, 81), "width: expected a multiple of 32, got 1264"),
        (VAE_2_1, (480, 0, 81), "width: expected a multiple of 16, got 0"),
        (
            VAE_2_1,
            (480, 832, 80),
            "num_frames: expected 4n \\+ 1, got 80; the nearest is 81",
        ),
        (
            VAE_2_1,
            (480, 832, 0),
            "num_frames: expected 4n \\+ 1, got 0; the nearest is 1",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            latent_shape(*size, vae_config=vae)


def test_the_first_frame_is_kept_clean_at_timestep_0_and_left_out_of_the_loss() -> None:
    latents, noise, first = (
        draw(2, 48, 3, 2, 4),
        draw(2, 48, 3, 2, 4, seed=4),
        draw(2, 48, 1, 2, 4, seed=5),
    )
    constrained = keep_first_frame(latents, torch.tensor([500.0, 20.0]), noise, first)
    assert torch.equal(constrained.latents[:, :, :1], first)
    assert torch.equal(constrained.latents[:, :, 1:], latents[:, :, 1:])
    assert constrained.timestep.expand(2, 1, 3, 2, 4)[:, 0, :, 0, 0].tolist() == [
        [0, 500, 500],
        [0, 20, 20],
    ]
    assert constrained.mask is not None
    assert constrained.mask.expand_as(latents)[0, 0, :, 0, 0].tolist() == [0, 1, 1]


def test_without_a_first_frame_nothing_is_constrained() -> None:
    latents, timestep = draw(2, 48, 3, 2, 4), torch.tensor([500.0, 20.0])
    constrained = keep_first_frame(latents, timestep, latents)
    assert (
        constrained.latents is latents,
        constrained.timestep is timestep,
        constrained.mask,
    ) == (
        True,
        True,
        None,
    )


def test_a_first_frame_that_is_the_only_one_is_refused() -> None:
    with pytest.raises(UsageError, match="num_frames: is 1"):
        keep_first_frame(
            draw(1, 48, 1, 2, 4),
            torch.tensor([500.0]),
            draw(1, 48, 1, 2, 4),
            draw(1, 48, 1, 2, 4),
        )


def test_the_loss_of_a_constrained_first_frame_is_the_mean_over_the_others() -> None:
    latents, first = draw(1, 48, 3, 2, 4), draw(1, 48, 1, 2, 4, seed=5)
    timestep_sampler, key, seen = (
        TimestepSampler(SCHEDULE, weighting="none"),
        SampleKey(0, 0, 0, 0),
        {},
    )

    def guess(noisy_latents: Tensor, timestep: Tensor) -> Tensor:
        seen.update(noisy_latents=noisy_latents, timestep=timestep)
        return torch.zeros_like(noisy_latents)

    loss = flow_match(
        guess,
        latents,
        timestep_sampler=timestep_sampler,
        constrain_latents=lambda *constrained: keep_first_frame(*constrained, first),
        rng=Rng([key]),
    )
    target = Rng([key]).normal("noise", latents.shape[1:]) - latents
    assert torch.allclose(loss, target[:, :, 1:].square().mean(), rtol=1e-6)
    assert torch.equal(seen["noisy_latents"][:, :, :1], first)
