"""Files that a dataset names: found inside its folders or fetched, and inspected by
their headers before a run.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from pathlib import Path, PurePosixPath
from stat import S_ISDIR, S_ISREG
from unicodedata import normalize

from dstrain.console import shell_word, shown
from dstrain.data.cells import Cell, ResampledVideo, TensorsInfo, file_names, mask_cell
from dstrain.data.faults import raise_system_fault
from dstrain.data.images import ImageInfo, Size, has_transparent_parts, read_header
from dstrain.data.table import (
    EMBEDDED,
    RawValue,
    is_embedded_file,
    is_url,
    unicode_forms,
)
from dstrain.data.tables.form import Form
from dstrain.data.tables.row_files import fetch
from dstrain.data.videos import Video, probe
from dstrain.errors import StateError, UsageError
from dstrain.graph import Column, MaskColumn
from dstrain.graph.inputs import FileType
from dstrain.storage import check_writable, file_mark, tensor_shapes
from dstrain.storage.temporaries import remove_leftovers

HEADER_READERS = 16
"""Threads that read headers: more than processors, since they wait for disk or network."""
ROWS_AT_ONCE = 2048
"""Rows whose files are inspected before the first of them is checked."""
FILES_PER_TASK = 32
MOST_REMEMBERED = 2**15
"""Images that are not inspected again where later rows name them."""


@dataclass(frozen=True)
class DataRoots:
    """The folders in which the files of a dataset lie, and what opens other files.

    Hard links are files like any other: nothing tells them apart.
    """

    folders: tuple[str, ...]
    """Real paths; relative names are looked for in each."""
    forms: tuple[Form, ...] = ()
    """The forms that fetch what has a URL."""
    names_in: Callable[[str], Mapping[str, str]] = field(
        default_factory=lambda: cache(_names_in), compare=False
    )
    """Lists a folder once, however many missing files are looked for in it."""

    @classmethod
    def of(
        cls, base: Path, roots: Iterable[Path], forms: Sequence[Form] = ()
    ) -> "DataRoots":
        """Return the roots that the dataset's flags name; raise UsageError for one that
        is not a folder.
        """
        flags = [("--dataset_base_path", base)]
        flags += [("--dataset_root", root) for root in roots]
        for flag, folder in flags:
            if not folder.is_dir():
                raise UsageError(flag, f"{folder} is not a folder")
        folders = tuple(dict.fromkeys(os.path.realpath(folder) for _, folder in flags))
        for form in forms:
            if form.keeps is not None:
                check_writable(form.keeps)
                remove_leftovers(form.keeps)
        return cls(folders, tuple(forms))

    def find(self, name: str) -> str:
        """Return the path of a file as it is named in one of the folders, links and all:
        what they lead to may change between the stages.

        Raises UsageError for one that lies outside the folders, or in two of them, and
        FileNotFoundError.
        """
        if is_url(name):
            return str(fetch(name, self.forms))
        for form in spellings(name):
            found: dict[str, str] = {}
            for folder in self.folders:
                joined = os.path.join(folder, form)
                path = real_path(joined)
                if not self.contains(path):
                    raise self._outside(name, path)
                if path not in found and _exists(joined):
                    found[path] = joined
            if len(found) > 1:
                raise UsageError(name, f"exists more than once: {' and '.join(found)}")
            if found:
                return next(iter(found.values()))
        raise FileNotFoundError(name)

    def lacks(self, name: str) -> bool:
        """Return whether a file is in none of the folders, or is still to be fetched."""
        if is_url(name):
            return any(form.keeps is not None for form in self.forms)
        places = (
            os.path.join(folder, form)
            for form in spellings(name)
            for folder in self.folders
        )
        return not any(map(os.path.exists, places))

    def contains(self, path: str) -> bool:
        """Return whether a real path is one of the folders or lies below one."""
        return any(
            os.path.join(path, "").startswith(os.path.join(folder, ""))
            for folder in self.folders
        )

    def nearest(self, name: str) -> str:
        """Return "; did you mean 'x'?" for a file in another letter case, or without
        the leading folders.
        """
        parts = PurePosixPath(spellings(name)[-1]).parts
        for start in range(len(parts)):
            for folder in self.folders:
                *above, name = parts[start:]
                parent = os.path.join(folder, *above)
                # A name may have thousands of folders, of which none is there: one look
                # tells, where its real path would take a look at each.
                if not os.path.isdir(parent):
                    continue
                parent = os.path.realpath(parent)
                if self.contains(parent):
                    names = self.names_in(parent)
                    if _folded(name) in names:
                        found = os.path.join(*above, names[_folded(name)])
                        return f"; did you mean {found!r}?"
        return ""

    def check_frames(self, folder: Path) -> None:
        """Raise UsageError if something in a folder of frames lies outside the roots.

        Call it before a frame is opened.
        """
        for frame in sorted(folder.iterdir()):
            path = real_path(frame)
            if not frame.name.startswith(".") and not self.contains(path):
                raise self._outside(str(frame), path)

    def _outside(self, name: str, path: str) -> UsageError:
        folders = "folder" if len(self.folders) == 1 else "folders"
        to = "" if path == name else f", to {path}"
        # A name that climbs may be a trick; a link is as the user made it.
        root, climbs = os.path.dirname(path), ".." in name.replace("\\", "/").split("/")
        if os.path.isdir(root) and not climbs:
            to += f"; --dataset_root {shell_word(root)} allows it"
        return UsageError(name, f"points outside the dataset's {folders}{to}")


def spellings(name: str) -> tuple[str, ...]:
    """Return the names under which a file is looked for: as it is written, as Windows
    means it, whose tables part folders with backslashes, and with accents joined and
    apart, as systems and archives write them.
    """
    ways = (name, name.replace("\\", "/"))
    return tuple(dict.fromkeys(form for one in ways for form in unicode_forms(one)))


def real_path(path: str | Path) -> str:
    """Return a path without links; raises SystemFault where the machine cannot say."""
    try:
        return os.path.realpath(path, strict=True)
    except OSError as error:
        raise_system_fault(path, error)
        return os.path.realpath(path)


def _exists(path: str) -> bool:
    """Return whether there is a file; unlike `os.path.exists`, raise SystemFault where
    the machine cannot say.
    """
    try:
        os.stat(path)
    except OSError as error:
        raise_system_fault(path, error)
        return False
    return True


def _folded(name: str) -> str:
    """Drop what file systems may write differently: letter case, and accents apart or
    joined.
    """
    return normalize("NFC", name).casefold()


def _names_in(folder: str) -> dict[str, str]:
    """Return the names in a folder by their folded form; none if there is no folder."""
    try:
        return {_folded(name): name for name in sorted(os.listdir(folder))}
    except OSError as error:
        raise_system_fault(folder, error)
        return {}


FileName = tuple[str, FileType]
"""A file as named in the metadata, and what it is read as."""
FileInfo = ImageInfo | Video | TensorsInfo | str
FileInfos = Mapping[FileName, FileInfo]
"""What each file was found to be, or what is wrong with it."""
Row = Mapping[str, RawValue]


class FileInspector:
    """Finds or fetches the files that rows name, and inspects them slice by slice."""

    def __init__(
        self,
        columns: Iterable[Column],
        base: Path,
        roots: Iterable[Path],
        forms: Sequence[Form] = (),
    ) -> None:
        """Begin; the folders are looked at when a row names a file."""
        self._columns = [column for column in columns if column.is_file]
        self._roots = cache(partial(DataRoots.of, base, roots, forms))
        # The least recently used first.
        self._known: dict[FileName, FileInfo] = {}
        self._weight = 0

    def with_files(self, rows: Iterable[Row]) -> Iterator[tuple[Row, FileInfos]]:
        """Yield each row with what its files, among others, were found to be.

        A file of several rows is inspected again only if many others were in between.
        """
        remaining = iter(rows)
        while part := list(islice(remaining, ROWS_AT_ONCE)):
            files = self._of(part)
            for row in part:
                yield row, files

    def _of(self, rows: Sequence[Row]) -> FileInfos:
        names: dict[FileName, None] = {}
        for column in self._columns:
            for row in rows:
                with suppress(ValueError):  # reported when its row is checked
                    for name in file_names(row[column.name], column):
                        names[name, column.file_type] = None
        new = [name for name in names if name not in self._known]
        if new:
            # Few in a task where there are few: they may be slow to fetch.
            size = max(1, min(FILES_PER_TASK, len(new) // (4 * HEADER_READERS)))
            parts = [new[start : start + size] for start in range(0, len(new), size)]
            inspect = partial(_inspect, self._roots())
            with ThreadPoolExecutor(HEADER_READERS) as threads:
                found = threads.map(lambda part: [*map(inspect, part)], parts)
                for part, infos in zip(parts, found, strict=True):
                    self._known |= zip(part, infos, strict=True)
                    self._weight += sum(map(_weight, infos))
        files = {name: self._known.pop(name) for name in names}
        self._known |= files
        while self._weight > MOST_REMEMBERED and self._known:
            self._weight -= _weight(self._known.pop(next(iter(self._known))))
        return files


def _weight(info: FileInfo) -> int:
    """Return how much of RAM is taken by what is known of a file, in images."""
    if isinstance(info, Video):
        return 1 + (len(info.timestamps) + 8 * len(info.files)) // 16
    return 1


def _inspect(roots: DataRoots, file: FileName) -> FileInfo:
    """Find a file and read its header; return what is wrong with it instead of raising."""
    name, file_type = file
    is_video = file_type == "video"
    named = EMBEDDED if is_embedded_file(name) else repr(shown(name))
    path: Path | None = None
    try:
        path = Path(roots.find(name))
        mode = path.stat().st_mode
        if is_video and S_ISDIR(mode):
            roots.check_frames(path)
        elif not S_ISREG(mode):
            return f"{shown(name)!r} is not a regular file"
        if is_video:
            return probe(path)
        mark = file_mark(path)
        if file_type == "tensors":
            return TensorsInfo(str(path), tensor_shapes(path), mark)
        size, has_alpha = read_header(path)
        return ImageInfo(str(path), size, mark, has_alpha)
    except FileNotFoundError:
        return f"no such file {name!r}{roots.nearest(name)}"
    except (UsageError, StateError) as error:
        is_frame = path is not None and error.where != str(path)
        frame = f": {Path(error.where).name}" if is_frame else ""
        return f"{named}{frame} {error.what}"
    except (OSError, ValueError) as error:
        raise_system_fault(path or name, error)
        reason = getattr(error, "strerror", None) or error
        return f"{named} cannot be read: {reason}"


@dataclass(frozen=True)
class Masked:
    """An image or a video that masks of the same row are of."""

    own: Size
    """Its (height, width)."""
    loaded: Size
    """The (height, width) at which it is loaded."""


def find_masked(
    values: Row, column: Column, loaded: Cell | ResampledVideo, files: FileInfos
) -> Masked:
    """Return the sizes of an image or a video of a row that can be used."""
    (name,) = file_names(values[column.name], column)
    own = files[name, column.file_type]
    assert isinstance(own, ImageInfo | Video)  # it is loaded
    if isinstance(loaded, Cell):
        _, height, width = loaded.shapes[0]
        return Masked(own.size, (height, width))
    return Masked(own.size, loaded.size)


def read_mask(
    values: Row, column: MaskColumn, masked: Masked | None, files: FileInfos
) -> Cell | None:
    """Return the mask of an image or a video for the loss, None if the row has none.

    masked: What is masked, None if it is absent or cannot be used.

    Raises ValueError that says what is wrong with the mask.
    """
    names = file_names(values[column.name], column)
    if not names:
        return None
    mask = files[names[0], "image"]
    is_alpha = column.mode == "RGBA"
    if isinstance(mask, str) and not is_alpha:
        raise ValueError(mask)
    if masked is None or not isinstance(mask, ImageInfo):
        return None
    if is_alpha and not mask.has_alpha:
        return None
    if not is_alpha:
        refuse_transparent(mask, ", or use --alpha_mask")
    return mask_cell(column, [mask], masked.own, masked.loaded)


def refuse_transparent(mask: ImageInfo, otherwise: str = "") -> None:
    """Raise ValueError for a mask with transparent parts: over white, they would count in
    full, and of a cut-out image everything would.

    otherwise: What else can be done than saving it without them.
    """
    if mask.has_alpha and has_transparent_parts(mask.path):
        raise ValueError(
            f"{Path(mask.path).name!r} has transparent parts, which a mask cannot have: "
            f"save it without{otherwise}"
        )
