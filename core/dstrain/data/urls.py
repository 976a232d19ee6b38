"""Files that a dataset names by URL: fetched once, kept whole under the digest of their
URL, and shown without secrets.
"""

import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from dstrain.console import shown
from dstrain.data.forms.form import URL, Content, Form
from dstrain.data.forms.source import refuse_unread
from dstrain.errors import DstrainError, UsageError
from dstrain.storage import check_writable, replacing
from dstrain.storage.files import temporaries

ABANDONED = 24 * 3600.0
"""Seconds after its last byte from which an unfinished file is that of a dead run."""


def fetch(url: str, forms: Sequence[Form]) -> Path:
    """Return the file that a URL names, fetched by a form unless it was kept.

    Raises UsageError if the file cannot be fetched as a whole, or no form opens it, and
    SystemFault if its folder cannot be written.
    """
    url = url.strip()
    # A form of some URLs comes before one of any.
    for form in sorted(forms, key=lambda one: URL in one.reads):
        content = form.open(url)
        if content is not None and form.keeps is not None:
            return _kept(url, content, form.keeps)
    refuse_unread(url, URL, forms)
    raise UsageError(url, "is a URL that no plugin opens")


def _kept(url: str, content: Content, folder: Path) -> Path:
    suffix = Path(urlsplit(url).path).suffix.lower()
    if not re.fullmatch(r"\.[a-z0-9]{1,5}", suffix):
        suffix = ""
    path = folder / (hashlib.sha256(url.encode()).hexdigest() + suffix)
    if path.is_file() and not path.is_symlink():
        return path
    # Two threads may fetch one URL, for two columns: the last one wins, with the
    # same bytes.
    with replacing(path) as building, building.open("wb") as file:
        for chunk in _chunks(url, content):
            file.write(chunk)
    return path


def _chunks(url: str, content: Content) -> Iterator[bytes]:
    """Yield the bytes of a file; raise UsageError unless all of them come."""
    try:
        yield from content.open()
    except DstrainError:
        raise
    except Exception as error:
        what = f"cannot be downloaded: {error}"
        raise UsageError(shown(url), what) from error


def remove_abandoned(folder: Path) -> None:
    """Make the folder of fetched files, and remove unfinished ones of dead runs; raise
    SystemFault.
    """
    check_writable(folder)
    for path in temporaries(folder):
        with suppress(OSError):  # its run may finish it just now
            if time.time() - path.stat().st_mtime > ABANDONED:
                path.unlink()
