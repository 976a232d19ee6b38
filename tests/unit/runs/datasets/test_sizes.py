"""The lines that say at which sizes images are loaded."""

from pathlib import Path

from dstrain.data import Cell, Dataset, Table
from dstrain.data.dataset import CheckedSample
from dstrain.plugin import Column
from dstrain.runs.datasets.sizes import (
    GroupSize,
    group_sizes,
    only_size,
    size_lines,
)

COLUMNS = {"image": Column("image", "image"), "video": Column("video", "video")}


def test_the_size_of_a_group_is_that_of_its_largest_file() -> None:
    image = Cell("image", files=("a",), parameters=(("sizes", ((16, 32),)),))
    video = Cell(
        "video",
        files=("b",),
        parameters=(("sizes", ((8, 8),)), ("frames", tuple(range(9)))),
    )
    samples = [
        CheckedSample((0, 0), [(1, {"image": image}), (1, {"image": image})], 0.25),
        CheckedSample((1, 0), [(1, {"video": video, "image": image})]),
        CheckedSample((2, 0), [(1, {"image": image})], 0.75),
    ]
    table = Table(Path("a.csv"), ("image",), ({},) * 3, ())
    sizes = group_sizes(Dataset.of(table, samples, COLUMNS))
    assert sizes == [GroupSize("16 x 32", 2, 0.5), GroupSize("9 frames of 8 x 8", 1, 0)]


def test_each_size_has_a_line_with_what_all_its_groups_have() -> None:
    sizes = [
        GroupSize("64 x 64", 5, 0.0),
        GroupSize("32 x 96", 6, 0.1),
        GroupSize("32 x 96", 3, 0.4),
    ]
    assert size_lines(sizes, 4) == [
        "2 sizes (height x width), batches of up to 4:",
        "    32 x 96: 9 samples, 3 batches, 20.0% cropped away",
        "    64 x 64: 5 samples, 2 batches, 0.0% cropped away",
        "    in all: 14 samples, 5 batches, 12.9% cropped away",
    ]
    assert size_lines(sizes, None)[1] == "    32 x 96: 9 samples, 20.0% cropped away"


def test_one_size_of_which_nothing_is_cropped_needs_no_word() -> None:
    assert size_lines([GroupSize("64 x 64", 5, 0.0)] * 2, 4) == []
    assert size_lines([], 4) == []
    # Nothing is left of a group that is held out.
    sizes = [GroupSize("64 x 64", 5, 0.0), GroupSize("32 x 32", 0, 0.3)]
    assert size_lines(sizes, 4) == []


def test_of_many_sizes_the_most_frequent_are_listed() -> None:
    lines = size_lines([GroupSize(f"{n} x 8", n, 0.0) for n in range(1, 41)], None)
    assert len(lines) == 33
    assert lines[1].startswith("    40 x 8: 40 samples")
    assert lines[-2:] == [
        "    and 10 other sizes",
        "    in all: 820 samples, 0.0% cropped away",
    ]


def test_the_only_size_is_that_of_all_samples() -> None:
    image = GroupSize("16 x 24", 3, 0.0)
    assert only_size([image, GroupSize("", 2, 0.0), image]) == (1, 16, 24)
    assert only_size([GroupSize("5 frames of 16 x 24", 1, 0.0)]) == (5, 16, 24)
    assert only_size([image, GroupSize("24 x 16", 1, 0.0)]) is None
    assert only_size([image, GroupSize("24 x 16", 0, 0.0)]) == (1, 16, 24)
    assert only_size([]) is None
