"""Layered variants: stacks of transparent images, as many as a row has."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from dstrain import UsageError
from dstrain.cli.main import main
from PIL import Image

from tests.support.noise_images import noise_image
from tests.support.toys import toy


@pytest.fixture(autouse=True)
def rows(empty: Path) -> list[dict[str, Any]]:
    """Work in a folder with rows of one, two and three images, one with a context."""
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
    return rows


def layered(words: str) -> list[str]:
    """Return the words of a command on the toy."""
    folder = toy("qwen_image", "layered")
    model = f"--model qwen_image --model_id {folder} --variant layered"
    return [*words.split(), *model.split()]


TRAIN = "--dataset_base_path data --output_path out --batch_size 2 --max_steps 2"
EXTRA = "--extra_inputs layer_num,layer_input_image,context_image"
GENERATE = "generate --num_inference_steps 1 --height 32 --width 64 --prompt dog"
INPUTS = "--input layer_num=2 --input layer_input_image=data/3.png"


def test_rows_of_any_number_of_layers_train_and_previews_show_them_side_by_side() -> (
    None
):
    preview = "--preview_prompt dog --preview_steps 1"
    assert main(layered(f"{TRAIN} {EXTRA} {preview}")) == 0
    (first, *_) = sorted(Path("out/previews").glob("*.png"))
    with Image.open(first) as made:
        assert (made.mode, made.size) == ("RGBA", (5 * 64, 32))
        assert made.crop((4 * 64, 0, 5 * 64, 32)).getbbox() is not None


def test_rows_with_another_number_of_layers_are_all_named_before_anything_is_loaded(
    rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    rows[0]["layer_num"] = 2
    rows[3]["layer_num"] = 1
    Path("data/metadata.json").write_text(json.dumps(rows))
    code = main(layered(f"{TRAIN} {EXTRA}"))
    assert code == UsageError.exit_code
    places = re.findall(r"metadata\.json:(\d+):image: ", capsys.readouterr().err)
    assert places == ["1", "4"]
    assert not Path("out").exists()


def test_each_layer_is_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    words = layered(f"{GENERATE} {INPUTS} --output made/dog[1].png")
    assert main(words) == 0
    names = ["dog[1]-1.png", "dog[1]-2.png", "dog[1].png"]
    assert sorted(one.name for one in Path("made").iterdir()) == names
    for name in names:
        with Image.open(f"made/{name}") as made:
            assert (made.mode, made.size) == ("RGBA", (64, 32))
    Path("made/dog[1].png").unlink()
    # Its layers are still there.
    assert main(words) == UsageError.exit_code
    assert "made/dog[1]-1.png" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
