"""Files named by URL are fetched when that is asked for, whole or not at all, and no
secret of a URL is shown.
"""

import base64
import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from dstrain import SystemFault, UsageError
from dstrain.cli.main import main
from dstrain.console import shown
from dstrain.data import (
    DataConfig,
    Dataset,
    Resolution,
    files as data_files,
    open_dataset,
)
from dstrain.data.urls import ABANDONED, UrlCache, is_url, remove_abandoned
from dstrain.plugin import Column
from dstrain.storage import temporary
from PIL import Image

from tests.support.videos import film

COLUMNS = {
    "image": Column("image", "image", multiple=8),
    "clip": Column("clip", "video", multiple=8),
}
SECRETS = ("s3cret", "t0ken", "hidden")


def png() -> bytes:
    content = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(content, "PNG")
    return content.getvalue()


@dataclass
class Site:
    """A server on this machine; asked: the path and authorization of every request."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=lambda: {"/a.png": png()})
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer as the path asks: a redirect, an error, half of a file, drop by drop,
        or the file.
        """
        path = request.path.partition("?")[0]
        self.asked.append((path, request.headers.get("Authorization")))
        if path.startswith("/to/"):
            request.send_response(302)
            request.send_header("Location", path.removeprefix("/to/"))
            request.end_headers()
            return
        content = self.files.get(
            path.replace("/half", "").replace("/slow", "").replace("/chunked", "")
        )
        if content is None:
            request.send_error(404)
            return
        request.send_response(200)
        if path.startswith("/chunked"):
            request.send_header("Transfer-Encoding", "chunked")
            request.end_headers()
            request.wfile.write(b"%x\r\n%b" % (len(content), content[:100]))
            return
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if path.startswith("/slow"):
            for byte in content[:40]:
                request.wfile.write(bytes([byte]))
                time.sleep(0.05)
            return
        request.wfile.write(
            content[: len(content) // 2] if path.startswith("/half") else content
        )


class Handler(BaseHTTPRequestHandler):
    """Passes requests on to a site, and says nothing."""

    protocol_version = "HTTP/1.1"

    def __init__(self, site: Site, *arguments: Any) -> None:
        self.site = site
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Answer, and close the connection."""
        self.close_connection = True
        with suppress(ConnectionError):  # the client gave up
            self.site.answer(self)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A server that runs for a test."""
    monkeypatch.setenv("no_proxy", "*")
    found = Site()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, found))
    found.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def opened(
    folder: Path, cache: Path | None, *rows: dict[str, str], **more: Any
) -> Dataset:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data/metadata.json").write_text(json.dumps(rows))
    config = DataConfig(
        folder / "data",
        None,
        None,
        Resolution(None, None, 2**20),
        url_cache=cache,
        **more,
    )
    return open_dataset(config, COLUMNS)


def test_files_are_fetched_once_and_kept_under_the_digest_of_their_url(
    site: Site, tmp_path: Path
) -> None:
    film(tmp_path / "b.mp4", [number / 15 for number in range(5)], 15)
    site.files["/b.mp4"] = (tmp_path / "b.mp4").read_bytes()
    rows = [
        {"image": f"{site.address}/a.png?key=t0ken", "clip": f"{site.address}/b.mp4"}
    ] * 3
    for _ in range(2):
        cells = opened(tmp_path, tmp_path / "cache", *rows).rows
    assert len(site.asked) == 2
    kept = sorted(path.suffix for path in (tmp_path / "cache").iterdir())
    assert kept == [".mp4", ".png"]
    path = Path(cells[0]["image"].files[0])
    assert path.read_bytes() == site.files["/a.png"] and len(path.stem) == 64
    assert cells[0]["clip"].shapes[0][0] == 5


def test_without_the_flag_a_url_is_refused_and_nobody_is_asked(
    site: Site, tmp_path: Path
) -> None:
    with pytest.raises(
        UsageError, match=r"metadata\.json:1:image: .*is a URL; use --url_cache DIR"
    ):
        opened(tmp_path, None, {"image": f"{site.address}/a.png"})
    assert not site.asked


BAD = (
    ("/none.png", "cannot be downloaded: 404 Not Found"),
    ("/half/a.png", "without sending complete message body"),
    ("/chunked/a.png", "cannot be downloaded: "),
    ("/to/file:///etc/hostname", "unsupported protocol 'file://'"),
    ("/to/ftp://127.0.0.1/a", "unsupported protocol 'ftp://'"),
    ("/text.png", "is not an image in a supported format"),
)


def test_all_bad_urls_are_named_at_once_and_leave_nothing_behind(
    site: Site, tmp_path: Path
) -> None:
    site.files["/text.png"] = b"hello"
    rows = [{"image": f"{site.address}{path}"} for path, _ in BAD]
    with pytest.raises(UsageError) as caught:
        opened(tmp_path, tmp_path / "cache", *rows)
    assert len(caught.value.help_lines) == len(BAD)
    for number, (line, (_, words)) in enumerate(
        zip(caught.value.help_lines, BAD, strict=True), 1
    ):
        assert line.startswith(f"metadata.json:{number}:image: ") and words in line
    assert len(list((tmp_path / "cache").iterdir())) == 1  # the text, which came whole


def test_a_redirect_to_http_is_followed(site: Site, tmp_path: Path) -> None:
    assert opened(
        tmp_path,
        tmp_path / "cache",
        {"image": f"{site.address}/to/{site.address}/a.png"},
    ).rows


