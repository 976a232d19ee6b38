"""Files that rows name by URL."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dstrain.plugin import Content, Form, UsageError


@dataclass(frozen=True)
class Urls(Form):
    """The files of http and https URLs, and when to give up on a server."""

    keeps: Path | None = None
    """The folder of --url_cache; None refuses URLs."""
    read_timeout: float = 30.0
    """Seconds without a byte."""
    total_timeout: float = 1800.0
    """Seconds for a file."""
    max_bytes: int = 2**33
    """The size of the largest file that is read."""
    name = "urls"
    reads = ("URL",)

    def open(self, name: str) -> Content:
        """Return the file that a URL names.

        Nothing is sent but the request, with the URL's own user and password; redirects
        are followed to http and https alone.
        """
        if self.keeps is None:
            what = "is a URL; use --url_cache DIR to download such files"
            raise UsageError(name, what)
        return Content(partial(self._chunks, name))

    def _chunks(self, url: str) -> Iterator[bytes]:
        """Yield the bytes of a file; raise ValueError unless all of them come."""
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
            response = error.response
            answer = f"{response.status_code} {response.reason_phrase}"
            raise ValueError(answer) from error
        except httpx2.InvalidURL as error:  # whose message may quote a password
            raise ValueError("the URL is invalid") from error
