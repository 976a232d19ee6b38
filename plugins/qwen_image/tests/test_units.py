"""Units give what diffusers' pipelines give, for one sample, from plain values."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit,
    pipeline_qwenimage_edit_plus,
)
from dstrain import InputError, Pipeline, UsageError
from dstrain.graph import LongPrompt, noticing_long_prompts
from PIL import Image
from torch import Tensor

from tests.support.noise_images import noise_image, smooth_noise
from tests.support.published_processor import PublishedProcessor
from tests.support.toys import opened, run_unit

PAD = "<|image_pad|>"


class Bytes:
    """The tokenizer of another model."""

    name_or_path = "some/folder"

    def __call__(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=list(text.encode()))


@torch.no_grad()
@pytest.mark.parametrize(
    "prompt",
    ["a red apple on a table", "", " ", "\n red", "x" * 900, "红苹果 <|im_end|> {}"],
)
def test_prompt_embeddings_are_bit_equal_to_diffusers(prompt: str) -> None:
    pipe = opened("qwen_image", "base")
    made = run_unit(pipe, "encode_prompt", prompt=prompt)
    parts = {name: pipe.components[name] for name in ("text_encoder", "tokenizer")}
    published = QwenImagePipeline(**parts, vae=None, transformer=None, scheduler=None)
    wanted, masked = published.encode_prompt([prompt])
    assert torch.equal(made["prompt_emb"], wanted)
    assert masked is None
    assert made["prompt_mask"].shape == wanted.shape[:2]
    assert made["prompt_mask"].dtype == torch.bool
    assert made["prompt_mask"].all()


@torch.no_grad()
@pytest.mark.parametrize(
    ("size", "pictures", "limit"),
    [
        ((None, None), [], 4096),
        ((1024, 1024), [], 4064),
        ((1328, 752), [], 4096 - 41),
        ((64, 64), [(512, 128)], 4096 - 16),
        ((64, 64), [(128, 512)], 4096 - 16),
    ],
)
def test_text_has_the_positions_that_the_images_leave(
    size: tuple[int | None, int | None], pictures: list[tuple[int, int]], limit: int
) -> None:
    pipe = opened("qwen_image", "edit" if pictures else "base")
    given: dict[str, Any] = {"prompt": "z" * 4500}
    given |= dict(zip(("height", "width"), size, strict=True))
    if pictures:
        given["resized_edit_images"] = [Image.new("RGB", one) for one in pictures]
    too_long: list[LongPrompt] = []
    with noticing_long_prompts(too_long.append):
        unit = "encode_edit_prompt" if pictures else "encode_prompt"
        made = run_unit(pipe, unit, **given)["prompt_emb"]
    assert made.shape == (1, limit, 32)
    assert [one.limit for one in too_long] == [limit]
    rope = QwenEmbedRope(theta=10000, axes_dim=[16, 56, 56], scale_rope=True)
    grids = [(1, (size[0] or 16) // 16, (size[1] or 16) // 16)]
    grids += [(1, height // 16, width // 16) for width, height in pictures]
    _, text = rope([grids], max_txt_seq_len=4096, device=torch.device("cpu"))
    assert len(text) == limit


@pytest.mark.parametrize("pixels", [1024 * 1024, 384 * 384, 64 * 64])
@pytest.mark.parametrize("size", [(64, 64), (1920, 1080), (33, 47), (200, 90), (1, 3)])
def test_images_are_resized_as_diffusers_resizes_them(
    size: tuple[int, int], pixels: int
) -> None:
    pipe, image = opened("qwen_image", "edit"), smooth_noise(*size)
    given = {"edit_image": image, "edit_pixels": pixels}
    (made,) = run_unit(pipe, "resize_edit_image", **given)["resized_edit_images"]
    ratio = size[0] / size[1]
    wanted = pipeline_qwenimage_edit_plus.calculate_dimensions(pixels, ratio)
    assert made.size == wanted
    one = pipeline_qwenimage_edit.calculate_dimensions(pixels, ratio)
    assert (*made.size, None) == one
    resized = VaeImageProcessor(16).resize(image, made.height, made.width)
    assert np.array_equal(made, resized)


@pytest.mark.parametrize(
    "sizes", [[(64, 96)], [(64, 64), (160, 40), (300, 310)]], ids=["one", "three"]
)
def test_ids_patches_and_token_types_are_those_of_the_published_processor(
    sizes: list[tuple[int, int]],
) -> None:
    processor = opened("qwen_image", "edit").components["processor"]
    images = [smooth_noise(*size) for size in sizes]
    picture = f"Picture: <|vision_start|>{PAD}<|vision_end|>"
    text = f"<|im_start|>user\n{picture * len(sizes)}红 <|im_end|>\n"
    made = processor(text, images, 4096)
    wanted = PublishedProcessor(processor)(
        text=[text], images=images, padding=True, return_tensors="pt"
    )
    assert made.keys() == wanted.keys()
    for name, one in made.items():
        assert torch.equal(one, wanted[name].to(one.dtype)), name
    assert int(made["mm_token_type_ids"].sum()) * 4 == len(made["pixel_values"])
    with pytest.raises(UsageError, match=r"images: .* 10"):
        processor(text, images, 10)


def edit_prompt(pipe: Pipeline, prompt: str) -> dict[str, Any]:
    given = {"prompt": prompt, "resized_edit_images": [smooth_noise(64, 64)]}
    return run_unit(pipe, "encode_edit_prompt", **given)


def test_a_tokenizer_or_a_processor_of_another_model_is_refused_by_name() -> None:
    pipe = opened("qwen_image", "base")
    pipe.components["tokenizer"] = Bytes()
    with pytest.raises(UsageError, match=r"tokenizer some/folder: .* 34") as error:
        run_unit(pipe, "encode_prompt", prompt="x")
    assert "--tokenizer_path" in str(error.value)
    pipe = opened("qwen_image", "edit")
    pipe.components["processor"] = SimpleNamespace(tokenizer=Bytes())
    with pytest.raises(UsageError, match=r"processor some/folder: .* 64") as error:
        edit_prompt(pipe, "x")
    assert "--processor_path" in str(error.value)


@torch.no_grad()
def test_images_are_where_the_text_encoder_looks_for_them() -> None:
    """Memory is planned with the toy's tokenizer, whose token of an image has another id."""
    pipe, seen = opened("qwen_image", "edit"), []
    encoder = pipe.components["text_encoder"]
    encoder.model.register_forward_pre_hook(
        lambda _, given, named: seen.append(named), with_kwargs=True
    )
    plain = edit_prompt(pipe, "a dog")["prompt_emb"]
    encoder.config.image_token_id = 9
    encoder.model.config.image_token_id = 9
    edit_prompt(pipe, "a dog")
    is_image = seen[0]["mm_token_type_ids"].bool()
    first, second = (one["input_ids"] for one in seen)
    assert is_image.any()
    assert (second[is_image] == 9).all()
    assert torch.equal(second[~is_image], first[~is_image])
    assert plain.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize(
    ("variant", "unit", "image", "latents"),
    [
        (
            "blockwise-controlnet",
            "encode_control_image",
            "blockwise_controlnet_image",
            "control_latents",
        ),
        (
            "in-context-control",
            "encode_context_image",
            "context_image",
            "context_latents",
        ),
    ],
)
def test_a_conditioning_image_is_cropped_to_the_generated_size(
    variant: str, unit: str, image: str, latents: str
) -> None:
    pipe, wide = opened("qwen_image", variant), noise_image(96, 32)
    made = run_unit(pipe, unit, **{image: wide}, height=32, width=32)
    middle = {"input_image": wide.crop((32, 0, 64, 32))}
    wanted = run_unit(pipe, "encode_image", **middle)
    assert torch.equal(made[latents], wanted["input_latents"])


