"""Editing: images beside the prompt, in the sizes, tokens and positions that
diffusers' edit pipelines give them.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
)
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit,
    pipeline_qwenimage_edit_plus,
)
from dstrain import SFT, ModelConfig, Pipeline, TrainConfig, UsageError
from dstrain.graph import make_plan
from dstrain.models import find
from dstrain.models.naming import model_configs
from dstrain.pipeline import choose_variant, score_columns
from dstrain.runs.resolve import resolve
from dstrain_qwen_image import MODEL, units
from dstrain_qwen_image.model_fn import latent_shape_edit, pack, predict_edit
from torch import Tensor

from tests.support.noise_images import smooth_noise
from tests.support.published_processor import PublishedProcessor
from tests.support.published_steps import add_to, assert_equal_steps

PIXELS, TEXT_PIXELS = 64 * 128, 64 * 64
"""Small areas in the place of 1024 x 1024 for the VAE and 384 x 384 for the text
encoder.
"""
EDITS = [name for name in MODEL.variants if name.startswith("edit")]
PROMPT, NEGATIVE = (
    "put the red apple of Picture 1 on the table",
    "blurry and many other words",
)


@pytest.fixture
def parts(
    components_of: Callable[[str], dict[str, Any]], request: pytest.FixtureRequest
) -> dict[str, Any]:
    """Fresh components of the variant a test is about, in fp32."""
    loaded = components_of(getattr(request, "param", "edit"))
    with torch.no_grad():  # the default initialization hardly uses the prompt
        for weight in loaded["dit"].parameters():
            weight.mul_(2 if weight.ndim > 1 else 1)
    return loaded


def published(variant: str, loaded: dict[str, Any], folder: Path) -> Any:
    """diffusers' pipeline for the same components."""
    kind = QwenImageEditPipeline if variant == "edit" else QwenImageEditPlusPipeline
    made = kind(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        processor=PublishedProcessor(loaded["processor"]),
        transformer=loaded["dit"],
        **{name: loaded[name] for name in ("text_encoder", "tokenizer", "vae")},
    )
    made.set_progress_bar_config(disable=True)
    return made


