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
    FlowMatchEulerDiscreteScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanVACEPipeline,
    WanVACETransformer3DModel,
    WanVideoToVideoPipeline,
)
from diffusers.pipelines.wan import pipeline_wan_i2v, pipeline_wan_vace
from dstrain import Frames, Pipeline
from dstrain.testing import Conformance
from dstrain_wan.camera import encode_camera, rays
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import CLIPImageProcessorPil

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


def euler(steps: int) -> FlowMatchEulerDiscreteScheduler:
    """The published schedule's Euler form, stepped through the sigmas that Wan's own
    code takes: 1 - i / steps.
    """
    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    plain = scheduler.set_timesteps
    scheduler.set_timesteps = lambda count, device=None: plain(
        sigmas=np.linspace(1.0, 1 / steps, steps), device=device
    )
    return scheduler


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


def see_squeezed(
    published: Any, image: Image.Image, arguments: Mapping[str, Any]
) -> Tensor:
    """Return what the image encoder sees of a whole image in the video's size."""
    size = {name: arguments[name] for name in ("height", "width")}
    pixels = published.video_processor.preprocess(image, **size)
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
        added = pipe.components["motion_controller"](speed).flatten(1)
        for network in networks:
            network.condition_embedder.register_forward_hook(
                lambda module, given, made: (made[0], made[1] + added, *made[2:])
            )
        return
    encode_image, prepare = published.encode_image, published.prepare_latents

    def see(images: Any, device: Any) -> Tensor:
        if reference is not None:
            images = reference
        elif isinstance(images, list) and not dit.config.pos_embed_seq_len:
            images = images[0]
        if is_fun:
            return see_squeezed(published, images, arguments)
        features: Tensor = encode_image(images, device)
        return features

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
        frames, *size = (arguments[name] for name in ("num_frames", "height", "width"))
        way, speed = (
            arguments[f"camera_control_{one}"] for one in ("direction", "speed")
        )
        seen = encode_camera(way, frames, *size, speed)["camera"]
        extras["rays"] = rays(seen, *size)
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
            scheduler=euler(arguments["num_inference_steps"]),
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
            # As without ftfy, which leaves letters as they are: these pipelines call it
            # though it is absent.
            for module in (pipeline_wan_i2v, pipeline_wan_vace):
                patch.setattr(
                    module, "ftfy", SimpleNamespace(fix_text=str), raising=False
                )
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