@pytest.mark.parametrize(
    "limits, path, words",
    [
        ({"total_timeout": 0.2}, "slow/a.png", "it took more than 0.2 seconds"),
        ({"read_timeout": 0.02}, "slow/a.png", "timed out"),
        ({"max_bytes": 100}, "a.png", "it has more than 100 bytes"),
    ],
)
def test_a_server_that_is_too_slow_or_sends_too_much_is_given_up(
    site: Site, tmp_path: Path, limits: dict[str, Any], path: str, words: str
) -> None:
    with pytest.raises(UsageError, match=f"cannot be downloaded: {words}"):
        UrlCache(tmp_path, **limits).fetch(f"{site.address}/{path}")
    assert not list(tmp_path.iterdir())


def test_nobody_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be downloaded: .*Connection refused"):
        UrlCache(tmp_path).fetch("http://127.0.0.1:1/a.png")


def test_user_and_password_are_sent_to_their_server_alone(
    site: Site, tmp_path: Path
) -> None:
    host = site.address.removeprefix("http://")
    other = site.address.replace("127.0.0.1", "localhost")
    UrlCache(tmp_path).fetch(f"http://hidden:s3%20cret@{host}/to/{other}/a.png")
    sent = "Basic " + base64.b64encode(b"hidden:s3 cret").decode()
    assert [authorization for _, authorization in site.asked] == [sent, None]


def test_secrets_of_urls_are_in_no_message_and_no_written_byte(
    site: Site, tmp_path: Path, capfd: pytest.CaptureFixture[str], tiny: Path
) -> None:
    host = site.address.removeprefix("http://")
    url = f"http://hidden:s3cret@{host}"
    rows = [{"image": f"{site.address}/a.png?key=t0ken#hidden", "prompt": "a"}]
    for path in (
        "/none.png?key=t0ken",
        "/half/a.png?key=t0ken",
        "/a b.png?key=t0ken",
        ":x/?key=t0ken",
    ):
        rows.append({"image": f"{url}{path}", "prompt": "b"})
    rows.append({"image": f"ftp://hidden:s3cret@{host}/a", "prompt": "c"})
    (tmp_path / "data").mkdir()
    (tmp_path / "data/metadata.json").write_text(json.dumps(rows))
    words = ["--model", "tiny", "--toy", "--dataset_base_path", str(tmp_path / "data")]
    words += [
        "--url_cache",
        str(tmp_path / "cache"),
        "--output_path",
        str(tmp_path / "out"),
    ]
    assert main(words) == 2
    assert main([*words, "--on_bad_sample", "skip"]) == 0
    said = capfd.readouterr()
    assert "5 of 6 rows are skipped" in said.err
    files = [
        path for folder in ("out", "cache") for path in (tmp_path / folder).rglob("*")
    ]
    written = [path.read_bytes() for path in files if path.is_file()]
    assert len(written) > 5
    for secret in SECRETS:
        assert secret not in said.err + said.out
        assert not any(secret.encode() in content for content in written)
    listed = (tmp_path / "out/logs/bad_samples.jsonl").read_text()
    assert (
        f"'http://***@{host}/none.png?***' cannot be downloaded: 404 Not Found"
        in listed
    )


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("https://a.example/x.png", "https://a.example/x.png"),
        ("https://u:p@a.example/x.png?k=v", "https://***@a.example/x.png?***"),
        ("https://u@a.example/x.png#f", "https://***@a.example/x.png#***"),
        ("https://u:p?q@a.example/x", "https://***@?***"),
        ("https://u:p/q@a.example/x", "https://***@a.example/x"),
        (" s3://u:p@b/x?k", " s3://***@b/x?***"),
        ("https://a.example/x?k=a@b", "https://a.example/x?***"),
        ("a?b@c.png", "a?b@c.png"),
        ("C:\\x@y?z.png", "C:\\x@y?z.png"),
    ],
)
def test_what_can_hold_a_secret_is_not_shown(name: str, wanted: str) -> None:
    assert shown(name) == wanted
    assert is_url(name) == ("://" in name)


def test_a_link_in_the_cache_is_not_followed(site: Site, tmp_path: Path) -> None:
    cache = UrlCache(tmp_path / "cache")
    remove_abandoned(cache.folder)
    path = cache.fetch(f"{site.address}/a.png")
    path.rename(tmp_path / "other")
    path.symlink_to(tmp_path / "other")
    assert not cache.fetch(f"{site.address}/a.png").is_symlink()
    assert len(site.asked) == 2


def test_what_a_dead_run_left_is_removed_and_what_another_writes_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary(tmp_path / "a").touch()
    (tmp_path / ".tmp-keep").touch()
    remove_abandoned(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + ABANDONED + 1)
    remove_abandoned(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-keep"]


def test_a_cache_that_cannot_be_written_is_a_fault_of_the_system(
    tmp_path: Path, site: Site
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemFault, match=r"file/cache: cannot be written"):
        opened(tmp_path, tmp_path / "file/cache", {"image": f"{site.address}/a.png"})
    with pytest.raises(SystemFault, match="cannot be written"):
        UrlCache(tmp_path / "none").fetch(f"{site.address}/a.png")


def test_several_files_are_fetched_at_once(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(4, timeout=10)

    def fetch(cache: UrlCache, url: str) -> Path:
        together.wait()
        path = cache.folder / url[-5:]
        path.write_bytes(site.files["/a.png"])
        return path

    monkeypatch.setattr(data_files.UrlCache, "fetch", fetch)
    assert (
        len(
            opened(
                tmp_path,
                tmp_path / "cache",
                *({"image": f"http://a/{n}.png"} for n in range(4)),
            ).rows
        )
        == 4
    )