def tell_images_from_text(text_encoder: Any, patch: pytest.MonkeyPatch) -> None:
    """Give the text encoder the `mm_token_type_ids` that diffusers does not pass."""
    forward, image = text_encoder.forward, text_encoder.config.image_token_id
    patch.setattr(
        text_encoder,
        "forward",
        lambda **given: forward(
            **given, mm_token_type_ids=(given["input_ids"] == image).int()
        ),
    )


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Make diffusers resize to the small areas."""
    areas = {1024 * 1024: PIXELS, 384 * 384: TEXT_PIXELS}
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        exact = module.calculate_dimensions
        patch.setattr(
            module,
            "calculate_dimensions",
            lambda area, ratio, exact=exact: exact(areas[area], ratio),
        )


@pytest.mark.parametrize("pixels", [1024 * 1024, 384 * 384, 64 * 64])
@pytest.mark.parametrize("size", [(64, 64), (1920, 1080), (33, 47), (200, 90), (1, 3)])
def test_images_are_resized_as_diffusers_resizes_them(
    size: tuple[int, int], pixels: int
) -> None:
    original, ratio = smooth_noise(*size), size[0] / size[1]
    made = units.resize(original, pixels)
    assert (*made.size, None) == pipeline_qwenimage_edit.calculate_dimensions(
        pixels, ratio
    )
    assert made.size == pipeline_qwenimage_edit_plus.calculate_dimensions(pixels, ratio)
    assert np.array_equal(
        made, VaeImageProcessor(16).resize(original, made.height, made.width)
    )


def test_an_image_too_long_for_its_area_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"edit_image: 900 x 10 .* too elongated for 4096 pixels"
    ):
        units.resize(smooth_noise(900, 10), 4096)


@pytest.mark.parametrize(
    "sizes", [[(64, 96)], [(64, 64), (160, 40), (300, 310)]], ids=["one", "three"]
)
def test_ids_patches_and_token_types_are_those_of_the_published_processor(
    sizes: list[tuple[int, int]], parts: dict[str, Any]
) -> None:
    images = [smooth_noise(*size) for size in sizes]
    text = (
        units.EDIT_PREFIX
        + "".join(units.NUMBERED_IMAGE.format(i) for i in sizes)
        + "红 <|im_end|>"
        + units.SUFFIX
    )
    made = parts["processor"](text, images, 4096)
    wanted = PublishedProcessor(parts["processor"])(
        text=[text], images=images, padding=True, return_tensors="pt"
    )
    assert made.keys() == wanted.keys()
    assert all(
        torch.equal(made[name], wanted[name].to(made[name].dtype)) for name in made
    )
    assert int(made["mm_token_type_ids"].sum()) * 4 == len(made["pixel_values"])


def test_a_prompt_that_speaks_of_more_images_than_there_are_is_refused(
    parts: dict[str, Any],
) -> None:
    given = {"prompt": "a <|image_pad|>", "resized_edit_images": [smooth_noise(64, 64)]}
    with pytest.raises(
        UsageError, match=r"prompt: the text has 2 <.image_pad.> for 1 images"
    ):
        MODEL.spec("edit").units[1].run(given, parts)


def test_images_that_fill_more_than_the_text_may_have_are_refused(
    parts: dict[str, Any],
) -> None:
    with pytest.raises(
        UsageError,
        match="images: have 16 tokens, but text and images together may have 10",
    ):
        parts["processor"](units.IMAGE, [smooth_noise(112, 112)], 10)


def test_a_processor_of_another_model_is_refused_by_name(parts: dict[str, Any]) -> None:
    class Bytes:
        name_or_path = "some/folder"

        def __call__(self, text: str) -> SimpleNamespace:
            return SimpleNamespace(input_ids=list(text.encode()))

    loaded = {**parts, "processor": SimpleNamespace(tokenizer=Bytes())}
    with pytest.raises(
        UsageError, match=r"processor some/folder: .* expected 64"
    ) as error:
        MODEL.spec("edit").units[1].run(
            {"prompt": "x", "resized_edit_images": [smooth_noise(64, 64)]}, loaded
        )
    assert "--processor_path" in str(error.value)


@pytest.mark.parametrize(
    ("parts", "sizes", "given"),
    [
        ("edit", [(200, 90)], {}),
        ("edit", [(64, 64)], {"height": 96, "width": 48}),
        ("edit-2509", [(120, 100)], {}),
        ("edit-2509", [(120, 100), (50, 90)], {"height": 64, "width": 80}),
        ("edit-2511", [(64, 64), (30, 90)], {}),
    ],
    indirect=["parts"],
    ids=[
        "edit",
        "edit at another size",
        "2509 with one image",
        "2509 with two",
        "2511 with two",
    ],
)
def test_every_step_equals_that_of_diffusers_with_the_same_image_tokens(
    parts: dict[str, Any],
    sizes: list[tuple[int, int]],
    given: dict[str, int],
    toy_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    variant = request.node.callspec.params["parts"]
    shrink(monkeypatch)
    images = [smooth_noise(*size, seed) for seed, size in enumerate(sizes)]
    last = units.resize(images[-1], PIXELS)
    shape = latent_shape_edit([last], **given)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    wanted: list[Tensor] = []
    pipe, passed = (
        Pipeline(
            MODEL.spec(variant),
            MODEL,
            {name: parts[name] for name in MODEL.spec(variant).components},
        ),
        [],
    )
    made = pipe(
        prompt=PROMPT,
        negative_prompt=NEGATIVE,
        edit_image=images if variant != "edit" else images[0],
        edit_pixels=PIXELS,
        **({"edit_text_pixels": TEXT_PIXELS} if variant != "edit" else {}),
        **given,
        guidance_scale=4.0,
        num_inference_steps=4,
        latents=noise,
        on_step=lambda i, latents: passed.append(latents),
    )

    tell_images_from_text(parts["text_encoder"], monkeypatch)
    image = published(variant, parts, toy_of(variant))(
        image=images if variant != "edit" else images[0],
        prompt=PROMPT,
        negative_prompt=NEGATIVE,
        true_cfg_scale=4.0,
        num_inference_steps=4,
        latents=pack(noise),
        callback_on_step_end=add_to(wanted),
        **given,
    ).images[0]
    assert_equal_steps([pack(latents) for latents in passed], wanted, 4)
    assert made.size == image.size
    assert np.abs(np.asarray(made, int) - np.asarray(image, int)).max() <= 1


@torch.no_grad()
def test_diffusers_alone_gives_images_the_positions_of_a_text_and_so_other_embeddings(
    parts: dict[str, Any],
    toy_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without `mm_token_type_ids` transformers 5 numbers the tokens of an image like
    words: the only difference.
    """
    seen = smooth_noise(112, 84)
    made = (
        MODEL.spec("edit")
        .units[1]
        .run({"prompt": PROMPT, "resized_edit_images": [seen]}, parts)["prompt_emb"]
    )
    encode = published("edit", parts, toy_of("edit")).encode_prompt
    alone, _ = encode([PROMPT], seen)
    assert made.shape == alone.shape
    assert (made - alone).abs().max() > 1e-2
    positions: list[Tensor] = []
    monkeypatch.setattr(
        parts["text_encoder"].model.language_model,
        "forward",
        lambda forward=parts["text_encoder"].model.language_model.forward, **given: (
            positions.append(given["position_ids"]),
            forward(**given),
        )[1],
    )
    assert torch.equal(encode([PROMPT], seen)[0], alone)
    tell_images_from_text(parts["text_encoder"], monkeypatch)
    assert torch.equal(encode([PROMPT], seen)[0], made)
    assert positions[0] is None
    where = slice(65, 65 + 12)  # the prefix, <|vision_start|>, then 3 rows of 4 tokens
    assert positions[1][1, 0, where].unique().numel() == 3
    assert positions[1][2, 0, where].unique().numel() == 4


