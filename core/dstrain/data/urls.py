"""Files that a dataset names by URL: fetched once, kept whole under the digest of their
URL, and shown without secrets.
"""

import hashlib
import logging
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dstrain.console import URL, shown
from dstrain.errors import UsageError
from dstrain.storage import check_writable, replacing
from dstrain.storage.files import temporaries

ABANDONED = 24 * 3600.0
"""Seconds after its last byte from which an unfinished file is that of a dead run."""


def is_url(name: str) -> bool:
    """Return whether a name in the metadata is a URL of any kind."""
    return URL.match(name) is not None


@dataclass(frozen=True)
class UrlCache:
    """The folder of --url_cache, and when to give up on a server."""

    folder: Path
    read_timeout: float = 30.0
    """Seconds without a byte."""
    total_timeout: float = 1800.0
    """Seconds for a file."""
    max_bytes: int = 2**33
    """Of a file."""

    def fetch(self, url: str) -> Path:
        """Return the file that a URL names, fetched unless it is in the cache.

        Nothing is sent but the request, with the URL's own user and password; redirects
        are followed to http and https alone. Raises UsageError if the file cannot be
        fetched as a whole, and SystemFault if the folder cannot be written.
        """
        url = url.strip()
        suffix = Path(urlsplit(url).path).suffix.lower()
        if not re.fullmatch(r"\.[a-z0-9]{1,5}", suffix):
            suffix = ""
        path = self.folder / (hashlib.sha256(url.encode()).hexdigest() + suffix)
        if path.is_file() and not path.is_symlink():
            return path
        # Two threads may fetch one URL, for two columns: the last one wins, with the
        # same bytes.
        with replacing(path) as building, building.open("wb") as file:
            for chunk in self._chunks(url):
                file.write(chunk)
        return path

    def _chunks(self, url: str) -> Iterator[bytes]:
        """Yield the bytes of a file; raise UsageError unless all of them come."""
        import httpx2  # late: a dataset without URLs does not need it

        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs whole URLs
        deadline = time.monotonic() + self.total_timeout
        count = 0
        try:
            with httpx2.stream(
                "GET",
                url,
                headers={"User-Agent": "dstrain"},
                follow_redirects=True,
                timeout=self.read_timeout,
            ) as response:
                response.raise_for_status()
                for chunk in response.iter_bytes():
                    count += len(chunk)
                    if count > self.max_bytes:
                        raise ValueError(f"it has more than {self.max_bytes:,} bytes")
                    if time.monotonic() > deadline:
                        what = f"it took more than {self.total_timeout:g} seconds"
                        raise ValueError(what)
                    yield chunk
        except httpx2.HTTPStatusError as error:
            answer = f"{error.response.status_code} {error.response.reason_phrase}"
            raise _not_fetched(url, answer) from error
        except httpx2.InvalidURL as error:  # whose message may quote a password
            raise _not_fetched(url, "the URL is invalid") from error
        except (httpx2.HTTPError, ValueError) as error:
            raise _not_fetched(url, str(error)) from error


def _not_fetched(url: str, reason: str) -> UsageError:
    return UsageError(shown(url), f"cannot be downloaded: {reason}")


def remove_abandoned(folder: Path) -> None:
    """Make the cache folder, and remove unfinished files of dead runs; raise SystemFault."""
    check_writable(folder)
    for path in temporaries(folder):
        with suppress(OSError):  # its run may finish it just now
            if time.time() - path.stat().st_mtime > ABANDONED:
                path.unlink()
