"""Wan keeps the contract of a family; diffusers' pipelines are what its variants must
equal.
"""

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanVACEPipeline,
    WanVACETransformer3DModel,
    WanVideoToVideoPipeline,
)
from diffusers.pipelines.wan import (
    pipeline_wan_i2v,
    pipeline_wan_vace,
    pipeline_wan_video2video,
)
from dstrain import Frames, LoraConfig, Pipeline, save_lora
from dstrain.lora import inject
from dstrain.testing import Conformance
from dstrain_wan import MODEL
from dstrain_wan.camera import rays
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import CLIPImageProcessorPil

from tests.support.published_steps import add_to, assert_equal_steps, without_ftfy
from tests.support.toys import opened, run_unit

OWN = (
    *("input_image", "end_image", "control_video", "reference_image"),
    *("camera_control_direction", "camera_control_speed", "motion_bucket_id"),
)
"""Inputs that diffusers' pipelines do not have."""
VACE = ("vace_video", "vace_video_mask", "vace_reference_image")
PARTS = {"dit": "transformer", "dit2": "transformer_2"}
BOUNDARIES = {
    "t2v-a14b": 0.875,
    "i2v-a14b": 0.9,
    "vace-a14b": 0.9,
    "fun-control-a14b": 0.9,
    "fun-camera-a14b": 0.9,
}
"""boundary_ratio of the published model_index.json."""


def scheduler() -> UniPCMultistepScheduler:
    """The published sampler."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    )


def with_vace(dit: Any, vace: Any) -> WanVACETransformer3DModel:
    """Return diffusers' one network of the weights of our two."""
    known = inspect.signature(WanVACETransformer3DModel.__init__).parameters
    both = WanVACETransformer3DModel(
        **{name: one for name, one in dit.config.items() if name in known},
        vace_layers=vace.config.vace_layers,
        vace_in_channels=vace.config.vace_in_channels,
    )
    both.load_state_dict({**dit.state_dict(), **vace.state_dict()})
    return both.eval()


def as_images(video: Frames) -> list[Image.Image]:
    """Return frames as diffusers takes them."""
    return [Image.fromarray(frame.numpy()) for frame in video.pixels]


def encoded(vae: Any, frames: list[Image.Image]) -> Tensor:
    """Return the latents that diffusers begins with where it changes a video."""
    parts = ("tokenizer", "text_encoder", "transformer", "scheduler")
    published = WanVideoToVideoPipeline(vae=vae, **dict.fromkeys(parts))
    published.scheduler = SimpleNamespace(add_noise=lambda video, *rest: video)
    video = published.video_processor.preprocess_video(frames)
    latents: Tensor = published.prepare_latents(
        video, dtype=torch.float32, device=torch.device("cpu"),
        num_channels_latents=vae.config.z_dim,
        height=video.shape[-2], width=video.shape[-1],
    )  # fmt: skip
    return latents


def see_squeezed(published: Any, images: Any, size: Mapping[str, Any]) -> Tensor:
    """Return what the image encoder sees of whole images, at a size if one is given."""
    pixels = published.video_processor.preprocess(images, **size)
    sides = (published.image_encoder.config.image_size,) * 2
    squeezed = interpolate(pixels, sides, mode="bicubic") / 2 + 0.5
    processor = published.image_processor
    mean, std = (
        torch.tensor(one).view(3, 1, 1)
        for one in (processor.image_mean, processor.image_std)
    )
    encoded = published.image_encoder(
        (squeezed - mean) / std, output_hidden_states=True
    )
    features: Tensor = encoded.hidden_states[-2]
    return features


