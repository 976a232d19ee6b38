"""The VAE in tiles: both stages agree on it, unsplit and split train the same, only what the
VAE encodes is computed again, and inference takes it from the run.
"""

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain import (
    GenerateConfig,
    Pipeline,
    StateError,
    TrainConfig,
    UsageError,
    generate,
    run,
)
from dstrain.cache import FeatureCache
from dstrain.cli.main import main
from dstrain.models import write_toy
from dstrain.registry import load_family
from PIL import Image

SIDE = 64
TILES: dict[str, Any] = {"tiled": True, "tile_size": 32}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two images of four tiles each."""
    folder = tmp_path / "data"
    folder.mkdir()
    numbers = np.random.default_rng(0)
    for name in "ab":
        pixels = numbers.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    (folder / "metadata.csv").write_text("image,prompt\na.png,a dog\nb.png,a cat\n")
    return folder


def start(data: Path, task: str = "sft", **changes: Any) -> None:
    given: dict[str, Any] = {
        "model": "qwen_image",
        "variant": "base",
        "toy": True,
        "dataset_base_path": data,
        "feature_cache": None if task == "sft" else data.parent / "cache",
        "lora_rank": None if task.endswith("data_process") else 4,
        "output_path": data.parent / "out",
        "max_steps": 2,
    }
    if given["lora_rank"] is None:
        del given["lora_rank"]
    run(TrainConfig(task=task, **{**given, **changes}))


def losses(folder: Path) -> list[str]:
    with (folder / "logs/loss.csv").open() as file:
        return [row["loss"] for row in csv.DictReader(file)]


def test_tiles_are_a_part_of_what_is_trained_on(data: Path, tmp_path: Path) -> None:
    def values() -> set[str]:
        return set(FeatureCache.open(tmp_path / "cache"))

    start(data, "sft:data_process")
    plain = values()
    start(data, "sft:data_process", **TILES)
    # The latents of both images; their prompts are found again.
    assert len(values() - plain) == 2
    start(data, "sft:data_process", tile_stride=24, **TILES)
    assert len(values() - plain) == 2
    with pytest.raises(StateError, match="contains no plan") as caught:
        start(data, "sft:train", tiled=True)
    assert "tiles of vae" in caught.value.help_lines[0]
    # Its own sides, spelled out.
    start(data, "sft:train", tile_stride=24, **TILES)
    split = losses(tmp_path / "out")
    start(data, output_path=tmp_path / "whole", **TILES)
    assert losses(tmp_path / "whole") == split
    start(data, output_path=tmp_path / "plain")
    assert losses(tmp_path / "plain") != split
    with pytest.raises(StateError, match="had different settings") as caught:
        start(data, output_path=tmp_path / "whole", max_steps=3, resume="auto")
    assert "--tiled: saved True, this run False" in caught.value.help_lines[0]
    start(data, output_path=tmp_path / "whole", max_steps=3, resume="auto", tile_stride=24, **TILES)  # fmt: skip

    def image(**changes: Any) -> bytes:
        given: dict[str, Any] = {"model": "qwen_image", "run": tmp_path / "whole"}
        given |= {"prompt": "a dog", "height": SIDE, "width": SIDE}
        given |= {
            "num_inference_steps": 1,
            "output": tmp_path / "image.png",
            "overwrite": True,
        }
        generate(GenerateConfig(**{**given, **changes}))
        return (tmp_path / "image.png").read_bytes()

    of_the_run = image()
    assert image(**TILES) == of_the_run
    assert image(tiled=True) != of_the_run  # one tile
    with pytest.raises(UsageError, match="20 is not a multiple of the 8 pixels"):
        image(tiled=True, tile_size=20)


def test_previews_are_decoded_in_tiles_in_stage_2_too(
    data: Path, tmp_path: Path
) -> None:
    given = {"preview_prompt": ("a dog",), "height": SIDE, "width": SIDE, **TILES}
    given["max_steps"] = 1
    start(data, "sft:data_process", **given)
    start(data, "sft:train", **given)
    start(data, output_path=tmp_path / "whole", **given)
    images = {
        path.relative_to(tmp_path / "whole"): path.read_bytes()
        for path in (tmp_path / "whole/previews").rglob("*.png")
    }
    assert images
    for path, content in images.items():
        assert (tmp_path / "out" / path).read_bytes() == content


def test_a_script_asks_for_tiles_of_its_pipeline(tmp_path: Path) -> None:
    models = write_toy(load_family("qwen_image"), "base", tmp_path)
    pipeline = Pipeline.from_pretrained(
        "qwen_image", models, "base", tiled=True, tile_size=64
    )
    vae = pipeline.components["vae"]
    assert vae.use_tiling
    assert (vae.tile_sample_min_height, vae.tile_sample_stride_width) == (64, 48)
    with pytest.raises(UsageError, match="20 is not a multiple"):
        Pipeline.from_pretrained("qwen_image", models, "base", tiled=True, tile_size=20)


def test_a_dry_run_counts_tiles(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def encoding(*flags: str) -> float:
        words = "--model qwen_image --toy --task sft:data_process --dry_run --device_memory 24"
        size = [
            "--height",
            "128",
            "--width",
            "128",
            "--feature_cache",
            str(data.parent / "cache"),
        ]
        assert main([*words.split(), *size, *flags]) == 0
        (line,) = re.findall(r"encoding +([\d.]+) MiB", capsys.readouterr().out)
        return float(line)

    assert encoding("--tiled", "--tile_size", "16") < encoding() / 2
