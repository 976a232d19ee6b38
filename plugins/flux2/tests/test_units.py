"""Units and the denoiser's call give what diffusers' pipelines and the publisher's code
give.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline, Flux2Pipeline
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from dstrain import Pipeline, UsageError
from dstrain.graph import LongPrompt, noticing_long_prompts
from dstrain.pipeline import plan_inference
from dstrain_flux2 import MODEL, units
from torch import Tensor

from tests.support.noise_images import noise_image, smooth_noise
from tests.support.toys import gradients, opened, run_unit, toy

from .test_conformance import LAYERS, build, by_diffusers

# Of torch, where fp32 weights of a norm meet bf16.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Mismatch dtype between input and weight:UserWarning"
)
KINDS = {
    "dev": (Flux2Pipeline, "encode_mistral_prompt"),
    "klein": (Flux2KleinPipeline, "encode_qwen_prompt"),
}
PROMPTS = ["a red apple", "", " ", "\n red", "the dog " * 99, "红苹果 {} [IMG]"]


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LATENTS, TEXT = draw(2, 128, 4, 6), draw(2, 20, 96)
IMAGES = [draw(2, 128, 2, 3), draw(2, 128, 5, 1)]
TIMESTEP = torch.tensor([500.0, 987.25])


@torch.no_grad()
@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts_are_encoded_as_diffusers_encodes_them(
    variant: str, prompt: str
) -> None:
    pipe = opened("flux2", variant)
    published = build(pipe, toy("flux2", variant))
    wanted, ids = published.encode_prompt(prompt, text_encoder_out_layers=LAYERS)
    found: list[LongPrompt] = []
    with noticing_long_prompts(found.append):
        made = run_unit(pipe, KINDS[variant][1], prompt=prompt)["prompt_emb"]
    assert made.shape == (1, 512, 96)
    assert torch.equal(made, wanted)
    # A token for each character, and what the template has before the prompt.
    before = {"dev": 4 + len(SYSTEM_MESSAGE), "klein": 6}[variant]
    limits = [512 - before] if len(prompt) > 500 else []
    assert [one.limit for one in found] == limits
    assert ids.shape == (1, 512, 4)


def test_mistral_is_told_what_the_publisher_tells_it() -> None:
    assert units.SYSTEM_MESSAGE == SYSTEM_MESSAGE


@pytest.mark.parametrize(("variant", "other"), [("dev", "klein"), ("klein", "dev")])
def test_the_tokenizer_of_the_other_encoder_is_refused(
    variant: str, other: str
) -> None:
    pipe = opened("flux2", variant)
    pipe.components["tokenizer"] = opened("flux2", other).components["tokenizer"]
    with pytest.raises(UsageError, match="--tokenizer_path"):
        run_unit(pipe, KINDS[variant][1], prompt="a dog")


def with_statistics(pipe: Pipeline) -> Pipeline:
    """Give the VAE statistics that change every channel."""
    statistics = pipe.components["vae"].bn
    statistics.running_mean.copy_(torch.linspace(-1, 1, 128))
    statistics.running_var.copy_(torch.linspace(0.5, 2, 128))
    return pipe


@torch.no_grad()
def test_images_are_normalized_by_the_statistics_of_the_vae_and_come_back() -> None:
    pipe, image = with_statistics(opened("flux2", "klein")), noise_image(64, 96)
    published = build(pipe, toy("flux2", "klein"))
    pixels = published.image_processor.preprocess(image)
    wanted = published._encode_vae_image(pixels, torch.Generator())
    made = run_unit(pipe, "encode_image", input_image=image)["input_latents"]
    assert made.shape == (1, 128, 6, 4)
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
    decoded = run_unit(pipe, "decode", latents=made)["image"]
    own = published._unpatchify_latents(
        made * torch.sqrt(torch.linspace(0.5, 2, 128).view(1, -1, 1, 1) + 1e-4)
        + torch.linspace(-1, 1, 128).view(1, -1, 1, 1)
    )
    theirs = published.image_processor.postprocess(
        pipe.components["vae"].decode(own, return_dict=False)[0]
    )[0]
    difference = np.asarray(decoded).astype(int) - np.asarray(theirs).astype(int)
    assert abs(difference).max() <= 1


@pytest.mark.parametrize("size", [(100, 75), (64, 64), (1300, 1100), (2050, 333)])
def test_reference_images_are_cut_as_diffusers_cuts_them(size: tuple[int, int]) -> None:
    """Of several, each has a megapixel at most; a single one may have 2024 x 2024, as in
    the publisher's code (encode_image_refs of src/flux2/sampling.py).
    """
    image, processor = smooth_noise(*size), Flux2ImageProcessor(vae_scale_factor=16)
    capped = processor._resize_if_exceeds_area(image, 1024**2)
    width, height = (side // 16 * 16 for side in capped.size)
    wanted = processor._resize_and_crop(capped, width, height)
    assert np.array_equal(units.resize(image, 1024**2), wanted)
    constants = MODEL.spec("dev").constants
    limits = [constants[f"{one}edit_pixels"].value for one in ("", "single_")]
    assert limits == [1024**2, 2024**2]


@torch.no_grad()
def test_a_single_reference_image_has_an_area_of_its_own() -> None:
    pipe, image = opened("flux2", "dev"), smooth_noise(128, 128)
    areas = {"edit_pixels": 32 * 32, "single_edit_pixels": 64 * 64}
    sides = [
        [
            one.shape[-1]
            for one in run_unit(pipe, "encode_edit_images", edit_image=images, **areas)[
                "edit_latents"
            ]
        ]
        for images in ([image], [image, image])
    ]
    assert sides == [[4], [2, 2]]


def test_a_reference_image_of_which_nothing_would_be_left_is_refused() -> None:
    with pytest.raises(UsageError, match="edit_image"):
        units.resize(noise_image(4096, 8), 1024**2)


@pytest.mark.parametrize("variant", ["dev", "klein", "klein-base"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_every_step_equals_diffusers_with_any_number_of_reference_images(
    variant: str, count: int
) -> None:
    """Of sizes of their own, which its pipeline cuts itself."""
    pipe, folder = with_statistics(opened("flux2", variant)), toy("flux2", variant)
    images = [smooth_noise(100, 75), smooth_noise(64, 130)][:count]
    given: dict[str, Any] = {"prompt": "a dog", "height": 32, "width": 64}
    given |= {"num_inference_steps": 3, "latents": draw(1, 128, 2, 4)}
    if variant == "dev":
        given["embedded_guidance"] = 2.5
    else:
        given["guidance_scale"] = 3.0 if variant == "klein-base" else 1.0
    theirs = {**given, "image": images or None}
    ours = {**given, "edit_image": images} if images else dict(given)
    if variant == "klein-base":
        theirs["negative_prompt"] = ours["negative_prompt"] = "ugly"
    area = {f"{one}edit_pixels": 1024**2 for one in ("", "single_")} if images else {}
    wanted, image = by_diffusers(pipe, folder, theirs)
    passed: list[Tensor] = []
    made = pipe(**ours, **area, on_step=lambda step, latents: passed.append(latents))
    for one, other in zip(passed, wanted, strict=True):
        assert ((one - other).abs().max() / other.abs().max()).item() <= 1e-5
    difference = np.asarray(made).astype(int) - np.asarray(image).astype(int)
    assert len(passed) == 3 and abs(difference).max() <= 1


@pytest.mark.parametrize("variant", ["dev", "klein"])
def test_a_scale_of_guidance_by_a_prompt_is_refused_where_there_is_none(
    variant: str,
) -> None:
    with pytest.raises(UsageError, match="guidance_scale") as error:
        opened("flux2", variant)(prompt="a dog", guidance_scale=4.0)
    assert ("embedded_guidance" in str(error.value)) == (variant == "dev")


@pytest.mark.parametrize("sides", [(100, 75), (1300, 1100)])
def test_an_edit_without_a_size_has_that_of_the_first_image(
    sides: tuple[int, int],
) -> None:
    """As in diffusers' pipelines, of a megapixel at most."""
    image, processor = smooth_noise(*sides), Flux2ImageProcessor(vae_scale_factor=16)
    capped = processor._resize_if_exceeds_area(image, 1024**2)
    images = [image, smooth_noise(64, 64)]
    sizes = {"height": capped.height // 16 * 16, "width": capped.width // 16 * 16}
    plan = plan_inference(MODEL.spec("klein"), {"prompt": "", "edit_image": images})
    assert sizes.items() <= plan.inputs.items()
    own = {"prompt": "", "edit_image": images, "height": 16, "width": 32}
    assert own.items() <= plan_inference(MODEL.spec("klein"), own).inputs.items()


def test_the_defaults_are_the_published_ones() -> None:
    """scripts/cli.py of black-forest-labs/flux2, and the pipelines of diffusers with their
    model cards' calls.
    """
    found = {name: MODEL.spec(name).defaults for name in MODEL.variants}
    steps = {name: one["num_inference_steps"] for name, one in found.items()}
    assert steps == {"dev": 50, "klein": 4, "klein-base": 50}
    scales = {name: one["guidance_scale"] for name, one in found.items()}
    assert scales == {"dev": 1.0, "klein": 1.0, "klein-base": 4.0}
    assert found["dev"]["embedded_guidance"] == 4.0
    assert found["klein-base"]["negative_prompt"] == ""
    assert all((one["height"], one["width"]) == (1024, 1024) for one in found.values())


@pytest.mark.parametrize("tokens", [16, 4096, 4300, 4301, 16384])
@pytest.mark.parametrize("steps", [1, 4, 28, 50, 200])
def test_the_shift_of_inference_is_the_publishers(tokens: int, steps: int) -> None:
    schedule: Any = MODEL.spec("dev").schedule
    shift = math.exp(compute_empirical_mu(tokens, steps))
    plain = torch.linspace(1, 0, steps + 1, dtype=torch.float64)[:-1]
    wanted = shift / (shift + 1 / plain - 1)
    made = schedule.sigmas(steps, tokens).double()
    torch.testing.assert_close(made[:-1], wanted, rtol=1e-6, atol=0)
    assert made[-1] == 0
    assert schedule.tokens((1, 128, 8, 16)) == 128
    given = schedule.shifted(3.0).sigmas(4, tokens)
    assert torch.equal(given, schedule.shifted(3.0).sigmas(4, 16))


def test_ids_are_of_the_image_the_row_the_column_and_the_place_in_the_text() -> None:
    pipe, seen = opened("flux2", "dev"), []
    pipe.components["dit"].register_forward_pre_hook(
        lambda module, _, named: seen.append(named), with_kwargs=True
    )
    made, turned = (
        pipe.predict({"prompt_emb": TEXT, "edit_latents": images}, LATENTS, TIMESTEP)
        for images in (IMAGES, IMAGES[::-1])
    )
    published = Flux2Pipeline
    wanted = [published._prepare_latent_ids(LATENTS)[0]]
    wanted += [published._prepare_image_ids([one[:1] for one in IMAGES])[0]]
    assert torch.equal(seen[0]["img_ids"], torch.cat(wanted))
    assert torch.equal(seen[0]["txt_ids"], published._prepare_text_ids(TEXT)[0])
    assert made.shape == LATENTS.shape
    assert not torch.equal(made, turned)


@pytest.mark.parametrize("kind", ["bf16 weights", "autocast"])
def test_in_bf16_neighbouring_timesteps_and_guidances_embed_differently(
    kind: str,
) -> None:
    dtype = torch.float32 if kind == "autocast" else torch.bfloat16
    pipe = opened("flux2", "dev", dtype)
    pipe.dtype = torch.bfloat16
    dit, seen = pipe.components["dit"], []
    dit.time_guidance_embed.register_forward_hook(
        lambda _, arguments, output: seen.append(output.detach())
    )
    near, same = torch.tensor([500.0, 501.0]), torch.tensor([500.0, 500.0])
    latents, text = LATENTS.to(dtype), TEXT.to(dtype)
    pipe.predict({"prompt_emb": text}, latents, near)
    for guidance in (3.5, 3.502):
        given = {"prompt_emb": text, "embedded_guidance": guidance}
        pipe.predict(given, latents, same)
    exact, one, other = seen
    assert exact.dtype == torch.bfloat16
    assert not torch.equal(exact[0], exact[1])
    assert not torch.equal(one, other)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    from dstrain.models.execution import enable_checkpointing

    pipe = opened("flux2", "dev")
    values = {"prompt_emb": TEXT, "edit_latents": IMAGES}
    given = (pipe, ["dit"], values, LATENTS, TIMESTEP)
    plain = gradients(*given)
    enable_checkpointing("dit", pipe.components["dit"], False)
    again = gradients(*given)
    assert len(plain) == len([*pipe.components["dit"].parameters()])
    assert [name for name in plain if not torch.equal(plain[name], again[name])] == []
