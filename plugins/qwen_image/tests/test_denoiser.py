"""The denoiser's call: exact timesteps, masks, entities, a ControlNet beside it, shapes."""

from typing import Any

import pytest
import torch
from dstrain import InputError, LoraConfig, Pipeline
from dstrain.lora import inject
from dstrain.models import components_of
from dstrain.models.execution import enable_checkpointing
from dstrain_qwen_image import MODEL
from torch import Tensor

from tests.support.toys import gradients, opened

TIMESTEP = torch.tensor([500.0, 501.0])


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mask(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


LATENTS = draw(2, 16, 1, 4, 8)
VALUES = {"prompt_emb": draw(2, 4, 32), "prompt_mask": mask(2, 4)}
CONTROL = {"control_latents": draw(2, 16, 1, 4, 8)}


def entities(second: int = 5, padded: int = 0) -> dict[str, Any]:
    """Return prompts of two entities, the second one's last tokens being padding."""
    masks = [mask(2, 3), mask(2, second)]
    masks[1][:, second - padded :] = False
    regions = torch.zeros(2, 2, 8, dtype=torch.bool)
    regions[:, 0, :3] = regions[:, 1, 1:4] = True
    texts = [draw(2, 3, 32), draw(2, 5, 32)[:, :second]]
    return {"entity_emb": texts, "entity_emb_mask": masks, "entity_regions": regions}


@pytest.mark.parametrize("kind", ["bf16 weights", "autocast", "LoRA"])
def test_in_bf16_neighbouring_timesteps_embed_differently(kind: str) -> None:
    dtype = torch.float32 if kind == "autocast" else torch.bfloat16
    pipe = opened("qwen_image", "base", dtype)
    pipe.dtype = torch.bfloat16
    dit, seen = pipe.components["dit"], []
    if kind == "LoRA":
        inject(dit, LoraConfig("dit", ("linear_1", "to_q"), 4, 4.0), {})
    dit.time_text_embed.register_forward_hook(
        lambda _, arguments, output: seen.append(output.detach())
    )
    pipe.predict(VALUES, LATENTS, TIMESTEP)
    with torch.autocast("cpu", torch.bfloat16):
        dit(
            hidden_states=draw(2, 8, 64),
            timestep=TIMESTEP / 1000,
            encoder_hidden_states=VALUES["prompt_emb"],
            img_shapes=[[(1, 2, 4)]] * 2,
        )
    exact, rounded = seen
    assert exact.dtype == torch.bfloat16
    assert not torch.equal(exact[0], exact[1])
    assert torch.equal(rounded[0], rounded[1]), (
        "diffusers no longer rounds timesteps; override_positional_args can go"
    )


@torch.no_grad()
@pytest.mark.parametrize("variant", ["edit", "edit-2511"])
def test_exact_timesteps_reach_every_token_and_those_of_images_are_at_zero_in_2511(
    variant: str,
) -> None:
    pipe = opened("qwen_image", variant, torch.bfloat16)
    seen: list[Tensor] = []
    pipe.components["dit"].time_text_embed.register_forward_hook(
        lambda _, arguments, output: seen.append(arguments[0])
    )
    images = {"edit_latents": [LATENTS[..., :4]]}
    assert pipe.predict({**VALUES, **images}, LATENTS, TIMESTEP).shape == LATENTS.shape
    zeros = [0.0, 0.0] if variant == "edit-2511" else []
    assert torch.equal(seen[0], torch.tensor([0.5, 0.501, *zeros]))


def kept(pipe: Pipeline, values: dict[str, Any]) -> int:
    """Return the bytes that one prediction keeps for its backward pass."""
    total = 0

    def count(value: Tensor) -> Tensor:
        nonlocal total
        total += value.nbytes
        return value

    with torch.autograd.graph.saved_tensors_hooks(count, lambda value: value):
        pipe.predict(values, LATENTS, TIMESTEP)
    return total


@pytest.mark.parametrize(
    ("variant", "trained", "dtype", "values"),
    [
        ("base", "dit", torch.float32, {}),
        ("base", "dit", torch.bfloat16, {}),
        ("eligen", "dit", torch.float32, entities()),
        ("blockwise-controlnet", "blockwise_controlnet", torch.float32, CONTROL),
    ],
)
def test_gradient_checkpointing_keeps_less_and_changes_no_gradient(
    variant: str, trained: str, dtype: torch.dtype, values: dict[str, Any]
) -> None:
    pipe, given = opened("qwen_image", variant), {**VALUES, **values}
    pipe.dtype = dtype
    plain = gradients(pipe, [trained], given, LATENTS, TIMESTEP)
    before = kept(pipe, given)
    enable_checkpointing("dit", pipe.components["dit"], False)
    again = gradients(pipe, [trained], given, LATENTS, TIMESTEP)
    assert plain.keys() == again.keys()
    assert any(one.any() for one in plain.values())
    assert [name for name in plain if not torch.equal(plain[name], again[name])] == []
    assert kept(pipe, given) < 0.8 * before


@torch.no_grad()
def test_a_controlnet_adds_to_the_last_of_many_blocks() -> None:
    pipe = opened("qwen_image", "blockwise-controlnet")
    for name in ("dit", "blockwise_controlnet"):
        component: Any = components_of(MODEL)[name]
        config = {**vars(pipe.configs[name]), "num_layers": 11}
        pipe.components[name] = component.network.build(component.configure(config))
    before = pipe.predict({**VALUES, **CONTROL}, LATENTS, TIMESTEP)
    *_, last = pipe.components["blockwise_controlnet"].controlnet_blocks
    last.output_proj.weight.mul_(20)
    made = pipe.predict({**VALUES, **CONTROL}, LATENTS, TIMESTEP)
    assert not torch.allclose(made, before, atol=1e-3)


def test_a_controlnet_of_other_inputs_is_refused_by_their_number() -> None:
    pipe = opened("qwen_image", "blockwise-controlnet-inpaint")
    with pytest.raises(InputError, match=r"blockwise_controlnet: .* 68 .* 64"):
        pipe.predict({**VALUES, **CONTROL}, LATENTS, TIMESTEP)
    masked = {"control_latents": draw(2, 17, 1, 4, 8)}
    pipe.predict({**VALUES, **masked}, LATENTS, TIMESTEP)
