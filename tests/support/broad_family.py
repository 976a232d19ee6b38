"""The tests' family with a column of every kind: `broad` trains as `tiny` does, and
reads more.
"""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from dstrain import Frames
from dstrain.plugin import Column
from PIL import Image

from tests.support import family
from tests.support.fixtures import write_distribution

COLUMNS = MappingProxyType(
    {
        "edit_image": Column("edit_image", "images", multiple=8),
        "mask": Column("mask", "image", mode="L"),
        "clip": Column("clip", "video", multiple=8, frame_multiple=4, fps=15.0),
        "tags": Column("tags", "texts"),
        "seed": Column("seed", "integer"),
        "strength": Column("strength", "number"),
    }
)


def latent_shape(
    height: int,
    width: int,
    edit_image: list[Image.Image] | None = None,
    mask: Image.Image | None = None,
    clip: Frames | None = None,
    tags: list[str] | None = None,
    seed: int = 0,
    strength: float = 0.0,
) -> tuple[int, ...]:
    """That of `tiny`; training reads none of the other columns."""
    return family.latent_shape(height, width)


PIPELINES = {
    "base": replace(
        family.BASE, inputs={**family.BASE.inputs, **COLUMNS}, latent_shape=latent_shape
    )
}

MODEL = replace(
    family.MODEL,
    name="broad",
    pipelines=f"{__name__}:PIPELINES",
    variants=("base",),
    model_ids={},
)


def install(site: Path) -> None:
    """Write the metadata of an installed distribution whose plugin is this family."""
    write_distribution(site, "plugin-broad", {"broad": f"{__name__}:MODEL"})
