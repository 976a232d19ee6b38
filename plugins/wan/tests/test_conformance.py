"""Wan keeps the contract of a family; diffusers' pipelines are what its variants must
equal.
"""

from collections.abc import Mapping
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
from dstrain import Pipeline
from dstrain.graph.values import Frames
from dstrain.testing import Conformance
from PIL import Image
from torch import Tensor
from transformers import CLIPImageProcessorPil

VACE = ("vace_video", "vace_video_mask", "vace_reference_image")
PARTS = {"dit": "transformer", "dit2": "transformer_2"}
BOUNDARIES = {"t2v-a14b": 0.875, "i2v-a14b": 0.9, "vace-a14b": 0.9}
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
    both = WanVACETransformer3DModel(
        **{name: one for name, one in dit.config.items() if not name.startswith("_")},
        vace_layers=vace.config.vace_layers,
        vace_in_channels=vace.config.vace_in_channels,
    )
    both.load_state_dict({**dit.state_dict(), **vace.state_dict()})
    return both.eval()


def as_images(video: Frames) -> list[Image.Image]:
    """Return frames as diffusers takes them."""
    return [Image.fromarray(frame.numpy()) for frame in video.pixels]


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
        if variant == "i2v":
            # It has no place for the features of a second image.
            encode_image = published.encode_image

            def encode_first(images: Any, device: Any) -> Tensor:
                first = images[0] if isinstance(images, list) else images
                features: Tensor = encode_image(first, device)
                return features

            published.encode_image = encode_first
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
            if name not in ("input_image", "end_image", "fps", *VACE)
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
        parts = ("tokenizer", "text_encoder", "transformer", "scheduler")
        published = WanVideoToVideoPipeline(
            vae=pipe.components["vae"], **dict.fromkeys(parts)
        )
        published.scheduler = SimpleNamespace(add_noise=lambda video, *rest: video)
        frames = as_images(arguments["input_video"])
        video = published.video_processor.preprocess_video(frames)
        latents: Tensor = published.prepare_latents(
            video, dtype=torch.float32, device=torch.device("cpu"),
            num_channels_latents=pipe.components["vae"].config.z_dim,
            height=video.shape[-2], width=video.shape[-1],
        )  # fmt: skip
        if "vace_reference_image" in arguments:
            before = WanVACEPipeline(
                vae=pipe.components["vae"],
                **dict.fromkeys(("tokenizer", "text_encoder", "scheduler")),
                transformer=pipe.components["dit"],
            )
            images = [[arguments["vace_reference_image"]]]
            size = {"height": video.shape[-2], "width": video.shape[-1]}
            shown, mask, images = before.preprocess_conditions(
                frames, None, images, **size, dtype=torch.float32
            )
            found = before.prepare_video_latents(shown, mask, images)
            channels = pipe.components["vae"].config.z_dim
            latents = torch.cat([found[:, :channels, :1], latents], dim=2)
        return latents
