"""The denoiser's call: exact timesteps, masks, guidance, shapes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from dstrain import UsageError
from dstrain.models import override_positional_args
from dstrain_qwen_image import MODEL
from dstrain_qwen_image.model_fn import (
    apply_guidance,
    latent_shape,
    pack,
    predict,
    unpack,
)
from peft import inject_adapter_in_model
from torch import Tensor


def inputs(
    batch: int = 2, tokens: int = 7, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "noisy_latents": torch.randn(batch, 16, 1, 8, 12, generator=generator),
        "prompt_emb": torch.randn(batch, tokens, 32, generator=generator).to(dtype),
        "prompt_mask": torch.ones(batch, tokens, dtype=torch.bool),
    }


def plain_call(dit: Any, timestep: Tensor, given: dict[str, Tensor]) -> Tensor:
    tokens = dit(
        hidden_states=pack(given["noisy_latents"]),
        timestep=timestep / 1000,
        encoder_hidden_states=given["prompt_emb"],
        img_shapes=[[(1, 4, 6)]] * len(given["noisy_latents"]),
        return_dict=False,
    )[0]
    return unpack(tokens, 8, 12)


@contextmanager
def embeddings(dit: Any) -> Iterator[list[Tensor]]:
    """Collect what the timestep's embedding gives."""
    seen: list[Tensor] = []
    handle = dit.time_text_embed.register_forward_hook(
        lambda _, arguments, output: seen.append(output.detach())
    )
    yield seen
    handle.remove()


def test_in_fp32_predict_is_bit_equal_to_the_plain_call(loaded: dict[str, Any]) -> None:
    timestep = torch.tensor([500.0, 987.25])
    assert torch.equal(
        predict(timestep=timestep, **inputs(), dit=loaded["dit"]),
        plain_call(loaded["dit"], timestep, inputs()),
    )


@pytest.mark.parametrize(
    "autocast", [False, True], ids=["bf16 weights", "bf16 autocast over fp32 weights"]
)
def test_in_bf16_neighbouring_timesteps_embed_differently(
    autocast: bool, loaded: dict[str, Any], loaded_bf16: dict[str, Any]
) -> None:
    dit = (loaded if autocast else loaded_bf16)["dit"]
    given, timestep = inputs(dtype=torch.bfloat16), torch.tensor([500.0, 501.0])
    with torch.autocast("cpu", torch.bfloat16), embeddings(dit) as seen:
        predict(timestep=timestep, **given, dit=dit)
        plain_call(dit, timestep, given)
    exact, rounded = seen
    assert exact.dtype == torch.bfloat16
    assert not torch.equal(exact[0], exact[1])
    assert torch.equal(rounded[0], rounded[1]), (
        "diffusers no longer rounds timesteps; override_positional_args can go"
    )


def test_exact_timestep_leaves_no_hook_behind_even_after_an_error(
    loaded: dict[str, Any],
) -> None:
    embed = loaded["dit"].time_text_embed
    with pytest.raises(RuntimeError), override_positional_args(embed, torch.ones(1)):
        raise RuntimeError
    predict(timestep=torch.ones(2), **inputs(), dit=loaded["dit"])
    assert not embed._forward_pre_hooks


def gradients(
    dit: Any, call: Any, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor | None]:
    dit.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        prediction = call(timestep=torch.tensor([500.0, 501.0]), **inputs(dtype=dtype))
    prediction.float().square().mean().backward()
    return {name: weight.grad for name, weight in dit.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_checkpointing_changes_no_gradient(
    dtype: torch.dtype, loaded: dict[str, Any]
) -> None:
    dit = loaded["dit"].requires_grad_(True)
    plain = gradients(dit, lambda **given: predict(**given, dit=dit), dtype)
    dit.enable_gradient_checkpointing()
    checkpointed = gradients(dit, lambda **given: predict(**given, dit=dit), dtype)
    for name, gradient in plain.items():
        other = checkpointed[name]
        assert (gradient is None and other is None) or torch.equal(gradient, other), (
            name
        )


def test_exact_timesteps_reach_a_denoiser_with_lora_layers(
    loaded_bf16: dict[str, Any],
) -> None:
    dit = loaded_bf16["dit"]
    targets = [*MODEL.lora_targets["dit"], "linear_1"]
    inject_adapter_in_model(
        peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False), dit
    )
    with torch.autocast("cpu", torch.bfloat16), embeddings(dit) as seen:
        predict(
            timestep=torch.tensor([500.0, 501.0]),
            **inputs(dtype=torch.bfloat16),
            dit=dit,
        )
    assert not torch.equal(seen[0][0], seen[0][1])


