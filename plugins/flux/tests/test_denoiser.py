"""The denoiser's call: exact timesteps and guidance, images and adapters beside it, shapes;
what LoRA targets name.
"""

from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from dstrain import LoraConfig, UsageError
from dstrain.lora import inject
from dstrain.models import components_of
from dstrain.models.execution import enable_checkpointing
from dstrain.plugin.functional import pack, unpack
from dstrain_flux import LORA_ALIASES, MODEL
from torch import Tensor

from tests.support.toys import gradients, opened

# Of torch, where fp32 weights of a norm meet bf16: it then computes in fp32, which is
# as well.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Mismatch dtype between input and weight:UserWarning"
)


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LATENTS = draw(2, 16, 8, 12)
TIMESTEP = torch.tensor([500.0, 987.25])
VALUES = {"prompt_emb": draw(2, 20, 32), "pooled_emb": torch.ones(2, 32)}
NEGATIVE = {f"negative.{name}": one for name, one in VALUES.items()}
IMAGES = [draw(2, 16, 4, 6), draw(2, 16, 8, 2)]


def plain_call(dit: Any, timestep: Tensor, guidance: float) -> Tensor:
    tokens = dit(
        hidden_states=pack(LATENTS),
        timestep=timestep / 1000,
        guidance=torch.full((2,), guidance),
        pooled_projections=VALUES["pooled_emb"],
        encoder_hidden_states=VALUES["prompt_emb"],
        txt_ids=torch.zeros(20, 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(2, 4, 6, "cpu", torch.float32),
        return_dict=False,
    )[0]
    return unpack(tokens, 8, 12)


@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_it_is_the_plain_call_with_the_guidance_of_training_by_default(
    guidance: float,
) -> None:
    pipe = opened("flux", "dev")
    wanted = plain_call(pipe.components["dit"], TIMESTEP, guidance)
    given = {**VALUES, "embedded_guidance": guidance}
    assert torch.equal(pipe.predict(given, LATENTS, TIMESTEP), wanted)
    default = pipe.predict(VALUES, LATENTS, TIMESTEP)
    assert torch.equal(default, wanted) is (guidance == 1.0)


@pytest.mark.parametrize("kind", ["bf16 weights", "autocast", "LoRA"])
def test_in_bf16_neighbouring_timesteps_and_guidances_embed_differently(
    kind: str,
) -> None:
    dtype = torch.float32 if kind == "autocast" else torch.bfloat16
    pipe = opened("flux", "dev", dtype)
    pipe.dtype = torch.bfloat16
    dit, seen = pipe.components["dit"], []
    if kind == "LoRA":
        layers = LoraConfig("dit", ("linear_1", "to_q"), 4, 4.0)
        inject(dit, layers, MODEL.lora_aliases)
    dit.time_text_embed.register_forward_hook(
        lambda _, arguments, output: seen.append(output.detach())
    )
    near, same = torch.tensor([500.0, 501.0]), torch.tensor([500.0, 500.0])
    pipe.predict(VALUES, LATENTS, near)
    for guidance in (3.5, 3.502):
        given = {**VALUES, "embedded_guidance": guidance}
        pipe.predict(given, LATENTS, same)
    with torch.autocast("cpu", torch.bfloat16):
        plain_call(dit, near, 1.0)
    exact, one, other, rounded = seen
    assert exact.dtype == torch.bfloat16
    assert not torch.equal(exact[0], exact[1])
    assert not torch.equal(one, other)
    assert torch.equal(rounded[0], rounded[1]), (
        "diffusers no longer rounds timesteps; override_positional_args can go"
    )


@pytest.mark.parametrize(
    ("variant", "trained", "dtype", "values"),
    [
        ("kontext", "dit", torch.float32, {"kontext_latents": IMAGES}),
        ("kontext", "dit", torch.bfloat16, {"kontext_latents": IMAGES}),
        ("ip-adapter", "dit", torch.float32, {"image_embs": draw(2, 2, 32)}),
        ("ip-adapter", "ipadapter", torch.float32, {"image_embs": draw(2, 2, 32)}),
    ],
)
def test_gradient_checkpointing_changes_no_gradient(
    variant: str, trained: str, dtype: torch.dtype, values: dict[str, Any]
) -> None:
    pipe = opened("flux", variant)
    pipe.dtype = dtype
    given = (pipe, [trained], {**VALUES, **values}, LATENTS, TIMESTEP)
    plain = gradients(*given)
    enable_checkpointing("dit", pipe.components["dit"], False)
    again = gradients(*given)
    assert len(plain) == len([*pipe.components[trained].parameters()])
    assert all(one.any() for one in plain.values())
    assert [name for name in plain if not torch.equal(plain[name], again[name])] == []


def test_images_to_edit_follow_the_noise_each_with_its_own_first_id() -> None:
    pipe, seen = opened("flux", "kontext"), []
    pipe.components["dit"].register_forward_pre_hook(
        lambda module, _, named: seen.append(named), with_kwargs=True
    )
    made, swapped = (
        pipe.predict({**VALUES, "kontext_latents": images}, LATENTS, TIMESTEP)
        for images in (IMAGES, IMAGES[::-1])
    )
    assert made.shape == LATENTS.shape
    tokens = torch.cat([pack(one) for one in (LATENTS, *IMAGES)], dim=1)
    assert torch.equal(seen[0]["hidden_states"], tokens)
    assert seen[0]["img_ids"][:, 0].tolist() == [0] * 24 + [1] * 6 + [2] * 4
    # Which image is the first matters.
    assert not torch.equal(made, swapped)


CONTROLS = {"control_latents": LATENTS, "control_mode": torch.ones(2, 1).long()}
ADAPTED = {
    "ip-adapter": {"image_embs": draw(2, 2, 32)},
    "controlnet": CONTROLS,
    "controlnet-union": CONTROLS,
}


@pytest.mark.parametrize("variant", ADAPTED)
def test_an_adapter_counts_by_its_scale_and_leaves_nothing(variant: str) -> None:
    pipe, plain = opened("flux", variant), opened("flux", "dev")
    plain.components["dit"] = pipe.components["dit"]
    scale = "ipadapter_scale" if variant == "ip-adapter" else "controlnet_scale"
    given = {**VALUES, **ADAPTED[variant]}
    wanted, half, off = (
        pipe.predict({**given, scale: one}, LATENTS, TIMESTEP) for one in (1, 0.5, 0)
    )
    assert not torch.equal(half, wanted)
    assert torch.equal(pipe.predict(given, LATENTS, TIMESTEP), wanted)
    assert torch.equal(plain.predict(VALUES, LATENTS, TIMESTEP), off)


def test_an_ip_adapter_for_another_number_of_blocks_is_refused() -> None:
    pipe, component = opened("flux", "ip-adapter"), components_of(MODEL)["ipadapter"]
    config = {**vars(pipe.configs["ipadapter"]), "num_blocks": 4}
    library: Any = component.network
    pipe.components["ipadapter"] = library.build(component.configure(config))
    with pytest.raises(UsageError, match=r"ipadapter: .* 4 .* 3"):
        pipe.predict({**VALUES, **ADAPTED["ip-adapter"]}, LATENTS, TIMESTEP)


def matches(*targets: str) -> tuple[dict[str, int], set[str], set[str]]:
    """Return how many layers each target matches, and the linear layers that get LoRA
    layers and those that do not.
    """
    dit = opened("flux", "dev").components["dit"]
    linear = {
        name
        for name, layer in dit.named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    counts = inject(dit, LoraConfig("dit", targets, 2, 2.0), MODEL.lora_aliases)
    named = {name.removesuffix(".lora_A") for name, _ in dit.named_modules()}
    adapted_layers = {name for name in linear if f"{name}.base_layer" in named}
    return counts, adapted_layers, linear - adapted_layers


def test_the_references_names_mean_the_layers_they_were() -> None:
    """One joint block and two single ones; the original's layer of query, key, value is
    three here.
    """
    names = "a_to_qkv b_to_qkv ff_a.0 ff_a.2 ff_b.0 ff_b.2 a_to_out b_to_out proj_out"
    names += " norm.linear norm1_a.linear norm1_b.linear to_qkv_mlp"
    assert list(LORA_ALIASES) == names.split()
    counts, _, others = matches(*LORA_ALIASES)
    more = {"a_to_qkv": 3, "b_to_qkv": 3, "proj_out": 2, "norm.linear": 2}
    assert counts == {**dict.fromkeys(LORA_ALIASES, 1), **more, "to_qkv_mlp": 2 * 4}
    embedders = {
        f"time_text_embed.{kind}_embedder.linear_{i}"
        for kind in ("timestep", "guidance", "text")
        for i in (1, 2)
    }
    ends = {"x_embedder", "context_embedder", "norm_out.linear", "proj_out"}
    assert others == ends | embedders
    for name, kind in (("a_to_qkv", "transformer"), ("proj_out", "single_transformer")):
        _, layers, _ = matches(name)
        assert all(layer.startswith(f"{kind}_blocks.") for layer in layers)
