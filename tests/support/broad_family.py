"""The tests' family with a column of every kind: `broad` trains as `tiny` does, and
reads more.
"""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from dstrain.graph.inputs import Column
from dstrain.graph.spec import PipelineSpec

from tests.support import family

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


def build(variant: str) -> PipelineSpec:
    """Wire `tiny` with more columns; nothing reads them, and they are checked all the
    same.
    """
    spec = family.build(variant)
    return replace(
        spec, family="broad", inputs=MappingProxyType({**spec.inputs, **COLUMNS})
    )


MODEL = replace(
    family.MODEL,
    name="broad",
    pipelines=f"{__name__}:build",
    variants=("base",),
    model_ids=MappingProxyType({}),
)


def install(site: Path) -> None:
    """Write the metadata of an installed distribution whose plugin is this family."""
    info = site / "plugin_broad-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: plugin-broad\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(
        "[dstrain.models]\nbroad = tests.support.broad_family:MODEL\n"
    )
