"""Files that a data set names by URL: fetched once, kept whole under the digest of
their URL, shown without secrets.
"""

import base64
import hashlib
import http.client
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.console import _URL, shown
from dstrain.errors import SystemFault, UsageError
from dstrain.storage.files import TEMPORARY, replacing

SCHEMES = ("http", "https")
CHUNK_SIZE = 2**18
"""Bytes that are read at once."""
ABANDONED = 24 * 3600.0
"""Seconds after its last byte from which a file in the making is taken for that of a
dead run.
"""


def is_url(name: str) -> bool:
    """Whether a name in the metadata is a URL of any kind."""
    return _URL.match(name) is not None


@dataclass(frozen=True)
class UrlCache:
    """The folder of --url_cache, and when a server is given up.

    silence: seconds without a byte. patience: seconds for a whole file. largest: bytes
    of a file.
    """

    folder: Path
    read_timeout: float = 30.0
    total_timeout: float = 1800.0
    max_bytes: int = 2**33

    def fetch(self, url: str) -> Path:
        """The file that a URL names, fetched unless it is here; raises UsageError if it
        cannot be had whole.

        Nothing is sent but the request, and what the URL's own user and password say;
        redirects lead to http and https alone. Raises SystemFault if the folder cannot
        be written.
        """
        url = url.strip()
        scheme = url.partition("://")[0].lower()
        if scheme not in SCHEMES:
            raise UsageError(
                shown(url),
                f"is a URL of a kind that is not read: {scheme}; use http or https",
            )
        suffix = Path(urllib.parse.urlsplit(url).path).suffix.lower()
        name = hashlib.sha256(url.encode()).hexdigest() + (
            suffix if re.fullmatch(r"\.[a-z0-9]{1,5}", suffix) else ""
        )
        path = self.folder / name
        if path.is_file() and not path.is_symlink():
            return path
        with _faults(url):
            response = _opener().open(_request(url), timeout=self.read_timeout)
        # More than one thread may fetch one URL, for two columns: the last to end wins,
        # with the same bytes.
        with response, replacing(path) as building, building.open("wb") as file:
            for piece in self._pieces(url, response):
                file.write(piece)
        return path

    def _pieces(self, url: str, response: Any) -> Iterator[bytes]:
        """What comes, piece by piece; raises UsageError unless it comes whole."""
        said = response.headers.get("Content-Length")
        due = time.monotonic() + self.total_timeout
        count = 0
        with _faults(url):
            while piece := response.read1(CHUNK_SIZE):
                count += len(piece)
                if count > self.max_bytes:
                    raise ValueError(f"it has more than {self.max_bytes:,} bytes")
                if time.monotonic() > due:
                    raise ValueError(
                        f"it did not come within {self.total_timeout:g} seconds"
                    )
                yield piece
            if said is not None and said.isdecimal() and count != int(said):
                raise ValueError(f"{count:,} of its {int(said):,} bytes came")


def remove_abandoned(folder: Path) -> None:
    """Make the folder of fetched files, and remove from it what a dead run left
    unfinished; raises SystemFault.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"{TEMPORARY}*"):
            if time.time() - path.stat().st_mtime > ABANDONED:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise SystemFault(
            str(folder), f"cannot be written: {error.strerror}"
        ) from error


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects to http and https, never to a file or another kind of server."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        """Return the request that follows; raises URLError for another kind of URL."""
        scheme = urllib.parse.urlsplit(newurl).scheme.lower()
        if scheme not in SCHEMES:
            raise urllib.error.URLError(
                f"it leads to a URL of a kind that is not read: {scheme}"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """What opens http and https; no handler for files, ftp or data is in it."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    return opener


def _request(url: str) -> urllib.request.Request:
    parts = urllib.parse.urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    plain = urllib.parse.quote(
        urllib.parse.urlunsplit(parts._replace(netloc=host)),
        safe=":/?#[]@!$&'()*+,;=%~",
    )
    request = urllib.request.Request(plain, headers={"User-Agent": "dstrain"})
    if at:  # not sent on where a redirect leads
        secret = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {secret}")
    return request


@contextmanager
def _faults(url: str) -> Iterator[None]:
    """Raise UsageError for what goes wrong on the way to a server, and there."""
    try:
        yield
    except urllib.error.HTTPError as error:
        answer = f"{error.code} {http.client.responses.get(error.code, '')}".strip()
        nowhere = ", to nowhere that is read" if error.code // 100 == 3 else ""
        raise _unfetched(url, answer + nowhere) from error
    except urllib.error.URLError as error:
        raise _unfetched(url, _words(error.reason)) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _unfetched(url, _words(error)) from error


def _unfetched(url: str, why: str) -> UsageError:
    return UsageError(shown(url), f"cannot be fetched: {why}")


def _words(error: Any) -> str:
    """What went wrong, without the URL, which library messages may hold."""
    if isinstance(error, TimeoutError):
        return "the server did not answer in time"
    if isinstance(error, http.client.IncompleteRead):
        return "the transfer was cut"
    if isinstance(error, http.client.HTTPException | UnicodeError):
        return "the server's answer, or the URL, is not as it should be"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error)