def half_mask(box: tuple[int, int, int, int]) -> Image.Image:
    """Return a mask of 48 x 32 pixels that is white in a box."""
    mask = Image.new("L", (48, 32))
    mask.paste(255, box)
    return mask


def inpainted(box: tuple[int, int, int, int]) -> tuple[Pipeline, dict[str, Tensor]]:
    pipe, mask = opened("qwen_image", "inpaint"), half_mask(box)
    given = {"input_image": noise_image(48, 32), "inpaint_mask": mask}
    return pipe, run_unit(pipe, "encode_inpainted", **given, height=32, width=48)


@torch.no_grad()
def test_a_fine_mask_has_the_latents_that_it_touches_and_a_black_one_is_refused() -> (
    None
):
    _, made = inpainted((9, 1, 12, 3))
    assert made["inpaint_region"].nonzero()[:, 3:].tolist() == [[0, 1]]
    with pytest.raises(InputError, match="inpaint_mask"):
        inpainted((0, 0, 0, 0))


def test_a_token_is_of_an_entity_where_a_latent_of_it_is_white() -> None:
    masks = []
    for box in ((0, 0, 16, 16), (23, 12, 64, 32), (0, 0, 3, 3)):
        mask = Image.new("L", (64, 32))
        mask.paste(255, box)
        masks.append(mask)
    pipe = opened("qwen_image", "eligen")
    given: dict[str, Any] = {"eligen_entity_masks": masks, "height": 32, "width": 64}
    given["eligen_entity_prompts"] = ["a", "b", "c"]
    made = run_unit(pipe, "find_entity_tokens", **given)["entity_regions"]
    first, second, third = made.view(3, 2, 4).int().tolist()
    assert first == [[1, 0, 0, 0], [0, 0, 0, 0]]
    assert second == [[0, 1, 1, 1], [0, 1, 1, 1]]
    assert third == [[0, 0, 0, 0], [0, 0, 0, 0]]
    given["eligen_entity_prompts"] = ["a"]
    with pytest.raises(InputError, match=r"eligen_entity_masks: .* 3, .* 1"):
        run_unit(pipe, "find_entity_tokens", **given)


@torch.no_grad()
def test_an_image_and_its_layers_are_frames_encoded_one_by_one() -> None:
    pipe = opened("qwen_image", "layered")

    def encoded(images: list[Image.Image], **more: Any) -> Tensor:
        made = run_unit(pipe, "encode_layers", input_image=images, **more)
        latents: Tensor = made["input_latents"]
        return latents

    images = [noise_image(48, 32, seed, 4) for seed in range(3)]
    made = encoded(images, layer_num=2)
    assert made.shape == (1, 16, 3, 4, 6)
    for frame, image in zip(made.split(1, dim=2), images, strict=True):
        assert torch.equal(frame, encoded([image]))
    with pytest.raises(InputError, match=r"layer_num: .* 1, .* 3"):
        encoded(images, layer_num=1)
    with pytest.raises(InputError, match="image"):
        encoded([images[0], noise_image(32, 32, 0, 4)])
