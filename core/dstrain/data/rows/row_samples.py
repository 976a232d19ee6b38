"""Make the samples of a row: one, or one for each clip that its videos are cut into."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from dstrain.data.cells import Cell, ResampledVideo
from dstrain.data.clips import FrameSampling
from dstrain.data.dataset import Variant
from dstrain.data.rows.loaded import LoadedRow
from dstrain.data.table import Fault
from dstrain.data.variants.views import NO_AUGMENTATION, AugmentationOptions
from dstrain.graph import Column, Constant, Input, Measured


def clips_of(
    videos: Mapping[str, ResampledVideo], sampling: FrameSampling
) -> Iterator[dict[str, Cell]]:
    """Yield the clips of each sample of a row; one sample without clips if it has no
    videos.

    All videos of a row are cut at the same places, as far as the shortest one goes: that
    gives fewer clips, none of which is shorter (`short_videos`).
    """
    if not videos:
        yield {}
        return
    total = min(len(video.frame_indices) for video in videos.values())
    multiples = [video.column.frame_multiple or 1 for video in videos.values()]
    for clip in sampling.clips(total, math.lcm(*multiples)):
        yield {name: video.cell(clip) for name, video in videos.items()}


def distinct(samples: Iterable[dict[str, Cell]]) -> Iterator[dict[str, Cell]]:
    """Yield each set of clips once: those of a video with fewer frames per second than
    are wanted may show the same.
    """
    # By hash: a long video has thousands of clips. The rest of their cells is the same.
    seen: set[tuple[Any, ...]] = set()
    for clips in samples:
        shown = tuple((cell.files, cell.parameters) for cell in clips.values())
        if shown not in seen:
            seen.add(shown)
            yield clips


def too_short(
    number: int, clips: Mapping[str, Cell], columns: Mapping[str, Column]
) -> Iterator[Fault]:
    """Yield the clips of a sample that have too few frames to train on."""
    frames = max((cell.shapes[0][0] for cell in clips.values()), default=0)
    for name in clips:
        if frames < columns[name].least_frames:
            reason = f"gives {frames} frame, which is {name}: nothing is left to train"
            yield Fault(number, columns[name].name, reason)


def derived_cells(
    cells: Mapping[str, Cell], inputs: Mapping[str, Input]
) -> dict[str, Cell]:
    """Return the inputs of a sample that no column gives: constants and measurements."""
    derived: dict[str, Cell] = {}
    for name, source in inputs.items():
        if isinstance(source, Constant):
            derived[name] = Cell(source.kind, source.value)
        elif isinstance(source, Measured) and source.of in cells:
            frames, height, width = cells[source.of].shapes[0]
            axes = {"height": height, "width": width, "frames": frames}
            derived[name] = Cell("integer", axes[source.axis])
    return derived


def variants_of(
    row: LoadedRow, cells: Mapping[str, Cell], augmentation: AugmentationOptions
) -> list[Variant]:
    """Return the variants of a sample of a row: each caption with each view of its images.

    Args:
        row: The row.
        cells: Those of the sample.
        augmentation: The views.
    """
    if not row.captions and augmentation == NO_AUGMENTATION:
        return [(1, cells)]
    variants: list[Variant] = []
    names = list(row.captions)
    views = [
        (share, {name: cell.seen(view) for name, cell in cells.items()})
        for share, view in augmentation.views(row.is_cropped)
    ]
    for captions in itertools.product(*row.captions.values()):
        weight = math.prod(weight for weight, _ in captions)
        texts = {
            name: replace(cells[name], literal=text)
            for name, (_, text) in zip(names, captions, strict=True)
            if name in cells
        }
        variants += [(weight * share, {**view, **texts}) for share, view in views]
    return variants
