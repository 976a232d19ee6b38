"""Units give what diffusers' pipelines give, and defaults are the published ones."""

import re
from fnmatch import fnmatch
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from dstrain import UsageError
from dstrain.graph import LongPrompt, noticing_long_prompts
from dstrain.models import components_of
from dstrain.models.configs import infer_config
from dstrain.pipeline import plan_inference
from dstrain.plugin import Files
from dstrain_z_image import MODEL, units
from dstrain_z_image.model_fn import predict_controlled
from torch import Tensor, nn

from tests.support.layouts import (
    assert_equal,
    layout_shapes,
    load_as,
    network_of_noise,
    saved,
)
from tests.support.noise_images import noise_image, smooth_noise
from tests.support.toys import opened, run_unit, toy

from .test_conformance import TestConformance as Published

STEPS = ("num_inference_steps", "guidance_scale", "negative_prompt")


def test_the_defaults_are_the_published_ones() -> None:
    """inference.py of Tongyi-MAI/Z-Image, the scheduler's configurations, and the pipelines
    of diffusers.
    """
    specs = {name: MODEL.spec(name) for name in MODEL.variants}
    found = {
        name: [spec.defaults[one] for one in STEPS] for name, spec in specs.items()
    }
    assert found == {
        "base": [50, 4.0, ""],
        "turbo": [8, 0.0, ""],
        "omni": [50, 5.0, ""],
        "controlnet-union": [8, 0.0, ""],
    }
    for name, spec in specs.items():
        assert (spec.defaults["height"], spec.defaults["width"]) == (1024, 1024)
        schedule: Any = spec.schedule
        shift = 6 if name == "base" else 3
        plain = torch.linspace(1, 0, 5, dtype=torch.float64)[:-1]
        wanted = shift / (shift + 1 / plain - 1)
        made = schedule.sigmas(4, 4096).double()
        torch.testing.assert_close(made[:-1], wanted, rtol=1e-6, atol=0)
    assert specs["controlnet-union"].defaults["controlnet_scale"] == 0.75
    column: Any = specs["controlnet-union"].inputs["controlnet_image"]
    assert column.of == "input_image"


def test_what_shapes_do_not_tell_is_as_published() -> None:
    """z_image_text_encoder.py, z_image_dit.py and flux_vae.py of DiffSynth-Studio, and the
    defaults of diffusers' transformer.
    """
    components = components_of(MODEL)
    (encoder,) = components["text_encoder"].published.values()
    assert (encoder["rope_theta"], encoder["rms_norm_eps"]) == (1e6, 1e-6)
    (vae,) = components["vae"].published.values()
    assert (vae["scaling_factor"], vae["shift_factor"]) == (0.3611, 0.1159)
    for published in components["dit"].published.values():
        dit = components["dit"].configure(published)
        assert (dit.rope_theta, dit.t_scale, dit.norm_eps) == (256.0, 1000.0, 1e-5)
        assert tuple(dit.axes_dims) == (32, 48, 48)


def test_training_a_controlnet_teaches_it_at_full_strength() -> None:
    """train_control.py of VideoX-Fun gives no scale, and its network's default is 1."""
    assert signature(predict_controlled).parameters["controlnet_scale"].default == 1.0


@pytest.mark.drawn
@torch.no_grad()
def test_steps_with_images_to_edit_of_any_size_equal_diffusers() -> None:
    """The VAE sees the middle of each, SigLIP sees it whole."""
    pipe, folder = opened("z_image", "omni"), toy("z_image", "omni")
    draw = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {"prompt": "a dog", "height": 32, "width": 48}
    given |= {"num_inference_steps": 2, "guidance_scale": 1.0, "negative_prompt": "x"}
    given["latents"] = torch.randn(1, 16, 4, 6, generator=draw)
    given["edit_image"] = [smooth_noise(100, 75), smooth_noise(61, 94)]
    wanted, _ = Published.published(pipe, folder, given)
    passed: list[Tensor] = []
    pipe(**given, on_step=lambda _, latents: passed.append(latents))
    for one, other in zip(passed, wanted, strict=True):
        assert ((one - other).abs().max() / other.abs().max()).item() <= 1e-5


