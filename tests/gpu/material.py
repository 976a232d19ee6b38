"""Data sets of real images and videos, and toy models with the families' real
tokenizers.
"""

import csv
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.registry import load_family
from PIL import Image

QWEN_IDS = MappingProxyType(
    {
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
    }
)
"""Of the real tokenizer, as in config.json of Qwen2.5-VL."""
TOKENIZERS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "qwen_image": {"tokenizer": "qwen", "processor": "qwen"},
        "flux": {"tokenizer": "clip", "tokenizer_2": "t5"},
        "wan": {"tokenizer": "umt5"},
    }
)
"""Family -> folder of a model -> the real tokenizer that goes there."""


def write_model(family: str, variant: str, folder: Path, assets: Path) -> None:
    """Write a toy whose text encoders have the real vocabularies, and put the real
    tokenizers in its folders.
    """
    sizes: dict[str, dict[str, Any]] = {
        "flux": {
            "text_encoder_1": {
                "vocab_size": 49408,
                "bos_token_id": 49406,
                "eos_token_id": 49407,
            },
            "text_encoder_2": {"vocab_size": 32128},
        },
        "wan": {"text_encoder": {"vocab_size": 256384}},
    }.get(family, {})
    if family == "qwen_image":
        toy = import_module("dstrain_qwen_image.toy").TOY
        text = toy["networks"]["text_encoder"]["text_config"]
        sizes["text_encoder"] = {
            **QWEN_IDS,
            "text_config": {**text, "vocab_size": 152064},
        }
    load_family(family).load("toy")(folder, variant, 0, sizes)
    for place, name in TOKENIZERS[family].items():
        if (folder / place).is_dir():
            kept = {
                path.name for path in (folder / place).glob("preprocessor_config.json")
            }
            for path in (folder / place).iterdir():
                if path.name not in kept:
                    path.unlink()
            shutil.copytree(
                assets / "tokenizers" / name, folder / place, dirs_exist_ok=True
            )


def write_edits(
    folder: Path, assets: Path, column: str, count: int
) -> list[dict[str, str]]:
    """Write a dataset of emoji whose skin tone is changed: `column` is the image
    before, `image` the one after.
    """
    folder.mkdir(parents=True)
    rows: list[dict[str, str]] = []
    for before, after, words in _pairs(assets):
        if len(rows) < count:
            for name in (before, after):
                with Image.open(assets / "emoji" / f"{name}.webp") as image:
                    image.convert("RGBA").resize((64, 64)).save(folder / f"{name}.png")
            rows.append(
                {"image": f"{after}.png", column: f"{before}.png", "prompt": words}
            )
    _write_rows(folder, rows)
    return rows


def _pairs(assets: Path) -> Iterator[tuple[str, str, str]]:
    """Every emoji with a skin tone of its own, beside the same one without: (before,
    after, what changes).
    """
    for emoji in json.loads((assets / "emoji-names/data.json").read_text()):
        for toned in emoji.get("skins", ()):
            names = emoji["hexcode"].lower(), toned["hexcode"].lower()
            if all((assets / "emoji" / f"{name}.webp").is_file() for name in names):
                yield *names, f"change it to: {toned['label']}"


def write_videos(folder: Path, assets: Path, caption: str) -> None:
    """Write a dataset of the one video of cyclists."""
    folder.mkdir(parents=True)
    shutil.copy(assets / "videos/bikes.mp4", folder)
    _write_rows(folder, [{"video": "bikes.mp4", "prompt": caption}])


def _write_rows(folder: Path, rows: Sequence[Mapping[str, str]]) -> None:
    with (folder / "metadata.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_photos(folder: Path, assets: Path, count: int) -> set[tuple[int, int]]:
    """Copy photos, each with a file beside it that has its caption; return their sizes."""
    folder.mkdir()
    sizes = set()
    for path in sorted((assets / "photos").glob("*.[pj]*g")):
        with Image.open(path) as image:
            size = image.size
        if min(size) >= 64 and count:
            shutil.copy(path, folder)
            text = path.stem.replace("_", " ")
            (folder / path.name).with_suffix(".txt").write_text(f"a photo, {text}\n")
            sizes.add(size)
            count -= 1
    return sizes
