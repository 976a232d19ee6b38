"""Files that rows have in them: written once, each under the digest of its bytes, so that
they are files like any others.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from dstrain.data.forms.form import Content, Form
from dstrain.data.table import DIGEST, EMBEDDED_FILES
from dstrain.errors import DstrainError, UsageError
from dstrain.storage import check_writable, file_mark, hash_json, replacing, sha256
from dstrain.storage.hashing import package_digest
from dstrain.storage.user_cache import VARIABLE, user_cache

MOST_BYTES = 2**31
"""Bytes of an embedded file."""
LISTS = "lists"
"""Below it, the names of the files that rows had, for later runs."""
END = "null\n"
"""The last line of such a list, without which it is not whole."""
SUFFIX = re.compile(r"\.[a-z0-9]{1,5}")


def embedded_folder() -> Path:
    """Return the folder of embedded files; raises UsageError for a user without a home."""
    folder = user_cache()
    if folder is None:
        what = "is not set, and there is no home folder: embedded files need a place"
        raise UsageError(VARIABLE, what, f"set {VARIABLE} to a folder")
    return Path(os.path.realpath(folder)) / EMBEDDED_FILES


class Contents:
    """Writes embedded files to the user's folder of them."""

    def __init__(self) -> None:
        self.folder = embedded_folder()
        check_writable(self.folder)
        self._code_of = cache(package_digest)

    def keep(self, content: Content) -> str:
        """Return the path of the file with these bytes, which is written unless it is
        there; raises ValueError for a large one, and SystemFault.
        """
        if DIGEST.fullmatch(content.digest):
            known = self._path(content.digest, content.name)
            if known.is_file() and not known.is_symlink() and _is_whole(known):
                return str(known)
        data = b""
        for chunk in _chunks(content):
            data = data + chunk if data else chunk
            if len(data) > MOST_BYTES:
                raise ValueError(f"has a file of more than {MOST_BYTES:,} bytes")
        path = self._path(hashlib.sha256(data).hexdigest(), content.name)
        if not self._is_there(path, data):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(path, len(data)) as building:
                building.write_bytes(data)
        return str(path)

    def _path(self, digest: str, name: str) -> Path:
        suffix = PurePosixPath(name).suffix.lower()
        if not SUFFIX.fullmatch(suffix):
            suffix = ""
        # Many files in one folder are slow on some file systems.
        return self.folder / digest[:2] / f"{digest}{suffix}"

    def _is_there(self, path: Path, data: bytes) -> bool:
        try:
            is_link = path.is_symlink()
            return not is_link and path.stat().st_size == len(data) and _is_whole(path)
        except OSError:
            return False

    def recall(
        self, form: Form, file: Path, columns: Sequence[str]
    ) -> Iterator[Any] | None:
        """Return what `noting` noted of columns of a file; None if the file or the
        form has changed since, or a file that it names is gone.
        """
        path = self._list(form, file, columns)
        try:
            is_whole = all(map(self._are_there, _lines(path)))
        except (OSError, ValueError, TypeError):
            return None
        return _lines(path) if is_whole else None

    def noting(
        self,
        form: Form,
        file: Path,
        columns: Sequence[str],
        rows: Iterable[list[Any]],
    ) -> Iterator[list[Any]]:
        """Yield the rows, and note them when there are no more.

        Each has what these columns of a file have in a row: the path of an embedded file,
        the name of another one, '' for none, or a list of these.
        """
        path = self._list(form, file, columns)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as building, building.open("w", encoding="utf-8") as lines:
            for row in rows:
                lines.write(json.dumps(row) + "\n")
                yield row
            lines.write(END)

    def _list(self, form: Form, file: Path, columns: Sequence[str]) -> Path:
        facts = [os.path.realpath(file), file_mark(file), list(columns)]
        facts += [form.name, self._code_of(type(form).__module__)]
        return self.folder / LISTS / f"{hash_json('embedded files', facts)}.jsonl"

    def _are_there(self, row: list[Any]) -> bool:
        for cell in row:
            for name in cell if isinstance(cell, list) else [cell]:
                # Others are looked for in the folders of the dataset.
                is_own = name.startswith(os.path.join(self.folder, ""))
                if is_own and not _is_whole(Path(name)):
                    return False
        return True


def _chunks(content: Content) -> Iterator[bytes]:
    """Yield the bytes of a content; raise ValueError for one that is damaged."""
    try:
        yield from content.open()
    except (DstrainError, ValueError, OSError, MemoryError):
        raise
    except Exception as error:  # libraries say so by errors of any kind
        raise ValueError(f"cannot be read: {error}") from error


def _is_whole(path: Path) -> bool:
    """Return whether the bytes of an embedded file are those that its name says.

    Its size says little: a disk may lose what is in a file, and training would not see it.
    """
    return path.is_file() and sha256(path) == path.name.partition(".")[0]


def _lines(path: Path) -> Iterator[Any]:
    """Yield the rows of a list; raise ValueError at the end of one that is not whole."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line == END:
                return
            yield json.loads(line)
    raise ValueError("the list has no end")
