"""The VAE in tiles: both stages agree on it, unsplit and split train the same, only what the
VAE encodes is computed again, and inference takes it from the run.
"""

import csv
import re
from pathlib import Path
from typing import Any

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

from tests.support.noise_images import noise_image
from tests.support.toys import toy

SIDE = 64
TILES: dict[str, Any] = {"tiled": True, "tile_size": 32}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two images of four tiles each."""
    folder = tmp_path / "data"
    folder.mkdir()
    for seed, name in enumerate("ab"):
        noise_image(SIDE, SIDE, seed).save(folder / f"{name}.png")
    (folder / "metadata.csv").write_text("image,prompt\na.png,a dog\nb.png,a cat\n")
    return folder


def start(data: Path, task: str = "sft", **changes: Any) -> None:
    given: dict[str, Any] = {
        "variant": "base",
        "toy": True,
        "dataset_base_path": data,
        "output_path": data.parent / "out",
        "max_steps": 2,
    }
    given |= {} if task == "sft" else {"feature_cache": data.parent / "cache"}
    given |= {} if task.endswith("data_process") else {"lora_rank": 4}
    run(TrainConfig(model="qwen_image", task=task, **{**given, **changes}))


def losses(folder: Path) -> list[str]:
    with (folder / "logs/loss.csv").open() as file:
        return [row["loss"] for row in csv.DictReader(file)]


def test_tiles_are_a_part_of_what_is_cached(data: Path, tmp_path: Path) -> None:
    def values() -> set[str]:
        return set(FeatureCache.open(tmp_path / "cache"))

    start(data, "sft:data_process")
    plain = values()
    start(data, "sft:data_process", **TILES)
    # The latents of both images; their prompts are found again.
    assert len(values() - plain) == 2
    start(data, "sft:data_process", tile_stride=24, **TILES)
    assert len(values() - plain) == 2
    with pytest.raises(StateError, match="vae"):
        start(data, "sft:train", tiled=True)
    # Its own sides, spelled out.
    start(data, "sft:train", tile_stride=24, **TILES)
    start(data, output_path=tmp_path / "whole", **TILES)
    assert losses(tmp_path / "whole") == losses(tmp_path / "out")
    start(data, output_path=tmp_path / "plain")
    assert losses(tmp_path / "plain") != losses(tmp_path / "out")


def test_tiles_are_a_part_of_a_run_and_of_what_generates_by_it(
    data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    start(data, **TILES)
    with pytest.raises(StateError, match="tiled, tile_size"):
        start(data, max_steps=3, resume="auto")
    start(data, max_steps=3, resume="auto", tile_stride=24, **TILES)

    def image(**changes: Any) -> bytes:
        config = GenerateConfig(
            model="qwen_image",
            run=out,
            prompt="a dog",
            height=SIDE,
            width=SIDE,
            num_inference_steps=1,
            output=tmp_path / "image.png",
            overwrite=True,
            **changes,
        )
        generate(config)
        return (tmp_path / "image.png").read_bytes()

    of_the_run = image()
    assert image(**TILES) == of_the_run
    # One tile.
    assert image(tiled=True) != of_the_run
    with pytest.raises(UsageError, match=r"--tile_size: .* 8 "):
        image(tiled=True, tile_size=20)


def test_previews_are_decoded_in_tiles_in_stage_2_too(
    data: Path, tmp_path: Path
) -> None:
    given = {"preview_prompt": ("a dog",), "height": SIDE, "width": SIDE, **TILES}
    given["max_steps"] = 1
    start(data, "sft:data_process", **given)
    start(data, "sft:train", **given)
    start(data, output_path=tmp_path / "whole", **given)
    paths = sorted((tmp_path / "whole/previews").glob("*.png"))
    assert paths
    for path in paths:
        split = tmp_path / "out/previews" / path.name
        assert split.read_bytes() == path.read_bytes()


def test_a_script_asks_for_tiles_of_its_pipeline() -> None:
    folder = toy("qwen_image", "base")
    pipeline = Pipeline.from_pretrained(
        folder, variant="base", tiled=True, tile_size=64
    )
    vae = pipeline.components["vae"]
    assert vae.use_tiling
    assert (vae.tile_sample_min_height, vae.tile_sample_stride_width) == (64, 48)
    with pytest.raises(UsageError, match="tile_size"):
        Pipeline.from_pretrained(folder, variant="base", tiled=True, tile_size=20)


def test_a_dry_run_counts_tiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--model qwen_image --toy --task sft:data_process --dry_run"
    words += f" --device_memory 24 --height 128 --width 128 --feature_cache {tmp_path}"

    def encoding(flags: str) -> float:
        assert main(f"{words} {flags}".split()) == 0
        (line,) = re.findall(r"encoding +([\d.]+) MiB", capsys.readouterr().out)
        return float(line)

    assert encoding("--tiled --tile_size 16") < encoding("") / 2
