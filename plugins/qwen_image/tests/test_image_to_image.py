"""From an image, every step equals that of diffusers' pipelines."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    QwenImageImg2ImgPipeline,
    QwenImageInpaintPipeline,
)
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_img2img,
    pipeline_qwenimage_inpaint,
)
from dstrain import Pipeline, UsageError
from dstrain.pipeline import plan_inference
from dstrain_qwen_image import MODEL
from dstrain_qwen_image.model_fn import pack
from PIL import Image

from tests.support.noise_images import noise_image
from tests.support.published_steps import add_to, assert_equal_steps, encode_the_mode

PARTS = {"transformer": "dit", "text_encoder": "text_encoder"}
PARTS |= {name: name for name in ("tokenizer", "vae")}


def half_mask(width: int, height: int) -> Image.Image:
    mask = Image.new("L", (width, height))
    mask.paste(255, (width // 2, 0, width, height))
    return mask


@pytest.mark.parametrize("inpaints", [False, True])
@pytest.mark.parametrize(
    ("strength", "scale", "steps"), [(0.1, 1.0, 1), (0.6, 4.0, 5), (1.0, 1.0, 7)]
)
def test_every_step_equals_that_of_diffusers(
    inpaints: bool,
    strength: float,
    scale: float,
    steps: int,
    toy_folder: Path,
    loaded: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode_the_mode(monkeypatch, pipeline_qwenimage_img2img, pipeline_qwenimage_inpaint)
    kind = QwenImageInpaintPipeline if inpaints else QwenImageImg2ImgPipeline
    published = kind(
        **{name: loaded[ours] for name, ours in PARTS.items()},
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(
            toy_folder / "scheduler"
        ),
    )
    published.set_progress_bar_config(disable=True)
    image, theirs, ours = noise_image(96, 64), [], []

    common = {
        "prompt": "a red apple on a table", "negative_prompt": "blurry",
        "num_inference_steps": 7, "height": 64, "width": 96,
    }  # fmt: skip
    mask = {"mask_image": half_mask(96, 64)} if inpaints else {}
    wanted = published(
        **common, **mask, image=image, strength=strength, true_cfg_scale=scale,
        callback_on_step_end=add_to(theirs), generator=torch.Generator().manual_seed(5),
    ).images[0]  # fmt: skip
    pipe = Pipeline(
        MODEL.spec("inpaint" if inpaints else "base"),
        MODEL,
        {one: loaded[one] for one in PARTS.values()},
    )
    own_mask = {"inpaint_mask": half_mask(96, 64)} if inpaints else {}
    made = pipe(
        **common, **own_mask, input_image=image, denoising_strength=strength, seed=5,
        guidance_scale=scale, on_step=lambda i, latents: ours.append(pack(latents)),
    )  # fmt: skip
    assert_equal_steps(ours, theirs, steps)
    difference = np.abs(np.asarray(made, int) - np.asarray(wanted, int)).max()
    # Latents that differ by their rounding may be at the edge of two values.
    assert difference <= 1


@pytest.mark.parametrize("variant", MODEL.variants)
def test_all_variants_but_layered_start_from_an_image(variant: str) -> None:
    spec = MODEL.spec(variant)
    given = {**dict.fromkeys(spec.inputs, ""), "denoising_strength": 0.5}
    if variant == "layered":
        with pytest.raises(UsageError, match="does not start from one image"):
            plan_inference(spec, given)
        return
    assert "input_image" in plan_inference(spec, given).plan.used_inputs
