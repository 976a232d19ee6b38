"""The variants: their schedule, what they start from, and which one a model's files, a
dataset's columns and its cells are of.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import Pipeline, TrainConfig, UsageError
from dstrain.cli.main import main
from dstrain.models import find
from dstrain.models.naming import model_configs
from dstrain.pipeline import plan_inference
from dstrain_qwen_image import MODEL
from PIL import Image

from tests.support.noise_images import noise_image
from tests.support.toys import toy

TOLD = {"edit-2511": "edit-2511", "layered": "layered"}
"""Variant of a folder -> the one that it is loaded as, if it tells."""
PLAIN = ("base", "edit", "edit-2509", "in-context-control", "eligen", "inpaint")
TOLD |= dict.fromkeys(PLAIN, "base")


@pytest.mark.parametrize("variant", MODEL.variants)
def test_all_variants_but_layered_start_from_an_image(variant: str) -> None:
    spec = MODEL.spec(variant)
    given = {**dict.fromkeys(spec.inputs, ""), "denoising_strength": 0.5}
    if variant == "layered":
        with pytest.raises(UsageError, match="denoising_strength"):
            plan_inference(spec, given)
        return
    assert "input_image" in plan_inference(spec, given).plan.used_inputs


@pytest.mark.parametrize("variant", MODEL.variants)
def test_a_folder_tells_its_variant_or_is_for_a_prompt(variant: str) -> None:
    if variant in TOLD:
        told = Pipeline.from_pretrained(toy("qwen_image", variant)).spec.variant
        assert told == TOLD[variant]
        return
    with pytest.raises(UsageError, match="variant") as error:
        Pipeline.from_pretrained(toy("qwen_image", variant))
    assert variant in str(error.value)


def transformer(variant: str) -> str:
    """Return --model_paths of a toy's transformer alone."""
    folder = toy("qwen_image", variant) / "transformer"
    return json.dumps([sorted(map(str, folder.glob("*.safetensors")))])


@pytest.mark.parametrize(
    ("files", "images", "variant"),
    [
        ("edit", None, "base"),
        ("edit", ["a.png"], ""),
        ("edit", "a.png", ""),
        ("edit-2511", "a.png", "edit-2511"),
    ],
)
def test_columns_and_the_denoisers_configuration_tell_the_variant_of_local_files(
    files: str,
    images: Any,
    variant: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    noise_image(64, 32).save(tmp_path / "a.png")
    row: dict[str, Any] = {"image": "a.png", "prompt": "a dog"}
    row |= {"edit_image": images} if images else {}
    (tmp_path / "metadata.json").write_text(json.dumps([row]))
    words = ["graph", "--model", "qwen_image", "--model_paths", transformer(files)]
    code = main([*words, "--dataset_base_path", str(tmp_path)])
    said = capsys.readouterr()
    if variant:
        assert said.out.startswith(f"qwen_image {variant}, ")
    else:
        assert code == 2
        assert "--variant: could be edit, edit-2509" in said.err


def test_zero_cond_t_can_be_said_by_a_flag_where_the_configuration_does_not() -> None:
    config = TrainConfig(model="qwen_image", model_paths=transformer("edit-2509"))
    for options, wanted in (({}, False), ({"zero_cond_t": "True"}, True)):
        models = model_configs(replace(config, family_options=options), MODEL)
        assert find(MODEL, models, ("dit",)).configs["dit"]["zero_cond_t"] is wanted


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize(
    ("variant", "inputs"),
    [
        ("blockwise-controlnet", ["blockwise_controlnet_image=image.png"]),
        ("inpaint", ["input_image=image.png", "inpaint_mask=mask.png"]),
        (
            "eligen",
            [
                "eligen_entity_prompts=a dog",
                "eligen_entity_masks=mask.png",
                "eligen_entity_prompts=a cat",
                "eligen_entity_masks=mask.png",
            ],
        ),
    ],
)
def test_generate_takes_the_inputs_of_a_variant_from_files(
    variant: str, inputs: list[str]
) -> None:
    noise_image(64, 32).save("image.png")
    mask = Image.new("L", (64, 32))
    mask.paste(255, (29, 0, 64, 32))
    mask.save("mask.png")
    words = ["generate", "--model_id", str(toy("qwen_image", variant))]
    words += ["--variant", variant, "--prompt", "a dog beside a cat"]
    words += ["--height", "32", "--width", "64", "--num_inference_steps", "1"]
    words += ["--output", "new.png"]
    for one in inputs[:-1]:
        words += ["--input", one]
    assert main(words) == 2
    assert main([*words, "--input", inputs[-1]]) == 0
    with Image.open("new.png") as made:
        assert made.size == (64, 32)


@pytest.mark.parametrize(
    ("variant", "area"), [("edit", "edit_pixels"), ("edit-2509", "edit_text_pixels")]
)
def test_an_area_has_at_least_the_pixels_of_one_multiple(
    variant: str, area: str
) -> None:
    words = ["graph", "--model", "qwen_image", "--variant", variant, f"--{area}"]
    assert [main([*words, least]) for least in ("1024", "1023")] == [0, 2]
