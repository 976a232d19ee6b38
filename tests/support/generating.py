"""What `dstrain generate` makes of a model of the family `tiny`."""

import csv
import json
from pathlib import Path
from typing import Any

from dstrain import GenerateConfig
from PIL import Image

from tests.support.family import weights_of


def generation(model: Path, output: Path, **changes: Any) -> GenerateConfig:
    """An image of a dog in one step, or a dataset, by the files of a model."""
    given = {
        "model": "tiny",
        "variant": "base",
        "model_paths": json.dumps(list(weights_of(model).values())),
        "num_inference_steps": 1,
    }
    if "dataset" not in changes:
        given["prompt"] = "dog"
    return GenerateConfig(output=output, **{**given, **changes})


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metadata.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def pixels(path: Path) -> bytes:
    with Image.open(path) as image:
        return image.tobytes()


def texts(path: Path) -> dict[str, str]:
    """What an image file says that it was generated from."""
    with Image.open(path) as image:
        return dict(getattr(image, "text", {}))
