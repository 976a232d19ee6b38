"""Compute digests of files and of JSON data."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from dstrain.console import get_logger

KEY_BYTES = 20
FileMark = list[int]
"""What changes with a file: size, times of content and entry in nanoseconds, inode."""
MARK_LENGTH = 4
_encode = json.JSONEncoder(
    sort_keys=True, ensure_ascii=False, separators=(",", ":")
).encode


def sha256(path: Path) -> str:
    """Return the sha256 of the file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_json(kind: str, content: Any) -> str:
    """Return the hash of JSON data of one kind, in hexadecimal."""
    return hash_text(json_text(kind, content))


def json_text(kind: str, content: Any) -> str:
    """Return the text of JSON data of one kind, of which `hash_json` is the hash."""
    return _encode([kind, content])


def hash_text(text: str) -> str:
    """Return the hash of a text, in hexadecimal."""
    # Names of files need not be UTF-8: their other bytes are halves of surrogate pairs.
    data = text.encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=KEY_BYTES).hexdigest()


def package_digest(module: str) -> str:
    """Return the hash of the source code of a module's whole top-level package."""
    spec = None
    with suppress(ValueError):  # no name, or a script's
        spec = find_spec(module.partition(".")[0])
    # A plugin may be a single module.
    places = spec and (spec.submodule_search_locations or [str(spec.origin)])
    digest = hashlib.blake2b()
    for place in map(Path, places or ()):
        for path in sorted(place.rglob("*.py")) or [place]:
            digest.update(path.relative_to(place).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def file_mark(path: str | Path) -> FileMark:
    """Return the mark of a file; raises OSError."""
    stat = Path(path).stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def files_in(paths: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Yield each file with its path relative to its folder ('' for a file itself).

    Hidden files in folders are left out.
    """
    for path in paths:
        if not path.is_dir():
            yield "", path
            continue
        for file in sorted(path.rglob("*")):
            place = file.relative_to(path)
            hidden = any(part.startswith(".") for part in place.parts)
            if file.is_file() and not hidden:
                yield place.as_posix(), file


logger = get_logger(__name__)
READERS = 16
"""Threads that look at files: more than processors, since they wait for a disk."""
FILES_PER_TASK = 512
LONG_READ = 2**30
"""Bytes that take a second or more to read, so that this is said."""
RecordedFile = tuple[str, Sequence[Any]]
"""A path, and what `Digests.record` returned of the file when it was recorded."""


def first_changed(files: Iterable[RecordedFile]) -> str | None:
    """Return the first file whose content is not the recorded one; a file that is not
    there is passed over.

    Raises OSError for a file that cannot be read.
    """
    remaining = iter(files)
    parts = iter(lambda: list(islice(remaining, FILES_PER_TASK)), [])
    touched: list[tuple[str, str]] = []
    with ThreadPoolExecutor(READERS) as threads:
        for part in threads.map(_touched, parts):
            for path, digest in part:
                if not digest:
                    return path
                touched.append((path, digest))
        size = sum(Path(path).stat().st_size for path, _ in touched)
        if size >= LONG_READ:
            changed = (
                f"files whose times are not those recorded, such as {touched[0][0]}"
            )
            logger.info(f"comparing {size / 2**30:.1f} GiB of {changed}")
        digests = threads.map(sha256, [Path(path) for path, _ in touched])
        for (path, recorded), digest in zip(touched, digests, strict=True):
            if digest != recorded:
                threads.shutdown(cancel_futures=True)
                return path
    return None


def _touched(files: Iterable[RecordedFile]) -> list[tuple[str, str]]:
    """Return the files whose mark is not the recorded one, each with its recorded
    sha256; with '' if another size says enough.
    """
    found = []
    for path, (*recorded, digest) in files:
        if not os.path.isfile(path):
            continue
        mark = file_mark(path)
        size, modified, changed, inode = map(int.__eq__, mark, recorded)
        # A copy keeps no more than the time of the content. But where one inode was
        # changed since, that time may have been set back.
        if not size:
            found.append((path, ""))
        elif not modified or (inode and not changed):
            found.append((path, digest))
    return found
