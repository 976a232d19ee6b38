"""Layered variants: stacks of transparent images, as many as a row has."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import InputError, ModelConfig, UsageError
from dstrain.cli.main import main
from dstrain.pipeline import choose_variant
from dstrain.plugin import Unit
from dstrain_qwen_image import MODEL, layers
from dstrain_qwen_image.toy import write
from PIL import Image

from tests.support.noise_images import noise_image

LAYERED = "Qwen/Qwen-Image-Layered"
LAYERS = Unit(layers.encode_layers)


@torch.no_grad()
def test_the_whole_image_and_its_layers_are_frames_encoded_one_by_one(
    components_of: Callable[[str], dict[str, Any]],
) -> None:
    loaded = components_of("layered")
    images = [noise_image(48, 32, seed, 4) for seed in range(3)]
    made = LAYERS.run({"input_image": images, "layer_num": 2}, loaded)["input_latents"]
    assert made.shape == (1, 16, 3, 4, 6)
    for frame, image in zip(made.split(1, dim=2), images, strict=True):
        alone = LAYERS.run({"input_image": [image]}, loaded)["input_latents"]
        assert torch.equal(frame, alone)


def test_a_wrong_number_of_layers_or_sizes_that_differ_are_refused(
    components_of: Callable[[str], dict[str, Any]],
) -> None:
    loaded = components_of("layered")
    images = [noise_image(48, 32, 0, 4), noise_image(48, 32, 1, 4)]
    with pytest.raises(
        InputError, match="layer_num: is 2, and the number of images is 2"
    ):
        LAYERS.run({"input_image": images, "layer_num": 2}, loaded)
    with pytest.raises(InputError, match=r"image: .* differ in size"):
        LAYERS.run({"input_image": [images[0], noise_image(32, 32, 0, 4)]}, loaded)


@pytest.mark.parametrize("model_id", MODEL.model_ids["layered"])
def test_a_published_model_id_means_the_variant(model_id: str) -> None:
    models = (ModelConfig(None, model_id, "transformer/*.safetensors"),)
    assert choose_variant(MODEL, None, models) == "layered"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a toy, and rows of one, two and three images, one with a context."""
    monkeypatch.chdir(tmp_path)
    write(Path("toy"), "layered")
    data = Path("data")
    data.mkdir()
    for name in range(4):
        noise_image(64, 32, name, 4).save(data / f"{name}.png")
    rows: list[dict[str, Any]] = []
    for count in (1, 2, 2, 3):
        row = {"image": [f"{n}.png" for n in range(count)], "prompt": "a dog"}
        rows.append({**row, "layer_num": count - 1, "layer_input_image": "3.png"})
    rows[1]["context_image"] = "2.png"
    (data / "metadata.json").write_text(json.dumps(rows))
    return tmp_path


WORDS = ["--model", "qwen_image", "--model_id", "toy", "--variant", "layered"]
TRAIN = ["--dataset_base_path", "data", "--output_path", "out", "--batch_size", "2"]
EXTRA = ["--extra_inputs", "layer_num,layer_input_image,context_image"]


@pytest.mark.usefixtures("project")
def test_rows_of_any_number_of_layers_train_and_previews_show_them_side_by_side() -> (
    None
):
    preview = ["--preview_prompt", "a dog", "--preview_steps", "1"]
    assert main([*WORDS, *TRAIN, *EXTRA, *preview, "--max_steps", "2"]) == 0
    (first, *_) = sorted(Path("out/previews").glob("*.png"))
    with Image.open(first) as made:
        assert (made.mode, made.size) == ("RGBA", (5 * 64, 32))


@pytest.mark.usefixtures("project")
def test_rows_with_another_number_of_layers_are_all_named_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = Path("data/metadata.json")
    rows = json.loads(path.read_text())
    rows[0]["layer_num"] = 2
    rows[3]["layer_num"] = 1
    path.write_text(json.dumps(rows))
    code = main([*WORDS, *TRAIN, *EXTRA, "--max_steps", "1"])
    said = capsys.readouterr().err
    assert code == UsageError.exit_code
    assert "metadata.json:1:image: has 1 entry, and layer_num is 2" in said
    assert "metadata.json:4:image: has 3 entries, and layer_num is 1" in said
    assert not Path("out").exists()


@pytest.mark.usefixtures("project")
def test_each_layer_is_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", *WORDS, "--prompt", "a dog", "--num_inference_steps", "1"]
    words += ["--height", "32", "--width", "64", "--input", "layer_num=2"]
    words += ["--input", "layer_input_image=data/3.png"]
    assert main([*words, "--output", "made/dog.png"]) == 0
    assert capsys.readouterr().out.count("wrote") == 3
    for name in ("dog", "dog-1", "dog-2"):
        with Image.open(f"made/{name}.png") as made:
            assert (made.mode, made.size) == ("RGBA", (64, 32))
    Path("made/dog.png").unlink()
    # Its layers are still there.
    assert main([*words, "--output", "made/dog.png"]) == UsageError.exit_code
    assert "made/dog-1.png already exists" in capsys.readouterr().err
    assert main([*words, "--output", "made/dog.png", "--overwrite"]) == 0


@pytest.mark.usefixtures("project")
def test_a_dataset_of_layers_is_not_generated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("prompts.csv").write_text("prompt\na dog\n")
    words = ["generate", *WORDS, "--dataset", "prompts.csv", "--output", "made"]
    assert (
        main([*words, "--input", "layer_input_image=data/3.png"])
        == UsageError.exit_code
    )
    assert "layered generates several images for a row" in capsys.readouterr().err