def test_every_default_lora_target_matches(loaded: dict[str, Any]) -> None:
    for component, targets in MODEL.lora_targets.items():
        names = [name for name, _ in loaded[component].named_modules()]
        for target in targets:
            assert any(name.endswith(f".{target}") for name in names), (
                component,
                target,
            )


class Step(torch.nn.Module):
    """A training module in little: what DDP wraps."""

    def __init__(self, dit: Any) -> None:
        super().__init__()
        self.dit = dit

    def forward(self, **given: Tensor) -> Tensor:
        return predict(**given, dit=self.dit)


HELD: list[torch.nn.Module] = []
"""What must not be freed while threads of its process group may still run: that waits for
them with Python's lock, which they may wait for.
"""


def test_ddp_gives_the_gradients_of_the_bare_module(
    loaded: dict[str, Any], tmp_path: Path
) -> None:
    dit = loaded["dit"].requires_grad_(True)
    for part in (
        dit.transformer_blocks[-1].attn.to_add_out,
        dit.transformer_blocks[-1].txt_mlp,
    ):
        part.requires_grad_(False)
    plain = gradients(dit, Step(dit), torch.bfloat16)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(Step(dit))
        HELD.append(wrapped)
        for _ in range(2):
            parallel = gradients(dit, wrapped, torch.bfloat16)
    finally:
        torch.distributed.destroy_process_group()
    assert all(
        torch.equal(plain[name], parallel[name])
        for name in plain
        if plain[name] is not None
    )


def test_padding_that_the_mask_hides_does_not_change_the_prediction(
    loaded: dict[str, Any],
) -> None:
    given, timestep = inputs(), torch.tensor([500.0, 20.0])
    padded = {
        "noisy_latents": given["noisy_latents"],
        "prompt_emb": torch.nn.functional.pad(given["prompt_emb"], (0, 0, 0, 5)),
        "prompt_mask": torch.nn.functional.pad(given["prompt_mask"], (0, 5)),
    }
    wanted = predict(timestep=timestep, **given, dit=loaded["dit"])
    assert (
        predict(timestep=timestep, **padded, dit=loaded["dit"]) - wanted
    ).abs().max() < 1e-5
    padded["prompt_mask"] = torch.ones_like(padded["prompt_mask"])
    assert (
        predict(timestep=timestep, **padded, dit=loaded["dit"]) - wanted
    ).abs().max() > 1e-4


def test_a_mask_of_all_true_is_passed_as_none(loaded: dict[str, Any]) -> None:
    seen: list[Any] = []
    handle = loaded["dit"].register_forward_pre_hook(
        lambda module, arguments, named: seen.append(
            named["encoder_hidden_states_mask"]
        ),
        with_kwargs=True,
    )
    given = inputs()
    predict(timestep=torch.ones(2), **given, dit=loaded["dit"])
    given["prompt_mask"][0, -1] = False
    predict(timestep=torch.ones(2), **given, dit=loaded["dit"])
    handle.remove()
    assert seen[0] is None
    assert torch.equal(seen[1], given["prompt_mask"])


def test_packing_is_undone_by_unpacking_and_groups_2x2_patches() -> None:
    latents = torch.arange(2 * 16 * 4 * 6, dtype=torch.float32).view(2, 16, 1, 4, 6)
    tokens = pack(latents)
    assert tokens.shape == (2, 6, 64)
    assert torch.equal(tokens[1, 1].view(16, 2, 2), latents[1, :, 0, :2, 2:4])
    assert torch.equal(unpack(tokens, 4, 6), latents)


def test_guidance_keeps_each_tokens_norm() -> None:
    positive, negative = torch.randn(
        2, 1, 16, 1, 4, 6, generator=torch.Generator().manual_seed(0)
    ).unbind()
    guided = apply_guidance(positive, negative, 4.0)
    assert torch.allclose(pack(guided).norm(dim=-1), pack(positive).norm(dim=-1))
    assert torch.allclose(apply_guidance(positive, negative, 1.0), positive, atol=1e-6)
    direction = pack(negative + 4 * (positive - negative))
    assert torch.allclose(
        torch.cosine_similarity(pack(guided), direction, dim=-1), torch.ones(1, 6)
    )


def test_the_shape_of_the_latents() -> None:
    assert latent_shape(1024, 768) == (1, 16, 1, 128, 96)
    for height, width, name in ((1000, 768, "height"), (1024, 0, "width")):
        with pytest.raises(UsageError, match=f"{name}: expected a multiple of 16"):
            latent_shape(height, width)
