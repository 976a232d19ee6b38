"""Read a row: its cells, checked by themselves and against each other, then its samples, one
for each clip that its videos are cut into.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dstrain.console import number_of
from dstrain.data.buckets import TooSmall, cropped_share
from dstrain.data.cells import (
    Cell,
    ResampledVideo,
    TensorsInfo,
    check_mask_size,
    file_names,
    image_cell,
    mask_cell,
    read_literal,
    tensors_cell,
)
from dstrain.data.clips import FrameSampling
from dstrain.data.dataset import Variant
from dstrain.data.files import (
    FileInfos,
    Masked,
    find_masked,
    read_mask,
    refuse_transparent,
)
from dstrain.data.images import ImageInfo, Resolution, Size
from dstrain.data.table import Fault, RawValue
from dstrain.data.variants import AugmentationOptions, CaptionOptions, WeightedCaption
from dstrain.data.videos import Video
from dstrain.graph import Column, Constant, Input, MaskColumn, Measured

AS_WRITTEN = CaptionOptions()


@dataclass
class LoadedRow:
    """A row as it is loaded at one resolution."""

    cells: dict[str, Cell] = field(default_factory=dict)
    videos: dict[str, ResampledVideo] = field(default_factory=dict)
    blank: set[str] = field(default_factory=set)
    captions: dict[str, list[WeightedCaption]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    cropped: float = 0.0
    """The greatest share of one of its images that is cut off."""
    is_cropped: bool = False
    """Whether that is a pixel at least."""
    is_too_small: bool = False
    """Whether an image is too small for the buckets of this resolution."""

    @property
    def as_loaded(self) -> tuple[dict[str, Cell], dict[str, Size]]:
        """Return what differs between resolutions, if anything does: its cells, and the
        (height, width) at which its videos are loaded.
        """
        return self.cells, {name: video.size for name, video in self.videos.items()}

    def add(
        self,
        name: str,
        column: Column,
        found: Video | TensorsInfo | Sequence[ImageInfo],
        resolution: Resolution,
        masked: Masked | None,
    ) -> None:
        """Add what files hold; a video is cut into clips later.

        masked: For masks, what they are of, if the row has it.

        Raises ValueError that says what is wrong.
        """
        if isinstance(found, TensorsInfo):
            self.cells[name] = tensors_cell(column, found)
        elif isinstance(found, Video):
            size = None
            if masked is not None:
                check_mask_size(found.path, found.size, masked.own)
                size = masked.loaded
            video = ResampledVideo.of(column, resolution, found, size)
            self.videos[name] = video
            self._add_crop(video.video.size, video.size)
        else:
            if column.of:
                for image in found:
                    refuse_transparent(image)
            if masked is None:
                cell = image_cell(column, resolution, found)
            else:
                cell = mask_cell(column, found, masked.own, masked.loaded)
            self.cells[name] = cell
            for image, (_, *loaded) in zip(found, cell.shapes, strict=True):
                self._add_crop(image.size, (loaded[0], loaded[1]))

    def _add_crop(self, size: Size, loaded: Size) -> None:
        share = cropped_share(size, loaded)
        self.cropped = max(self.cropped, share)
        self.is_cropped |= share * max(loaded) >= 1


def read_row(
    number: int,
    values: Mapping[str, RawValue],
    columns: Mapping[str, Column],
    captions: Mapping[str, CaptionOptions],
    resolution: Resolution,
    files: FileInfos,
) -> LoadedRow:
    """Read the cells of a row as they are loaded at a resolution; what is wrong with one
    is among the row's faults.

    captions: How the inputs that are captions are read.
    """
    row = LoadedRow()
    for name, column in columns.items():
        value = values[column.name]
        try:
            options = captions.get(name)
            if options is not None and (
                isinstance(value, list) or options != AS_WRITTEN
            ):
                row.captions[name] = options.captions(value)
                value = row.captions[name][0][1]
            masked = None
            loaded = row.cells.get(column.of) or row.videos.get(column.of)
            if loaded is not None:
                masked = find_masked(values, columns[column.of], loaded, files)
            if isinstance(column, MaskColumn):
                mask = read_mask(values, column, masked, files)
                if mask is not None:
                    row.cells[name] = mask
                    continue
            elif not column.is_file:
                literal = read_literal(value, column)
                if literal is not None:
                    row.cells[name] = literal
                    continue
            elif found := _files_of(value, column, files):
                row.add(name, column, found, resolution, masked)
                continue
            row.blank.add(name)
        except ValueError as error:
            row.is_too_small |= isinstance(error, TooSmall)
            row.faults.append(Fault(number, column.name, str(error)))
    return row


def _files_of(
    value: RawValue, column: Column, files: FileInfos
) -> Video | TensorsInfo | list[ImageInfo]:
    """Return the files that a cell names; raise ValueError that says what is wrong."""
    images: list[ImageInfo] = []
    for name in file_names(value, column):
        file = files[name, column.file_type]
        if isinstance(file, str):
            raise ValueError(file)
        if isinstance(file, Video | TensorsInfo):
            return file
        images.append(file)
    return images


def inconsistencies(
    number: int, cells: Mapping[str, Cell], columns: Mapping[str, Column]
) -> Iterator[Fault]:
    """Yield what does not fit together in a row; what is blank or bad by itself is left to
    other checks.
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
    cell: Cell, column: Column, cells: Mapping[str, Cell], columns: Mapping[str, Column]
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


def _with_derived(
    cells: Mapping[str, Cell], inputs: Mapping[str, Input]
) -> dict[str, Cell]:
    """Return a sample with what no column gives: constants and measurements."""
    derived = dict(cells)
    for name, source in inputs.items():
        if isinstance(source, Constant):
            derived[name] = Cell(source.kind, source.value)
        elif isinstance(source, Measured) and source.of in cells:
            derived[name] = Cell("integer", cells[source.of].measured(source.axis))
    return derived


def variants_of(
    row: LoadedRow,
    cells: Mapping[str, Cell],
    inputs: Mapping[str, Input],
    augmentation: AugmentationOptions,
) -> list[Variant]:
    """Return the variants of a sample of a row: each caption with each view of its images."""
    variants: list[Variant] = []
    names = list(row.captions)
    views = [
        (
            share,
            _with_derived(
                {name: cell.seen(view) for name, cell in cells.items()}, inputs
            ),
        )
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
