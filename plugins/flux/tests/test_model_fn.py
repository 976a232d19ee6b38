"""The denoiser's call: exact timesteps and guidance, images to edit, shapes; what
LoRA targets name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft
import pytest
import torch
from diffusers import FluxKontextPipeline, FluxPipeline
from dstrain import LoraConfig, UsageError
from dstrain.lora import inject
from dstrain.models import pack, unpack
from dstrain_flux import LORA_ALIASES, MODEL
from dstrain_flux.model_fn import image_ids, latent_shape, predict, predict_kontext
from peft import inject_adapter_in_model
from torch import Tensor

# Of torch, where fp32 weights of a norm meet bf16: it then computes in fp32, which is
# as well.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Mismatch dtype between input and weight:UserWarning"
)


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "noisy_latents": torch.randn(2, 16, 8, 12, generator=generator),
        "prompt_emb": torch.randn(2, 20, 32, generator=generator).to(dtype),
        "pooled_emb": torch.randn(2, 32, generator=generator).to(dtype),
    }


def references(*sizes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(2, 16, *size, generator=generator) for size in sizes]


def plain_call(
    dit: Any, timestep: Tensor, given: dict[str, Tensor], guidance: float
) -> Tensor:
    tokens = dit(
        hidden_states=pack(given["noisy_latents"]),
        timestep=timestep / 1000,
        guidance=torch.full((2,), guidance),
        pooled_projections=given["pooled_emb"],
        encoder_hidden_states=given["prompt_emb"],
        txt_ids=torch.zeros(20, 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(2, 4, 6, "cpu", torch.float32),
        return_dict=False,
    )[0]
    return unpack(tokens, 8, 12)


@contextmanager
def embeddings(dit: Any) -> Iterator[list[Tensor]]:
    """Collect what the embedding of timestep and guidance gives."""
    seen: list[Tensor] = []
    handle = dit.time_text_embed.register_forward_hook(
        lambda _, arguments, output: seen.append(output.detach())
    )
    yield seen
    handle.remove()


@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_in_fp32_predict_is_bit_equal_to_the_plain_call(
    guidance: float, loaded: dict[str, Any]
) -> None:
    timestep = torch.tensor([500.0, 987.25])
    wanted = plain_call(loaded["dit"], timestep, inputs(), guidance)
    assert torch.equal(
        predict(
            timestep=timestep, **inputs(), embedded_guidance=guidance, dit=loaded["dit"]
        ),
        wanted,
    )
    without = predict(timestep=timestep, **inputs(), dit=loaded["dit"])
    assert torch.equal(without, wanted) is (guidance == 1.0), (
        "the default, that of training, is 1"
    )


@pytest.mark.parametrize(
    "autocast", [False, True], ids=["bf16 weights", "bf16 autocast over fp32 weights"]
)
def test_in_bf16_neighbouring_timesteps_and_guidances_embed_differently(
    autocast: bool, loaded: dict[str, Any], loaded_bf16: dict[str, Any]
) -> None:
    dit = (loaded if autocast else loaded_bf16)["dit"]
    given = inputs(torch.bfloat16) | {
        "pooled_emb": torch.ones(2, 32, dtype=torch.bfloat16)
    }
    near, same = torch.tensor([500.0, 501.0]), torch.tensor([500.0, 500.0])
    with torch.autocast("cpu", torch.bfloat16), embeddings(dit) as seen:
        predict(timestep=near, **given, dit=dit)
        predict(timestep=same, **given, embedded_guidance=3.5, dit=dit)
        predict(timestep=same, **given, embedded_guidance=3.502, dit=dit)
        plain_call(dit, near, given, 1.0)
    exact, one, other, rounded = seen
    assert exact.dtype == torch.bfloat16
    assert not torch.equal(exact[0], exact[1])
    assert not torch.equal(one, other)
    assert torch.equal(rounded[0], rounded[1]), (
        "diffusers no longer rounds timesteps; override_positional_args can go"
    )


def test_exact_timesteps_reach_a_denoiser_with_lora_layers(
    loaded_bf16: dict[str, Any],
) -> None:
    dit = loaded_bf16["dit"]
    inject_adapter_in_model(
        peft.LoraConfig(
            r=4, target_modules=["linear_1", "to_q"], init_lora_weights=False
        ),
        dit,
    )
    given = inputs(torch.bfloat16) | {
        "pooled_emb": torch.ones(2, 32, dtype=torch.bfloat16)
    }
    with torch.autocast("cpu", torch.bfloat16), embeddings(dit) as seen:
        predict(timestep=torch.tensor([500.0, 501.0]), **given, dit=dit)
    assert not torch.equal(seen[0][0], seen[0][1])
    assert not dit.time_text_embed._forward_pre_hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_checkpointing_changes_no_gradient(
    dtype: torch.dtype, loaded: dict[str, Any]
) -> None:
    dit, found = loaded["dit"].requires_grad_(True), []
    for checkpointed in (False, True):
        if checkpointed:
            dit.enable_gradient_checkpointing()
        dit.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            noised = {"timestep": torch.tensor([500.0, 501.0]), **inputs(dtype)}
            prediction = predict_kontext(
                **noised, kontext_latents=references((4, 6)), dit=dit
            )
        prediction.float().square().mean().backward()
        found.append({name: weight.grad for name, weight in dit.named_parameters()})
    assert all(
        torch.equal(gradient, found[1][name]) for name, gradient in found[0].items()
    )


def test_ids_are_those_of_diffusers() -> None:
    wanted = FluxKontextPipeline._prepare_latent_image_ids(
        1, 4, 6, "cpu", torch.float32
    )
    assert torch.equal(image_ids(torch.zeros(1, 16, 8, 12), 0), wanted)
    wanted[..., 0] = 1
    assert torch.equal(image_ids(torch.zeros(1, 16, 8, 12), 1), wanted)


def test_images_to_edit_follow_the_noise_each_with_its_own_first_id(
    loaded: dict[str, Any],
) -> None:
    seen: list[dict[str, Any]] = []
    loaded["dit"].register_forward_pre_hook(
        lambda module, _, named: seen.append(named), with_kwargs=True
    )
    images = references((4, 6), (8, 2))
    made = predict_kontext(
        timestep=torch.ones(2), **inputs(), kontext_latents=images, dit=loaded["dit"]
    )
    assert made.shape == (2, 16, 8, 12)
    tokens = seen[0]["hidden_states"]
    assert torch.equal(
        tokens,
        torch.cat([pack(one) for one in (inputs()["noisy_latents"], *images)], dim=1),
    )
    assert seen[0]["img_ids"][:, 0].tolist() == [0] * 24 + [1] * 6 + [2] * 4
    swapped = predict_kontext(
        timestep=torch.ones(2),
        **inputs(),
        kontext_latents=images[::-1],
        dit=loaded["dit"],
    )
    assert not torch.equal(made, swapped), "which image is the first matters"


def test_packing_is_that_of_diffusers_and_is_undone_by_unpacking() -> None:
    latents = torch.arange(2 * 16 * 4 * 6, dtype=torch.float32).view(2, 16, 4, 6)
    assert torch.equal(pack(latents), FluxPipeline._pack_latents(latents, 2, 16, 4, 6))
    assert torch.equal(unpack(pack(latents), 4, 6), latents)


def test_the_shape_of_the_latents() -> None:
    assert latent_shape(1024, 768) == (1, 16, 128, 96)
    for height, width, name in ((1000, 768, "height"), (1024, 0, "width")):
        with pytest.raises(UsageError, match=f"{name}: expected a multiple of 16"):
            latent_shape(height, width)


def matches(dit: Any, *targets: str) -> tuple[dict[str, int], set[str]]:
    """How many layers each target matches, and the layers that got LoRA layers."""
    counts = inject(dit, LoraConfig("dit", targets, 2, 2.0), MODEL.lora_aliases)
    return counts, {
        name.removesuffix(".lora_A")
        for name, _ in dit.named_modules()
        if name.endswith(".lora_A")
    }


def test_default_targets_are_the_projections_of_both_kinds_of_block(
    loaded: dict[str, Any],
) -> None:
    linear = [
        name
        for name, layer in loaded["dit"].named_modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    _, layers = matches(loaded["dit"], *MODEL.lora_targets["dit"])
    assert layers == {
        name for name in linear if "transformer_blocks." in name and "norm" not in name
    }


def test_the_references_names_mean_the_layers_they_were(loaded: dict[str, Any]) -> None:
    """One joint block and two single ones; the original's layer of query, key, value is
    three here.
    """
    counts, _ = matches(loaded["dit"], *LORA_ALIASES)
    more = {
        "a_to_qkv": 3,
        "b_to_qkv": 3,
        "proj_out": 2,
        "norm.linear": 2,
        "to_qkv_mlp": 2 * 4,
    }
    assert counts == dict.fromkeys(LORA_ALIASES, 1) | more
    rest = {
        name
        for name, layer in loaded["dit"].named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    rest = {
        name for name in rest if "lora_" not in name and not name.endswith("base_layer")
    }
    assert rest == {"x_embedder", "context_embedder", "norm_out.linear", "proj_out"} | {
        f"time_text_embed.{kind}_embedder.linear_{i}"
        for kind in ("timestep", "guidance", "text")
        for i in (1, 2)
    }


@pytest.mark.parametrize("name", ["a_to_qkv", "proj_out"])
def test_an_alias_keeps_to_its_kind_of_block(name: str, loaded: dict[str, Any]) -> None:
    _, layers = matches(loaded["dit"], name)
    kind = "transformer_blocks." if name == "a_to_qkv" else "single_transformer_blocks."
    assert layers
    assert all(layer.startswith(kind) for layer in layers)
