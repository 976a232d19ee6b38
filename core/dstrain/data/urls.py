"""Files that a dataset names by URL: fetched once, kept whole under the digest of their
URL, and shown without secrets.
"""

import base64
import hashlib
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, IncompleteRead, responses
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from dstrain.console import _URL, shown
from dstrain.errors import SystemFault, UsageError
from dstrain.storage.files import TEMPORARY, replacing

SCHEMES = ("http", "https")
CHUNK_SIZE = 2**18
"""Bytes that are read at once."""
ABANDONED = 24 * 3600.0
"""Seconds after its last byte from which an unfinished file is that of a dead run."""


def is_url(name: str) -> bool:
    """Return whether a name in the metadata is a URL of any kind."""
    return _URL.match(name) is not None


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
        scheme = url.partition("://")[0].lower()
        if scheme not in SCHEMES:
            what = f"is an unsupported kind of URL: {scheme}; use http or https"
            raise UsageError(shown(url), what)
        suffix = Path(urlsplit(url).path).suffix.lower()
        if not re.fullmatch(r"\.[a-z0-9]{1,5}", suffix):
            suffix = ""
        path = self.folder / (hashlib.sha256(url.encode()).hexdigest() + suffix)
        if path.is_file() and not path.is_symlink():
            return path
        with _as_usage_error(url):
            opener = build_opener(_Redirects)
            response = opener.open(_request(url), timeout=self.read_timeout)
        # Two threads may fetch one URL, for two columns: the last one wins, with the
        # same bytes.
        with response, replacing(path) as building, building.open("wb") as file:
            for chunk in self._chunks(url, response):
                file.write(chunk)
        return path

    def _chunks(self, url: str, response: Any) -> Iterator[bytes]:
        """Yield the bytes of an answer; raise UsageError unless all of them come."""
        length = response.headers.get("Content-Length")
        deadline = time.monotonic() + self.total_timeout
        count = 0
        with _as_usage_error(url):
            while chunk := response.read1(CHUNK_SIZE):
                count += len(chunk)
                if count > self.max_bytes:
                    raise ValueError(f"it has more than {self.max_bytes:,} bytes")
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"it took more than {self.total_timeout:g} seconds"
                    )
                yield chunk
            if length is not None and length.isdecimal() and count != int(length):
                raise ValueError(f"only {count:,} of its {int(length):,} bytes arrived")


def remove_abandoned(folder: Path) -> None:
    """Make the cache folder, and remove unfinished files of dead runs; raise SystemFault."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"{TEMPORARY}*"):
            if time.time() - path.stat().st_mtime > ABANDONED:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise SystemFault(folder, f"cannot be written: {error.strerror}") from error


class _Redirects(HTTPRedirectHandler):
    """Follow redirects to http and https, never to a file or another kind of server."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        """Return the request that follows; raise URLError for another kind of URL."""
        scheme = urlsplit(newurl).scheme.lower()
        if scheme not in SCHEMES:
            raise URLError(f"it redirects to an unsupported kind of URL: {scheme}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _request(url: str) -> Request:
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    plain = urlunsplit(parts._replace(netloc=host))
    request = Request(
        quote(plain, safe=":/?#[]@!$&'()*+,;=%~"), headers={"User-Agent": "dstrain"}
    )
    if at:
        secret = base64.b64encode(unquote(user).encode()).decode()
        # Unredirected: another server must not get it.
        request.add_unredirected_header("Authorization", f"Basic {secret}")
    return request


@contextmanager
def _as_usage_error(url: str) -> Iterator[None]:
    """Raise UsageError for what fails on the way to a server, and there."""
    try:
        yield
    except (OSError, ValueError, HTTPException) as error:
        reason = _reason(error)
        raise UsageError(shown(url), f"cannot be fetched: {reason}") from error


def _reason(error: BaseException | str) -> str:
    """Say what failed, without the URL, which the messages of libraries may hold."""
    match error:
        case HTTPError():
            answer = f"{error.code} {responses.get(error.code, '')}".strip()
            is_redirect = error.code // 100 == 3
            return f"{answer}, to an unsupported URL" if is_redirect else answer
        case URLError():
            return _reason(error.reason)
        case TimeoutError():
            return "the server did not answer in time"
        case IncompleteRead():
            return "the transfer was interrupted"
        case HTTPException() | UnicodeError():
            return "the URL, or the server's answer, is invalid"
        case OSError():
            return error.strerror or type(error).__name__
    return str(error)
