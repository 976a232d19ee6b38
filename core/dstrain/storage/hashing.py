"""Compute digests of files and of JSON data."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
