"""The denoiser's call: exact timesteps, conditions, shapes, and what it keeps.

What diffusers does not have is computed here otherwise.
"""

import gc
import weakref
from typing import Any

import pytest
import torch
from dstrain import LoraConfig, UsageError
from dstrain.lora import inject
from dstrain.models import components_of
from dstrain.models.execution import enable_checkpointing
from dstrain_wan import MODEL
from torch import Tensor
from torch.nn.functional import conv2d, pixel_unshuffle, relu

from tests.support.noise_images import noise_image
from tests.support.toys import gradients, opened

TIMESTEP = torch.tensor([900.0, 100.0])


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LATENTS, TEXT = draw(2, 16, 3, 4, 6), draw(2, 7, 32)
CONTEXT = draw(2, 96, 3, 4, 6)
VALUES = {"prompt_emb": TEXT}


def network(**sizes: Any) -> Any:
    """Return a transformer of one block."""
    dit = components_of(MODEL)["dit"]
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 32,
        "ffn_dim": 64,
        "num_layers": 1,
    }
    library: Any = dit.network
    torch.manual_seed(1)
    return library.build(dit.configure({**config, **sizes})).eval()


@pytest.mark.parametrize("autocast", [False, True], ids=["weights", "autocast"])
def test_in_bf16_neighbouring_timesteps_embed_differently(autocast: bool) -> None:
    pipe = opened("wan", "t2v", torch.float32 if autocast else torch.bfloat16)
    pipe.dtype = torch.bfloat16
    seen: list[Tensor] = []
    pipe.components["dit"].condition_embedder.register_forward_hook(
        lambda _, given, made: seen.append(made[1].detach())
    )
    for timesteps in ([500.0, 501.0], [500.0, 500.0]):
        pipe.predict(VALUES, LATENTS, torch.tensor(timesteps))
    assert seen[0].dtype == torch.bfloat16
    assert not torch.equal(seen[0][0], seen[0][1])
    assert torch.equal(seen[0][0], seen[1][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_checkpointing_changes_no_gradient(dtype: torch.dtype) -> None:
    pipe = opened("wan", "t2v")
    pipe.dtype = dtype
    plain = gradients(pipe, ["dit"], VALUES, LATENTS, TIMESTEP)
    enable_checkpointing("dit", pipe.components["dit"], False)
    again = gradients(pipe, ["dit"], VALUES, LATENTS, TIMESTEP)
    assert [name for name in plain if not torch.equal(plain[name], again[name])] == []


@pytest.mark.parametrize("offload", [False, True], ids=["recomputed", "in RAM"])
@pytest.mark.parametrize("checkpointed", [("dit",), ("vace",), ("dit", "vace")])
def test_checkpointing_the_denoiser_or_vace_or_both_changes_no_gradient(
    checkpointed: tuple[str, ...], offload: bool
) -> None:
    pipe, values = opened("wan", "vace"), {**VALUES, "vace_context": CONTEXT}
    plain = gradients(pipe, ["dit", "vace"], values, LATENTS, TIMESTEP)
    for name in checkpointed:
        enable_checkpointing(name, pipe.components[name], offload)
    again = gradients(pipe, ["dit", "vace"], values, LATENTS, TIMESTEP)
    assert all(one.any() for one in plain.values())
    assert [name for name in plain if not torch.equal(plain[name], again[name])] == []


def test_nothing_of_a_step_is_kept_after_it() -> None:
    pipe, values = opened("wan", "vace"), {**VALUES, "vace_context": CONTEXT}
    enable_checkpointing("dit", pipe.components["dit"], False)
    seen: list[weakref.ref[Tensor]] = []
    pipe.components["vace"].register_forward_hook(
        lambda _, given, made: seen.append(weakref.ref(made))
    )
    gc.disable()
    try:
        gradients(pipe, ["dit", "vace"], values, LATENTS, TIMESTEP)
    finally:
        gc.enable()
    assert [one() for one in seen] == [None]


@pytest.mark.parametrize("variant", ["t2v", "i2v"])
def test_names_of_the_published_code_mean_the_same_layers(variant: str) -> None:
    targets = MODEL.lora_targets["dit"], ("q", "k", "v", "o", "ffn.0", "ffn.2")
    for names in targets:
        dit = opened("wan", variant).components["dit"]
        counts = inject(dit, LoraConfig("dit", names, 4, 4.0), MODEL.lora_aliases)
        assert list(counts.values()) == [4, 4, 4, 4, 2, 2]


@pytest.mark.parametrize("variant", ["ti2v-5b", "flf2v"])
def test_a_frame_that_is_the_only_one_leaves_nothing_to_generate(variant: str) -> None:
    image = noise_image(32, 32)
    given: dict[str, Any] = {"prompt": "x", "input_image": image, "num_frames": 1}
    given |= {"end_image": image} if variant == "flf2v" else {}
    with pytest.raises(UsageError, match="num_frames"):
        opened("wan", variant)(**given, height=32, width=32, num_inference_steps=1)


@torch.no_grad()
def test_a_reference_is_a_frame_before_the_others_with_patches_of_its_own() -> None:
    dit = network(ref_channels=3)
    reference = draw(2, 3, 1, 4, 6)
    made = dit(LATENTS, TIMESTEP, TEXT, reference_latents=reference, return_dict=False)[
        0
    ]
    assert made.shape == LATENTS.shape
    # Written out: blocks over the tokens of four frames.
    rotary = dit.rope(torch.zeros(2, 16, 4, 4, 6))
    patches = dit.patch_embedding(LATENTS).flatten(2).transpose(1, 2)
    weight, bias = dit.ref_conv.weight, dit.ref_conv.bias
    first = conv2d(reference[:, :, 0], weight, bias, stride=2)
    joined = torch.cat([first.flatten(2).transpose(1, 2), patches], dim=1)
    temb, modulation, text, _ = dit.condition_embedder(TIMESTEP, TEXT, None)
    (block,) = dit.blocks
    states = block(joined, text, modulation.unflatten(1, (6, -1)), rotary)[:, 6:]
    shift, scale = (dit.scale_shift_table + temb[:, None]).chunk(2, dim=1)
    states = dit.proj_out(dit.norm_out(states) * (1 + scale) + shift)
    wanted = states.view(2, 3, 2, 3, 2, 2, 16).permute(0, 6, 1, 2, 4, 3, 5)
    assert (made - wanted.reshape(made.shape)).abs().max() <= 1e-5


@torch.no_grad()
def test_rays_are_added_to_the_patches_in_that_call_alone() -> None:
    dit = network(camera_channels=24)
    rays = draw(2, 24, 3, 32, 48)
    adapter = dit.control_adapter
    (block,) = adapter.residual_blocks
    frames = []
    for one in rays.transpose(1, 2):
        embedded = adapter.conv(pixel_unshuffle(one, 8))
        frames.append(embedded + block.conv2(relu(block.conv1(embedded))))
    wanted = torch.stack(frames).transpose(1, 2)
    assert wanted.shape == (2, 24, 3, 2, 3)
    seen: list[Any] = []
    dit.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given))
    for more in ({}, {"rays": rays}, {}):
        dit(LATENTS, TIMESTEP, TEXT, return_dict=False, **more)
    plain, rayed, after = (one[0] for one in seen)
    added = rayed - plain
    assert (added - wanted.flatten(2).transpose(1, 2)).abs().max() <= 1e-5
    with pytest.raises(RuntimeError):
        dit(LATENTS, TIMESTEP, TEXT, rays=rays[:, 1:])
    dit(LATENTS, TIMESTEP, TEXT, return_dict=False)
    assert torch.equal(after, plain)
    assert torch.equal(seen[-1][0], plain)


@torch.no_grad()
def test_what_is_not_given_to_fun_control_is_zeros() -> None:
    pipe = opened("wan", "fun-control")
    shown = {**VALUES, "control_latents": draw(2, 16, 3, 4, 6)}
    nothing = {
        "y": torch.zeros(2, 20, 3, 4, 6),
        "clip_feature": torch.zeros(2, 257, 16),
    }
    made = pipe.predict(shown, LATENTS, TIMESTEP)
    assert torch.equal(made, pipe.predict({**shown, **nothing}, LATENTS, TIMESTEP))
    shown["control_latents"] = -shown["control_latents"]
    assert not torch.allclose(made, pipe.predict(shown, LATENTS, TIMESTEP))
