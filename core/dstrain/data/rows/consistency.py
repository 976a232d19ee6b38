"""Check the cells of one row against each other, before anything is decoded."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from dstrain.console import number_of
from dstrain.data.cells import Cell, ResampledVideo
from dstrain.data.clips import FrameSampling
from dstrain.data.table import Fault
from dstrain.graph import Column, Input, Measured


def inconsistencies(
    number: int, cells: Mapping[str, Cell], columns: Mapping[str, Column]
) -> Iterator[Fault]:
    """Yield what does not fit together in a row; what is blank or bad by itself is left to
    other checks.

    Args:
        number: The row's.
        cells: The inputs that can be used.
        columns: Theirs, by name.
    """
    for name, cell in cells.items():
        column = columns[name]
        for reason in (
            _wrong_count(cell, column, cells, columns),
            _sizes(cell, column),
        ):
            if reason:
                yield Fault(number, column.name, reason)


def short_videos(
    number: int,
    videos: Mapping[str, ResampledVideo],
    inputs: Mapping[str, Input],
    sampling: FrameSampling,
) -> Iterator[Fault]:
    """Yield the videos of a row that have too few frames for the clips of the one that is
    learned, whose frames are measured; without that one, for those of the longest.

    Cut as far as all of them go, the clips would be shorter, and nothing would say so.

    Args:
        number: The row's.
        videos: Its videos that can be used, by their inputs.
        inputs: The variant's table of inputs.
        sampling: How they are cut.
    """
    multiples = [video.column.frame_multiple or 1 for video in videos.values()]
    frames = {name: len(video.frame_indices) for name, video in videos.items()}
    clips = {
        name: len(sampling.clips(count, math.lcm(*multiples))[0])
        for name, count in frames.items()
    }
    measured = [
        source.of
        for source in inputs.values()
        if isinstance(source, Measured) and source.axis == "frames"
    ]
    deciding = next((name for name in measured if name in clips), None)
    if deciding is None:
        deciding = max(clips, key=lambda name: clips[name], default="")
    for name, video in videos.items():
        if clips[name] < clips[deciding]:
            of = videos[deciding].column.name
            yield Fault(
                number,
                video.column.name,
                f"has {number_of(frames[name], 'frame')}, too few for the "
                f"{clips[deciding]} that are read of {of}",
            )


def _wrong_count(
    cell: Cell,
    column: Column,
    cells: Mapping[str, Cell],
    columns: Mapping[str, Column],
) -> str:
    """Say that a list has another number of entries than its column declares."""
    wanted = column.entries
    if wanted is None or wanted.of not in cells:
        return ""
    other = _value(cells[wanted.of])
    is_number = isinstance(other, int)
    expected = wanted.more + (other if is_number else len(other))
    found = len(_value(cell))
    if found == expected:
        return ""
    verb = "is" if is_number else "has"
    said = f"has {number_of(found, 'entry', 'entries')}, and {columns[wanted.of].name} {verb} "
    said += f"{expected - wanted.more}"
    return f"{said}: expected {number_of(expected, 'entry', 'entries')}"


def _sizes(cell: Cell, column: Column) -> str:
    """Say that the images of a list are loaded at several sizes where one is needed."""
    sizes = dict.fromkeys(shape[1:] for shape in cell.shapes)
    if not column.same_size or len(sizes) < 2:
        return ""
    several = ", ".join(f"{height} x {width}" for height, width in sizes)
    return f"has images of several sizes: {several} (height x width); expected one"


def _value(cell: Cell) -> Any:
    """Return the value of a cell, of files their names."""
    return cell.files or cell.literal
