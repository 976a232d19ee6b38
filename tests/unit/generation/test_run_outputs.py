"""The file of `dstrain generate`: what is there stays, and a PNG says what it was
generated from.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from dstrain import GenerateConfig, Pipeline, UsageError, generate
from dstrain.config import LoraFile
from PIL import Image

from tests.support.family import weights_of
from tests.support.runs import project, train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


def config(here: Path, output: Path, **changes: Any) -> GenerateConfig:
    given = {
        "model": "tiny",
        "variant": "base",
        "model_paths": json.dumps(list(weights_of(here / "model").values())),
        "prompt": "dog",
        "num_inference_steps": 1,
    }
    return GenerateConfig(output=output, **{**given, **changes})


def texts(path: Path) -> dict[str, str]:
    with Image.open(path) as image:
        return dict(getattr(image, "text", {}))


def test_a_file_that_is_there_is_replaced_only_if_asked_for(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "a.png"
    generate(config(here, output))
    before = output.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(UsageError) as caught:
        patch.delattr(Pipeline, "from_found")  # nothing is loaded
        generate(config(here, output, prompt="cat"))
    assert caught.value.where == "--output"
    assert caught.value.what == f"{output} already exists and was not modified"
    assert "--overwrite" in caught.value.help_lines[0]
    assert output.read_bytes() == before
    generate(config(here, output, prompt="cat", overwrite=True))
    assert output.read_bytes() != before
    dangling = tmp_path / "b.png"
    dangling.symlink_to(tmp_path / "elsewhere" / "b.png")
    with pytest.raises(UsageError, match=r"b\.png already exists"):
        generate(config(here, dangling))
    assert dangling.is_symlink()


def test_a_png_says_what_it_was_generated_from(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "cactus-flower")
    lora = train(here, output_path=tmp_path / "out", max_steps=1, save_steps=1)
    prompt = "dög, 犬, cactus-flower \udcff"
    output = tmp_path / "a.png"
    given = {
        "prompt": prompt,
        "seed": 5,
        "lora": (LoraFile(lora / "step-1.safetensors", 0.5),),
    }
    generate(config(here, output, **given))
    assert texts(output) == {
        "prompt": "dög, 犬, *** ?",
        "seed": "5",
        "num_inference_steps": "1",
        "guidance_scale": "1",
        "model": "tiny base",
        "LoRA": "step-1.safetensors:0.5",
    }
    guided = {"guidance_scale": 2.5, "negative_prompt": "blurry"}
    generate(config(here, output, overwrite=True, **guided))
    found = texts(output)
    assert (found["guidance_scale"], found["negative_prompt"]) == ("2.5", "blurry")
    assert found["seed"] == "0" and "LoRA" not in found


def test_an_image_of_another_format_has_no_texts(here: Path, tmp_path: Path) -> None:
    generate(config(here, tmp_path / "a.webp"))
    assert texts(tmp_path / "a.webp") == {}