def test_a_large_image_to_edit_is_scaled_as_diffusers_scales_it() -> None:
    image = smooth_noise(1300, 1100)
    wanted = Flux2ImageProcessor._resize_to_target_area(image, 1024 * 1024)
    assert np.array_equal(units.scaled_down(image), wanted)
    sides = {"width": wanted.width // 16 * 16, "height": wanted.height // 16 * 16}
    given = {"prompt": "", "edit_image": [noise_image(64, 64), image]}
    assert sides.items() <= plan_inference(MODEL.spec("omni"), given).inputs.items()


@torch.no_grad()
def test_a_control_image_is_scaled_as_diffusers_scales_it() -> None:
    pipe, image = opened("z_image", "controlnet-union"), smooth_noise(100, 75)
    made = run_unit(
        pipe, "encode_control_image", controlnet_image=image, height=32, width=48
    )
    vae = pipe.components["vae"]
    pixels = VaeImageProcessor().preprocess(image, 32, 48)
    wanted = vae.encode(pixels).latent_dist.mode() - vae.config.shift_factor
    torch.testing.assert_close(
        made["control_latents"],
        wanted * vae.config.scaling_factor,
        rtol=1e-5,
        atol=1e-5,
    )


@torch.no_grad()
def test_a_text_is_cut_at_512_tokens() -> None:
    pipe = opened("z_image", "base")
    found: list[LongPrompt] = []
    with noticing_long_prompts(found.append):
        made = run_unit(pipe, "encode_prompt", prompt="the dog " * 99)
    assert [one.limit for one in found] == [512]
    assert made["prompt_emb"].shape[1] == 512


def test_an_image_to_edit_of_which_nothing_would_be_left_is_refused() -> None:
    with pytest.raises(UsageError, match="edit_image"):
        units.scaled_down(noise_image(4096, 8))


def test_a_controlnet_of_version_2_0_is_refused(tmp_path: Path) -> None:
    """It has the names of 2.1, and zeros where 2.1 refines with the control."""
    component = components_of(MODEL)["controlnet"]
    network = network_of_noise(component, toy("z_image", "controlnet-union"))
    weights = network.state_dict()
    path = saved(tmp_path / "new.safetensors", weights)
    loaded = load_as(component, Files((path,)), network)
    assert_equal(loaded.state_dict(), weights)
    weights["control_noise_refiner.0.before_proj.weight"].zero_()
    path = saved(tmp_path / "old.safetensors", weights)
    with pytest.raises(UsageError, match=r"2\.0"):
        load_as(component, Files((path,)), network)


def test_layers_that_are_special_are_these() -> None:
    components = components_of(MODEL)
    dit = opened("z_image", "omni").components["dit"]
    linear = {name for name, one in dit.named_modules() if isinstance(one, nn.Linear)}
    modulation, exact = (
        {name for name in linear if any(fnmatch(name, f"*{one}") for one in patterns)}
        for patterns in (components["dit"].modulation, components["dit"].as_loaded)
    )
    blocks = {name for name in linear if re.match(r"(layers|\w+_refiner)\.", name)}
    assert exact == linear - blocks
    assert modulation == {name for name in blocks if "adaLN" in name}
    assert {name.split(".")[0] for name in exact} >= {"t_embedder", "cap_embedder"}


def test_a_transformer_of_another_depth_is_told_by_its_weights() -> None:
    component = components_of(MODEL)["dit"]
    published = component.published["Tongyi-MAI/Z-Image"]
    shapes = layout_shapes(component, {**published, "n_layers": 3})
    found = infer_config(component, shapes)
    assert found is not None and found["n_layers"] == 3
