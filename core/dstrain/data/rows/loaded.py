"""Read one row: each of its cells by itself, at the size at which it is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
from dstrain.data.files import (
    FileInfos,
    Masked,
    find_masked,
    read_mask,
    refuse_transparent,
)
from dstrain.data.images import ImageInfo, Resolution, Size
from dstrain.data.table import Fault, RawValue
from dstrain.data.variants.buckets import TooSmall, cropped_share
from dstrain.data.variants.captions import CaptionOptions, WeightedCaption
from dstrain.data.videos import Video
from dstrain.graph import Column, MaskColumn

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
        sizes = {name: video.size for name, video in self.videos.items()}
        return self.cells, sizes

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

    Args:
        number: The row's.
        values: Its values, by column.
        columns: The columns that are read, by input.
        captions: How the inputs that are captions are read.
        resolution: The size of its images and videos.
        files: What is known of its files.
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
