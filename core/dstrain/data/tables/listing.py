"""List the images and videos of a folder with the files that have their captions, and read
these.
"""

import errno
import hashlib
import json
import os
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dstrain.data.faults import raise_system_fault
from dstrain.data.table import MAX_CELL_LENGTH, Table, text_fault, unicode_forms
from dstrain.data.tables.metadata import BOM, SUFFIXES as TABLES
from dstrain.data.tables.naming import main_column
from dstrain.errors import POINTER, SystemFault, UsageError
from dstrain.graph import Column, Input
from dstrain.storage import ManyFiles, read_limited
from dstrain.storage.file_memory import save_for_user, user_cache

CAPTIONS = (".txt", ".caption", ".json")
"""Endings of files with captions."""
KEYS = ("caption", "prompt", "text")
"""Where an object of json has the caption; of several, the texts must be equal."""
MAX_CAPTION = 4 * MAX_CELL_LENGTH


def read_caption(path: Path) -> str:
    """Return the caption in a file; '' if it has none.

    Of a .json file that is no object with a caption nothing is wrong: other programs write
    what they know of an image under its name. Raises ValueError that says what is wrong,
    UsageError for what is no file of this size, and OSError.
    """
    data = read_limited(path, MAX_CAPTION)
    if data.startswith(POINTER):
        raise UsageError(path, "is no caption")
    text = data.removeprefix(BOM).decode(errors="surrogateescape")
    if path.suffix.lower() == ".json":
        text = _in_json(text)
    if fault := text_fault(text):
        raise ValueError(fault)
    return as_caption(text)


def as_caption(text: str) -> str:
    """Return the caption that a text is: all of its lines, without blanks at its ends."""
    # As an editor shows it: a file from Windows is the caption of one from elsewhere.
    return text.replace("\r\n", "\n").strip()


