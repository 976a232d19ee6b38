"""Z-Image keeps the contract of a family; diffusers' pipelines are what it must equal."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    ZImageControlNetModel,
    ZImageControlNetPipeline,
    ZImageOmniPipeline,
    ZImagePipeline,
)
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from dstrain import Pipeline
from dstrain.testing import Conformance
from torch import Tensor
from transformers import Siglip2ImageProcessorPil

from tests.support.published_steps import add_to

PARTS = {
    "dit": "transformer",
    "text_encoder": "text_encoder",
    "tokenizer": "tokenizer",
    "vae": "vae",
    "image_encoder": "siglip",
    "controlnet": "controlnet",
}
CLASSES = {"omni": ZImageOmniPipeline, "controlnet-union": ZImageControlNetPipeline}
RENAMED = {
    "edit_image": "image",
    "controlnet_image": "control_image",
    "controlnet_scale": "controlnet_conditioning_scale",
}


def controlnet_of_diffusers(ours: Any) -> Any:
    """Return the ControlNet of diffusers with the weights of ours."""
    theirs = ZImageControlNetModel.from_config(ours.config)
    theirs.load_state_dict(ours.state_dict())
    return theirs


@contextmanager
def refined_with_control(published: Any) -> Iterator[None]:
    """Let the transformer's refining blocks see the control, too, as in the publisher's own
    network (z_image_transformer2d_control.py of VideoX-Fun): diffusers adds it to the
    tokens that the ControlNet sees alone.
    """
    transformer, controlnet = published.transformer, published.controlnet
    hints: list[Tensor] = []
    inside: list[bool] = []

    def keep(_: Any, __: Any, made: Tensor) -> None:
        hints[:] = made.unbind()[:-1]

    def add(index: int) -> Any:
        def hook(_: Any, __: Any, made: Tensor) -> Tensor:
            return made + SCALE * hints[index] if inside else made

        return hook

    hooks = [
        controlnet.control_noise_refiner[-1].register_forward_hook(keep),
        transformer.register_forward_pre_hook(lambda *_: inside.append(True)),
        transformer.register_forward_hook(lambda *_: inside.clear()),
        *(
            block.register_forward_hook(add(index))
            for index, block in enumerate(transformer.noise_refiner)
        ),
    ]
    yield
    for hook in hooks:
        hook.remove()


SCALE = 0.75
"""controlnet_conditioning_scale, by default."""


class TestConformance(Conformance):
    family = "z_image"
    everyday = ("base",)

    @staticmethod
    def published(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> tuple[list[Tensor], Any]:
        parts = {
            PARTS[name]: one for name, one in pipe.components.items() if name in PARTS
        }
        given = {RENAMED.get(name, name): value for name, value in arguments.items()}
        with ExitStack() as stack:
            if "siglip" in parts:
                size = parts["siglip"].config.num_patches
                parts["siglip_processor"] = Siglip2ImageProcessorPil(
                    max_num_patches=size
                )
                # Whatever the VAE's dtype, it encodes images to edit in bf16; and it takes
                # no toy's.
                for kind, name in (
                    (Tensor, "bfloat16"),
                    (Flux2ImageProcessor, "check_image_input"),
                ):
                    stack.enter_context(
                        patch.object(kind, name, lambda *given: given[0])
                    )
            if "controlnet" in parts:
                parts["controlnet"] = controlnet_of_diffusers(parts["controlnet"])
            published = CLASSES.get(pipe.spec.variant, ZImagePipeline)(
                scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(
                    folder / "scheduler"
                ),
                **parts,
            )
            if "controlnet" in parts:
                stack.enter_context(refined_with_control(published))
            published.set_progress_bar_config(disable=True)
            passed: list[Tensor] = []
            made = published(**given, callback_on_step_end=add_to(passed))
        return passed, made.images[0]

    @staticmethod
    def published_latents(
        pipe: Pipeline, folder: Path, arguments: Mapping[str, Any]
    ) -> Tensor:
        """Encode as diffusers' pipelines with this VAE do."""
        vae = pipe.components["vae"]
        pixels = VaeImageProcessor().preprocess(arguments["input_image"])
        latents: Tensor = vae.encode(pixels).latent_dist.mode()
        return (latents - vae.config.shift_factor) * vae.config.scaling_factor