@torch.no_grad()
@pytest.mark.parametrize("parts", ["edit", "edit-2511"], indirect=True)
def test_exact_timesteps_reach_every_token_and_those_of_images_are_at_zero_in_2511(
    parts: dict[str, Any],
) -> None:
    dit = parts["dit"].to(torch.bfloat16)
    seen: list[Tensor] = []
    handle = dit.time_text_embed.register_forward_hook(
        lambda _, arguments, output: seen.append(arguments[0])
    )
    latents, timestep = torch.randn(2, 16, 1, 8, 12), torch.tensor([500.0, 501.0])
    condition = {
        "prompt_emb": torch.randn(2, 5, 32).bfloat16(),
        "prompt_mask": torch.ones(2, 5, dtype=torch.bool),
    }
    with torch.autocast("cpu", torch.bfloat16):
        made = predict_edit(
            latents, timestep, **condition, edit_latents=[latents[..., :4]], dit=dit
        )
    handle.remove()
    assert made.shape == latents.shape
    zeros = [0.0, 0.0] if dit.zero_cond_t else []
    assert torch.equal(seen[0], torch.tensor([0.5, 0.501, *zeros]))


def test_an_image_is_made_in_the_size_of_the_last_one_given_by_default() -> None:
    images = [smooth_noise(64, 96), smooth_noise(128, 32)]
    assert latent_shape_edit(images) == (1, 16, 1, 4, 16)
    assert latent_shape_edit(images, height=64) == (1, 16, 1, 8, 16)
    assert latent_shape_edit(images, 64, 48) == (1, 16, 1, 8, 6)


@pytest.mark.parametrize("variant", ["base", *EDITS])
def test_a_published_model_id_means_its_variant(variant: str) -> None:
    for model_id in MODEL.model_ids[variant]:
        models = (
            ModelConfig(
                model_id=model_id, origin_file_pattern="transformer/*.safetensors"
            ),
        )
        assert choose_variant(MODEL, None, models) == variant


def test_columns_and_the_denoisers_configuration_tell_the_variant_of_local_files(
    toy_of: Callable[[str], Path],
) -> None:
    def chosen(toy: str, *columns: str) -> str:
        paths = [
            str(path)
            for path in sorted((toy_of(toy) / "transformer").glob("*.safetensors"))
        ]
        return choose_variant(
            MODEL, None, (ModelConfig(path=paths),), score_columns(columns, ())
        )

    assert chosen("base", "image", "prompt") == "base"
    assert chosen("edit-2511", "image", "prompt", "edit_image") == "edit-2511"
    with pytest.raises(UsageError, match="--variant: could be edit, edit-2509"):
        chosen("edit", "image", "prompt", "edit_image")


@pytest.mark.parametrize("count", [1, 2])
def test_lists_of_images_mean_edit_2509_for_local_files(
    count: int, toy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    smooth_noise(64, 32).save(tmp_path / "a.png")
    row: dict[str, Any] = {"image": "a.png", "prompt": "a dog"}
    row["edit_image"] = ["a.png"] * count
    (tmp_path / "metadata.json").write_text(json.dumps([row]))
    files = sorted(map(str, (toy_of("edit") / "transformer").glob("*.safetensors")))
    config = TrainConfig(
        model="qwen_image",
        model_paths=json.dumps([files]),
        dataset_base_path=tmp_path,
        output_path=tmp_path / "out",
    )
    assert resolve(config).spec.variant == "edit-2509"
    row["edit_image"] = "a.png"
    (tmp_path / "metadata.json").write_text(json.dumps([row]))
    with pytest.raises(UsageError, match="--variant: could be edit, edit-2509"):
        resolve(config)


def test_zero_cond_t_can_be_said_by_a_flag_where_the_configuration_does_not(
    toy_of: Callable[[str], Path],
) -> None:
    files = sorted((toy_of("edit-2509") / "transformer").glob("*.safetensors"))
    config = TrainConfig(
        model="qwen_image", model_paths=json.dumps([[str(file) for file in files]])
    )
    for options, wanted in (({}, False), ({"zero_cond_t": "True"}, True)):
        models = model_configs(replace(config, family_options=options), MODEL)
        assert find(MODEL, models, ("dit",)).configs["dit"]["zero_cond_t"] is wanted


@pytest.mark.parametrize("variant", EDITS)
def test_a_dataset_without_images_to_edit_is_refused_by_its_column(
    variant: str,
) -> None:
    with pytest.raises(UsageError, match="no column 'edit_image'"):
        make_plan(
            MODEL.spec(variant),
            frozenset({"prompt", "input_image", "height", "width"}),
            SFT,
            ("dit",),
        )