def condition(published: Any, pipe: Pipeline, arguments: Mapping[str, Any]) -> None:
    """Give diffusers' pipelines conditions for which they have no place.

    Of two images it sees the first one alone, or a reference image, where the
    transformer does not tell two apart.
    """
    vae, dit = pipe.components["vae"], pipe.components["dit"]
    reference = arguments.get("reference_image")
    extras: dict[str, Tensor] = {}
    networks = [one for one in (published.transformer, published.transformer_2) if one]
    if "motion_bucket_id" in arguments:
        speed = torch.tensor([arguments["motion_bucket_id"]])
        angles = speed[:, None] * 10 / 10000 ** (torch.arange(16) / 16)
        waves = torch.cat([angles.cos(), angles.sin()], dim=1)
        added = pipe.components["motion_controller"].linear(waves)
        for network in networks:
            network.condition_embedder.register_forward_hook(
                lambda module, given, made: (made[0], made[1] + added, *made[2:])
            )
        return
    prepare = published.prepare_latents

    def see(images: Any, device: Any) -> Tensor:
        if reference is not None:
            images = reference
        elif isinstance(images, list) and not dit.config.pos_embed_seq_len:
            images = images[0]
        names = ("height", "width") if is_fun else ()
        return see_squeezed(published, images, {one: arguments[one] for one in names})

    def prepare_latents(*given: Any, **more: Any) -> Any:
        latents, known = prepare(*given, **more)
        if "camera_control_direction" in arguments:
            if dit.config.in_channels == 2 * latents.shape[1]:
                known = known[:, -latents.shape[1] :]
                known[:, :, 1:] = 0
            return latents, known
        control = encoded(vae, as_images(arguments["control_video"]))
        remaining = dit.config.in_channels - 2 * control.shape[1]
        return latents, torch.cat([control, known[:, -remaining:]], dim=1)

    is_fun = "control_video" in arguments or "camera_control_direction" in arguments
    published.encode_image = see
    if is_fun:
        published.prepare_latents = prepare_latents
    if reference is not None:
        size = arguments["width"], arguments["height"]
        resized = reference.resize(size, Image.Resampling.LANCZOS)
        extras["reference_latents"] = encoded(vae, [resized])
    if "camera_control_direction" in arguments:
        unit = ("num_frames", "height", "width", "camera_control_direction")
        read = {name: arguments[name] for name in (*unit, "camera_control_speed")}
        seen = run_unit(pipe, "encode_camera", **read)["camera"]
        extras["rays"] = rays(seen, arguments["height"], arguments["width"])
    if extras:
        for network in networks:
            network.forward = partial(network.forward, **extras)