def _in_json(text: str) -> str:
    """Return the caption in a text of json, '' if it has none; raise ValueError."""
    if not text.strip():
        return ""
    try:
        # Pairs, since a dict would hide a name that is written twice.
        pairs = json.loads(text, object_pairs_hook=tuple)
    except RecursionError as error:
        raise ValueError("is not valid JSON: is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from error
    if not isinstance(pairs, tuple):
        return ""
    names = [name for name, _ in pairs]
    content = {name: value for name, value in pairs if value is not None}
    for key in KEYS:
        if names.count(key) > 1:
            raise ValueError(f"has {key} twice")
        if not isinstance(content.get(key, ""), str):
            raise ValueError(f"has a {key} that is not text")
    found = [key for key in KEYS if key in content]
    if len({as_caption(content[key]) for key in found}) > 1:
        raise ValueError(f"has different texts in {' and '.join(found)}: leave one")
    return str(content[found[0]]) if found else ""


IMAGES = frozenset(
    {
        *(".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".jfif", ".pgm", ".png", ".pnm"),
        *(".ppm", ".tif", ".tiff", ".webp"),
    }
)
VIDEOS = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm"})
MEDIA = IMAGES | VIDEOS
LIVE = frozenset({".heic", ".heif"})
"""What a camera of Apple writes beside a movie of the same name."""
OF_ANOTHER = re.compile(r"(.+)(?:-masklabel|-condlabel|_mask|_control)", re.DOTALL)
"""The name of what belongs to the image that the group names: OneTrainer's masks and
control images, and usual names of both.
"""
OURS = (frozenset({b"run.json", b"logs/"}), frozenset({b"store.json", b"shards/"}))
"""What tells the folder of a run, and of a feature cache."""
OUR_FOLDERS = frozenset({b"logs/", b"plans/", b"previews/", b"shards/", b"states/"})
MEMORY = "caption_folders.npy"
"""Remembers the digests of folders for all runs of a user."""


@dataclass(frozen=True, slots=True)
class Medium:
    """An image or a video of a folder; names are relative to it, with '/'."""

    name: str
    captions: tuple[str, ...]
    """The files that may have its caption, those that count most first."""
    twins: tuple[str, ...]
    """Others, of the same name but its ending, whose caption it would be, too."""


def list_media(folder: Path, suffixes: Collection[str] = MEDIA) -> Iterator[Medium]:
    """Yield the images and videos in a folder and below it, in the order of the bytes of
    their names; what is hidden, belongs to another one, or is in the folder of a run or a
    feature cache is left out.

    Raises UsageError for a link to a folder, SystemFault for a folder that cannot be read.
    """
    yield from _list(folder, "", suffixes)


def _list(folder: Path, prefix: str, suffixes: Collection[str]) -> Iterator[Medium]:
    names = _without_ours(_names_in(folder / prefix if prefix else folder), prefix)
    for data in names:
        name = os.fsdecode(data)
        if name.endswith("/"):
            yield from _list(folder, prefix + name, suffixes)
            continue
        if _is_medium(names, name, suffixes):
            same = list(_of_stem(names, os.path.splitext(name)[0]))
            captions = [one for one in same if _ending(one) in CAPTIONS]
            captions.sort(key=lambda one: CAPTIONS.index(_ending(one)))
            twins = (one for one in same if _is_medium(names, one, suffixes))
            yield Medium(
                prefix + name,
                tuple(prefix + one for one in captions),
                tuple(prefix + one for one in twins if one != name),
            )


def left_out(folder: Path, inputs: Mapping[str, Input]) -> str:
    """Return a line with the number of files in a folder, and below it, that are not read
    for a variant with this table of inputs; '' if all are. Raises as `list_media`.
    """
    unread = list(_unread(folder, "", read_for(main_column(inputs, True))))
    # One that may be the table that is meant tells most.
    unread.sort(key=lambda name: _ending(name) not in TABLES)
    return _not_read("file", unread)


def beside_table(table: Table) -> str:
    """Return a line with the number of captioned files beside a table that are not in it,
    such as what was added after an earlier run wrote the table; '' for none.
    """
    names = [name for name in os.listdir(table.path.parent) if name[0] != "."]
    # Of .json, other programs write what they know of an image.
    captions = {
        os.path.splitext(one)[0] for one in names if _ending(one) in CAPTIONS[:2]
    }
    media = {name for name in names if _ending(name) in MEDIA}
    left = {name for name in media if os.path.splitext(name)[0] in captions}
    for row in table.rows if left else ():
        for value in row.values():
            for file in value if isinstance(value, list) else [value]:
                left.difference_update(unicode_forms(os.path.basename(file)))
    return _not_read("captioned file", sorted(left))


def _not_read(thing: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    are = f"1 {thing} is" if len(names) == 1 else f"{len(names)} {thing}s are"
    return f"{are} not read, such as {printable(names[0])}"


def _unread(folder: Path, prefix: str, suffixes: Collection[str]) -> Iterator[str]:
    names = _without_ours(_names_in(folder / prefix), prefix)
    for data in names:
        name = os.fsdecode(data)
        if name.endswith("/"):
            yield from _unread(folder, prefix + name, suffixes)
            continue
        read = [name]
        if _ending(name) in CAPTIONS:
            read += _of_stem(names, os.path.splitext(name)[0])
        if not any(_is_medium(names, one, suffixes) for one in read):
            yield prefix + name


def read_for(column: Column | None) -> Collection[str]:
    """Return the endings of the files that are read for a column: videos are none for
    one of images.
    """
    is_image = column is not None and not column.from_video
    return IMAGES if is_image else MEDIA


def printable(name: str) -> str:
    """Return the name of a file as it may stand in a line of a message."""
    return name if name.isprintable() else repr(name)


def _ending(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _is_medium(names: list[bytes], name: str, suffixes: Collection[str]) -> bool:
    """Return whether a file is an image or a video of its own among the sorted names of
    its folder.
    """
    return _ending(name) in suffixes and not _belongs_to_another(names, name)


def _without_ours(names: list[bytes], prefix: str) -> list[bytes]:
    """Return the names in a folder that may be data: of the folder of a run or of a feature
    cache none, or the user's own where a dataset and a run share a folder (`prefix` is '').
    """
    if not any({*ours} <= {*names} for ours in OURS):
        return names
    return [] if prefix else [one for one in names if one not in OUR_FOLDERS]


def _belongs_to_another(names: list[bytes], name: str) -> bool:
    """Return whether an image or a video is a part of another one among the sorted names
    of its folder: its mask, its control image, or the movie of a Live Photo.
    """
    stem, suffix = os.path.splitext(name)
    found = OF_ANOTHER.fullmatch(stem)
    if found is not None:
        whole, kinds = found[1], MEDIA | LIVE
    elif suffix.lower() == ".mov":
        whole, kinds = stem, IMAGES | LIVE
    else:
        return False
    others = {os.path.splitext(one)[1].lower() for one in _of_stem(names, whole)}
    # With a caption, an image may as well be the still of a movie that is meant.
    is_still = found is None and others.intersection(CAPTIONS) and not others & LIVE
    return bool(others & kinds) and not is_still


def _of_stem(names: list[bytes], stem: str) -> Iterator[str]:
    """Yield the names that are a stem, in any form, and an ending."""
    for form in unicode_forms(stem):
        start = os.fsencode(form) + b"."
        # Sorted, they are one after the other.
        for at in range(bisect_left(names, start), len(names)):
            if not names[at].startswith(start):
                break
            if b"." not in names[at][len(start) :]:
                yield os.fsdecode(names[at])


def _names_in(folder: Path) -> list[bytes]:
    """Return the names of files in a folder, and of folders with '/' at the end, sorted."""
    # There may be a million: bytes take half of what texts do that are sorted as bytes.
    names: list[bytes] = []
    try:
        with os.scandir(os.fsencode(folder)) as entries:
            for entry in entries:
                if entry.name.startswith(b"."):
                    continue
                if not _is_folder(entry):
                    names.append(entry.name)
                elif entry.is_symlink():
                    # It may lead anywhere, and around in a circle.
                    what = "is a link to a folder, which is not followed"
                    advice = "put the folder itself there, or move the link away"
                    raise UsageError(folder / os.fsdecode(entry.name), what, advice)
                else:
                    names.append(entry.name + b"/")
    except OSError as error:
        raise_system_fault(folder, error)
        raise SystemFault(folder, f"cannot be read: {error.strerror}") from error
    names.sort()
    return names


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        # A link that leads to itself is a bad row, if it is one.
        if error.errno == errno.ELOOP:
            return False
        raise


def _mark_of(folder: Path, roots: Sequence[Path]) -> list[int]:
    """Return one mark for the names of images and videos in a folder and for the files of
    their captions: as `file_mark` has it, with their number for a size, and a hash of all
    for an inode.
    """
    count = 0
    times = [0, 0]
    whole = hashlib.blake2b(digest_size=7)
    # They decide which links are followed.
    for path in roots:
        whole.update(os.fsencode(os.path.realpath(path)) + b"\0")
    root = os.path.join(folder, "")
    for medium in list_media(folder):
        parts = [medium.name]
        for name in medium.captions:
            count += 1
            try:
                stat = os.stat(root + name)
            except OSError:
                # Gone, or a broken link, which reading it finds out.
                parts.append(name)
                continue
            times[0] = max(times[0], stat.st_mtime_ns)
            times[1] = max(times[1], stat.st_ctime_ns)
            parts += [name, f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"]
            parts.append(str(stat.st_ino))
        whole.update(os.fsencode("\0".join(parts)) + b"\0\0")
    return [count, *times, int.from_bytes(whole.digest(), "big")]


def leads_out(path: Path, folders: Sequence[Path]) -> bool:
    """Return whether a file is a link to what is in none of the folders."""
    if not path.is_symlink():
        return False
    target = os.path.realpath(path)
    inside = (os.path.join(os.path.realpath(one), "") for one in folders)
    return not target.startswith(tuple(inside))


def folder_digest(folder: Path, roots: Sequence[Path] = ()) -> str:
    """Return the digest of the names of images and videos in a folder, and of the names
    and the bytes of the files with their captions.

    It does not change where the folder is copied or moved. Captions are read again only
    if a file has another mark; what is no caption file is not read. Raises as
    `list_media`.

    roots: Other folders that a link may lead to.
    """
    mark = _mark_of(folder, roots)
    memory = ManyFiles((user_cache() or Path(os.devnull)) / MEMORY)
    key = os.path.realpath(folder)
    found = memory.recall(key, mark)
    if found is None:
        whole = hashlib.sha256(b"folder of images and videos, form 1\0")
        for medium in list_media(folder):
            whole.update(os.fsencode(medium.name) + b"\0")
            for name in medium.captions:
                data = read_beside(folder, name, roots)
                digest = "" if data is None else hashlib.sha256(data).hexdigest()
                whole.update(os.fsencode(name) + b"\0" + digest.encode() + b"\0")
        found = whole.digest()
        memory.remember(key, mark, found)
        save_for_user(memory)
    return found.hex()


def read_beside(folder: Path, name: str, roots: Sequence[Path]) -> bytes | None:
    """Return the bytes of the file of a caption; None for what is not read as one: a pipe
    or a device, which may never end, a large file, and a link that leads out.
    """
    path = folder / name
    if leads_out(path, (folder, *roots)):
        return None
    try:
        return read_limited(path, MAX_CAPTION)
    except UsageError:
        return None
    except OSError as error:
        raise_system_fault(path, error)
        return None
