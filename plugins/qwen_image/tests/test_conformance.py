"""Qwen-Image keeps the contract of a family; diffusers' pipelines are what its variants
must equal.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
)
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit,
    pipeline_qwenimage_edit_plus,
)
from dstrain import Pipeline
from dstrain.testing import Conformance
from dstrain_qwen_image.model_fn import DOWNSCALE, pack, unpack
from dstrain_qwen_image.processor import Processor
from torch import Tensor
from transformers import Qwen2VLProcessor

RENAMED = {"guidance_scale": "true_cfg_scale", "edit_image": "image"}
OURS = ("edit_pixels", "edit_text_pixels")
PUBLISHED_PIXELS = {1024 * 1024: "edit_pixels", 384 * 384: "edit_text_pixels"}


class PublishedProcessor(Qwen2VLProcessor):
    """transformers' own, but for its constructor, which asks for torchvision."""

    def __init__(self, processor: Processor) -> None:
        self.image_processor, self.tokenizer = (
            processor.image_processor,
            processor.tokenizer,
        )
        self.video_processor = self.chat_template = None
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = self.tokenizer.convert_tokens_to_ids(
            [self.image_token, self.video_token]
        )
        self.image_ids, self.video_ids, self.audio_ids = (
            [self.image_token_id],
            [self.video_token_id],
            [],
        )


def by_diffusers(
    kind: type[Any],
    pipe: Pipeline,
    folder: Path,
    arguments: Mapping[str, Any],
    **parts: Any,
) -> tuple[list[Tensor], Any]:
    """The latents after each step of diffusers' pipeline on our components, and its
    image.
    """
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
    tokenizer = (
        pipe.components.get("tokenizer") or pipe.components["processor"].tokenizer
    )
    shared = {
        "tokenizer": tokenizer,
        **{name: pipe.components[name] for name in ("text_encoder", "vae")},
    }
    published = kind(
        scheduler=scheduler, transformer=pipe.components["dit"], **shared, **parts
    )
    published.set_progress_bar_config(disable=True)
    height, width = (arguments[side] // DOWNSCALE for side in ("height", "width"))
    passed: list[Tensor] = []

    def family(
        pipeline: Any, step: int, timestep: Any, values: dict[str, Any]
    ) -> dict[str, Any]:
        passed.append(unpack(values["latents"], height, width))
        return values

    given = {
        RENAMED.get(name, name): value
        for name, value in arguments.items()
        if name not in OURS
    }
    image = published(
        **given | {"latents": pack(arguments["latents"])}, callback_on_step_end=family
    ).images[0]
    return passed, image


def edit(
    pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
) -> tuple[list[Tensor], Any]:
    """diffusers' pipeline, made to resize images to our sizes and to pass
    `mm_token_type_ids`, as it should.
    """
    encoder = pipe.components["text_encoder"]
    forward, image = encoder.forward, encoder.config.image_token_id
    kind = (
        QwenImageEditPipeline
        if pipe.spec.variant == "edit"
        else QwenImageEditPlusPipeline
    )
    with pytest.MonkeyPatch.context() as patch:
        for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
            exact = module.calculate_dimensions
            patch.setattr(
                module,
                "calculate_dimensions",
                lambda area, ratio, exact=exact: exact(
                    arguments[PUBLISHED_PIXELS[area]], ratio
                ),
            )
        patch.setattr(
            encoder,
            "forward",
            lambda **given: forward(
                **given, mm_token_type_ids=(given["input_ids"] == image).int()
            ),
        )
        return by_diffusers(
            kind,
            pipe,
            folder,
            arguments,
            processor=PublishedProcessor(pipe.components["processor"]),
        )


class TestConformance(Conformance):
    family = "qwen_image"
    everyday = ("base", "edit", "edit-2509")

    @staticmethod
    def published(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> tuple[list[Tensor], Any]:
        if pipe.spec.variant == "base":
            return by_diffusers(QwenImagePipeline, pipe, folder, arguments)
        return edit(pipe, folder, arguments)

    @staticmethod
    def published_latents(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> Tensor:
        """Encode as diffusers encodes an image to edit."""
        parts = ("scheduler", "tokenizer", "processor", "text_encoder", "transformer")
        published = QwenImageEditPipeline(
            vae=pipe.components["vae"], **dict.fromkeys(parts)
        )
        image = published.image_processor.preprocess(arguments["input_image"])
        latents: Tensor = published._encode_vae_image(
            image[:, :, None], torch.Generator()
        )
        return latents