class TestConformance(Conformance):
    family = "wan"
    everyday = ("t2v", "i2v", "flf2v", "i2v-a14b", "ti2v-5b", "vace")

    @staticmethod
    def published(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> tuple[list[Tensor], Any]:
        """The clean first frame of 2.2-5B is put back into what diffusers' callback
        gets, as the pipeline itself does after its last step.
        """
        variant, image = pipe.spec.variant, arguments.get("input_image")
        parts = {PARTS.get(name, name): one for name, one in pipe.components.items()}
        if "image_encoder" in parts:
            side = parts["image_encoder"].config.image_size
            parts["image_processor"] = CLIPImageProcessorPil(
                size={"shortest_edge": side}, crop_size=side
            )
        parts.pop("motion_controller", None)
        own: dict[str, Any] = {"expand_timesteps": variant == "ti2v-5b"}
        kind: Any = WanPipeline if image is None else WanImageToVideoPipeline
        if "vace" in parts:
            kind, own = WanVACEPipeline, {}
            for name, beside in (("transformer", "vace"), ("transformer_2", "vace2")):
                if name in parts:
                    parts[name] = with_vace(parts[name], parts.pop(beside))
        published = kind(
            **parts,
            scheduler=scheduler(),
            boundary_ratio=BOUNDARIES.get(variant),
            **own,
        )
        published.set_progress_bar_config(disable=True)
        if image is not None or "motion_bucket_id" in arguments:
            condition(published, pipe, arguments)
        passed: list[Tensor] = []
        first: list[Tensor] = []
        prepare = published.prepare_latents

        def prepare_latents(*arguments: Any, **more: Any) -> Any:
            prepared = prepare(*arguments, **more)
            if variant == "ti2v-5b" and image is not None:
                first.append(prepared[1][:, :, :1])
            return prepared

        published.prepare_latents = prepare_latents

        def family(
            pipeline: Any, step: int, timestep: Any, values: dict[str, Any]
        ) -> dict[str, Any]:
            passed.append(values["latents"].clone())
            if first:
                passed[-1][:, :, :1] = first[0]
            return values

        given = {
            name: value
            for name, value in arguments.items()
            if name not in ("fps", *OWN, *VACE)
        }
        if "vace_video" in arguments:
            given["video"] = as_images(arguments["vace_video"])
            given["mask"] = as_images(arguments["vace_video_mask"])
            given["reference_images"] = arguments["vace_reference_image"]
        given |= {"image": image} if image is not None else {}
        if "end_image" in arguments:
            given["last_image"] = arguments["end_image"]
        with pytest.MonkeyPatch.context() as patch:
            without_ftfy(patch, pipeline_wan_i2v, pipeline_wan_vace)
            video = published(**given, callback_on_step_end=family).frames[0]
        return passed, np.round(video * 255).astype(np.uint8)

    @staticmethod
    def published_latents(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> Tensor:
        """Encode as diffusers encodes the video that it begins with, without the noise
        that it adds.
        """
        frames = as_images(arguments["input_video"])
        latents = encoded(pipe.components["vae"], frames)
        if "vace_reference_image" in arguments:
            before = WanVACEPipeline(
                vae=pipe.components["vae"],
                **dict.fromkeys(("tokenizer", "text_encoder", "scheduler")),
                transformer=pipe.components["dit"],
            )
            images = [[arguments["vace_reference_image"]]]
            size = {"height": frames[0].height, "width": frames[0].width}
            shown, mask, images = before.preprocess_conditions(
                frames, None, images, **size, dtype=torch.float32
            )
            found = before.prepare_video_latents(shown, mask, images)
            channels = pipe.components["vae"].config.z_dim
            latents = torch.cat([found[:, :channels, :1], latents], dim=2)
        return latents


@pytest.mark.parametrize(
    ("strength", "scale", "steps"), [(0.1, 1.0, 1), (0.8, 5.0, 8), (1.0, 1.0, 10)]
)
def test_from_a_video_every_step_equals_that_of_diffusers(
    strength: float, scale: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_ftfy(monkeypatch, pipeline_wan_video2video)
    pipe = opened("wan", "t2v")
    parts = {PARTS.get(name, name): one for name, one in pipe.components.items()}
    published = WanVideoToVideoPipeline(**parts, scheduler=scheduler())
    published.set_progress_bar_config(disable=True)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 32, 48, 3), np.uint8)
    start = Frames(torch.from_numpy(pixels), 16.0)
    theirs: list[Tensor] = []
    ours: list[Tensor] = []
    common: dict[str, Any] = {
        "prompt": "a red ball rolls",
        "negative_prompt": "blurry",
        "num_inference_steps": 10,
        "guidance_scale": scale,
    }
    wanted = published(
        **common,
        video=as_images(start),
        height=32,
        width=48,
        strength=strength,
        callback_on_step_end=add_to(theirs),
        generator=torch.Generator().manual_seed(5),
    ).frames[0]
    made = pipe(
        **common,
        input_video=start,
        denoising_strength=strength,
        seed=5,
        on_step=lambda step, latents: ours.append(latents),
    )
    assert_equal_steps(ours, theirs, steps)
    assert np.array_equal(made.pixels.numpy(), np.round(wanted * 255).astype(np.uint8))


# diffusers adds layers of zeros to the denoiser's blocks.
@pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters")
@torch.no_grad()
def test_a_lora_of_vace_acts_in_diffusers_as_here(tmp_path: Path) -> None:
    ours, plain = opened("wan", "vace"), opened("wan", "vace")
    vace = ours.components["vace"]
    layers = LoraConfig("vace", MODEL.lora_targets["vace"], 4, 4.0)
    inject(vace, layers, MODEL.lora_aliases)
    for name, weight in vace.named_parameters():
        if "lora_B" in name:
            weight.normal_()
    prefix = MODEL.lora_prefixes["vace"]
    save_lora(tmp_path / "lora.safetensors", vace, layers, prefix, {})
    parts = dict(plain.components)
    network = with_vace(parts.pop("dit"), parts.pop("vace"))
    published = WanVACEPipeline(**parts, transformer=network, scheduler=None)
    published.load_lora_weights(tmp_path, weight_name="lora.safetensors")
    draw = torch.Generator().manual_seed(0)
    shapes = ((1, 16, 3, 4, 6), (1, 512, 32), (1, 96, 3, 4, 6))
    latents, text, context = (torch.randn(one, generator=draw) for one in shapes)
    timestep, values = torch.tensor([500.0]), {"prompt_emb": text}
    values["vace_context"] = context
    made, without = (one.predict(values, latents, timestep) for one in (ours, plain))
    theirs = published.transformer(
        latents, timestep, text, control_hidden_states=context, return_dict=False
    )[0]
    assert (made - theirs).abs().max() <= 1e-5 * made.abs().max()
    assert (made - without).abs().max() > 1e-2
