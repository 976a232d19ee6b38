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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from dstrain import SystemFault, UsageError
from dstrain.cli.main import main
from dstrain.data import Dataset
from dstrain.data.tables.row_files import fetch
from dstrain.plugin import Column
from dstrain.storage import temporary
from dstrain_datasets.forms.urls import Urls
from PIL import Image

from tests.support.datasets import bad_cells, open_rows
from tests.support.processes import words
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


class Site(ThreadingHTTPServer):
    """A server on this machine."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server_port}"
        self.address = f"http://{self.host}"
        self.files = {"a.png": png()}
        # The path and authorization of every request.
        self.asked: list[tuple[str, str | None]] = []
        self.four = threading.Barrier(4)


class Handler(BaseHTTPRequestHandler):
    """Answers as a path asks: a redirect, an error, half of a file, drop by drop, when
    four have asked, or the file.
    """

    server: Site
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer, and close the connection."""
        self.close_connection = True
        with suppress(ConnectionError):  # the client gave up
            self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append((path, self.headers.get("Authorization")))
        way, _, target = path[1:].partition("/")
        content = self.server.files.get(path.rpartition("/")[2])
        if way == "to":
            self.send_response(302)
            self.send_header("Location", target)
            self.end_headers()
            return
        if content is None:
            self.send_error(404)
            return
        if way == "four":
            self.server.four.wait()
        self.send_response(200)
        if way == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%b" % (len(content), content[:100]))
            return
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if way == "slow":
            for byte in content[:40]:
                self.wfile.write(bytes([byte]))
                time.sleep(0.05)
            return
        self.wfile.write(content[: len(content) // (2 if way == "half" else 1)])

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "*")
    with Site() as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The folder of a dataset, beside that of its URLs."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def opened(data: Path, *rows: dict[str, str]) -> Dataset:
    """Open a dataset whose URLs are fetched."""
    return open_rows(data, rows, COLUMNS, forms=(Urls(data.parent / "cache"),))


def fetched(data: Path) -> list[Path]:
    return sorted((data.parent / "cache").iterdir())


def test_files_are_fetched_once_and_kept_under_the_digest_of_their_url(
    site: Site, data: Path
) -> None:
    film(data / "b.mp4", [number / 15 for number in range(5)], 15)
    site.files["b.mp4"] = (data / "b.mp4").read_bytes()
    image, clip = f"{site.address}/a.png?key=t0ken", f"{site.address}/b.mp4"
    for blank in ("", " "):
        row = {"image": f"{blank}{image}{blank}", "clip": clip}
        (cells, *_) = opened(data, *[row] * 3).rows
    assert len(site.asked) == 2
    assert {path.suffix for path in fetched(data)} == {".mp4", ".png"}
    path = Path(cells["image"].files[0])
    assert path.read_bytes() == site.files["a.png"]
    assert len(path.stem) == 64
    assert cells["clip"].shapes[0][0] == 5
    # A link in the cache is not followed.
    path.rename(data / "other")
    path.symlink_to(data / "other")
    (cells,) = opened(data, {"image": image, "clip": clip}).rows
    assert not Path(cells["image"].files[0]).is_symlink()
    assert len(site.asked) == 3


def test_without_the_flag_a_url_is_refused_and_nobody_is_asked(
    site: Site, data: Path
) -> None:
    rows = [{"image": f"{site.address}/a.png"}]
    found = bad_cells(data, rows, COLUMNS, forms=(Urls(),))
    assert "--url_cache" in found["metadata.json:1:image"]
    assert not site.asked


def test_all_bad_urls_are_named_at_once_and_leave_nothing_behind(
    site: Site, data: Path
) -> None:
    site.files["text.png"] = b"hello"
    paths = [
        *("/none.png", "/half/a.png", "/chunked/a.png", "/text.png"),
        *("/to/file:///etc/hostname", "/to/ftp://127.0.0.1/a"),
    ]
    rows = [{"image": f"{site.address}{path}"} for path in paths]
    rows += [{"image": "http://127.0.0.1:1/a.png"}]
    found = bad_cells(data, rows, COLUMNS, forms=(Urls(data.parent / "cache"),))
    assert list(found) == [f"metadata.json:{n}:image" for n in range(1, len(rows) + 1)]
    for row, reason in zip(rows, found.values(), strict=True):
        assert row["image"] in reason
    assert "404" in found["metadata.json:1:image"]
    assert len(fetched(data)) == 1  # the text, which came whole


@pytest.mark.parametrize(
    ("limits", "path"),
    [
        ({"total_timeout": 0.2}, "slow/a.png"),
        ({"read_timeout": 0.02}, "slow/a.png"),
        ({"max_bytes": 100}, "a.png"),
    ],
)
def test_a_server_that_is_too_slow_or_sends_too_much_is_given_up(
    site: Site, tmp_path: Path, limits: dict[str, Any], path: str
) -> None:
    url = f"{site.address}/{path}"
    with pytest.raises(UsageError) as caught:
        fetch(url, (Urls(tmp_path, **limits),))
    assert caught.value.where == url
    assert not list(tmp_path.iterdir())


def test_user_and_password_are_sent_to_their_server_alone(
    site: Site, data: Path
) -> None:
    other = site.address.replace("127.0.0.1", "localhost")
    opened(data, {"image": f"http://hidden:s3%20cret@{site.host}/to/{other}/a.png"})
    sent = "Basic " + base64.b64encode(b"hidden:s3 cret").decode()
    assert [authorization for _, authorization in site.asked] == [sent, None]


def test_secrets_of_urls_are_in_no_message_and_no_written_byte(
    site: Site, data: Path, capfd: pytest.CaptureFixture[str], tiny: Path
) -> None:
    secret = f"http://hidden:s3cret@{site.host}"
    urls = [
        f"{site.address}/a.png?key=t0ken#hidden",
        f"{secret}/none.png?key=t0ken",
        f"{secret}/half/a.png?key=t0ken",
        f"{secret}/a b.png?key=t0ken",
        f"{secret}:x/?key=t0ken",
        f"ftp://hidden:s3cret@{site.host}/a",
    ]
    rows = [{"image": url, "prompt": str(n)} for n, url in enumerate(urls)]
    (data / "metadata.json").write_text(json.dumps(rows))
    out, cache = data.parent / "out", data.parent / "cache"
    flags: dict[str, Any] = {
        "model": "tiny",
        "toy": True,
        "dataset_base_path": data,
        "url_cache": cache,
        "output_path": out,
    }
    assert main(words(flags)) == 2
    assert main(words(flags | {"on_bad_sample": "skip"})) == 0
    said = capfd.readouterr()
    assert "5 of 6" in said.err
    files = [path for folder in (out, cache) for path in folder.rglob("*")]
    written = [path.read_bytes() for path in files if path.is_file()]
    assert len(written) > 5
    for one in SECRETS:
        assert one not in said.err + said.out
        assert not any(one.encode() in content for content in written)
    listed = (out / "logs/bad_samples.jsonl").read_text()
    assert f"'http://***@{site.host}/none.png?***'" in listed


@pytest.mark.parametrize(
    ("name", "shown"),
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
def test_what_can_hold_a_secret_is_not_shown(data: Path, name: str, shown: str) -> None:
    (reason,) = bad_cells(data, [{"image": name}], COLUMNS, forms=(Urls(),)).values()
    assert repr(shown) in reason
    assert ("--url_cache" in reason) is ("://" in name)


def test_what_a_dead_run_left_is_removed_and_what_another_writes_is_not(
    data: Path,
) -> None:
    Image.new("RGB", (8, 8)).save(data / "a.png")
    cache = data.parent / "cache"
    cache.mkdir()
    temporary(cache / "a").touch()
    (cache / ".tmp-keep").touch()
    opened(data, {"image": "a.png"})
    assert len(fetched(data)) == 1


def test_a_cache_that_cannot_be_written_is_a_fault_of_the_system(
    data: Path, site: Site
) -> None:
    (data.parent / "cache").touch()
    with pytest.raises(SystemFault) as caught:
        opened(data, {"image": f"{site.address}/a.png"})
    assert caught.value.where == str(data.parent / "cache")
    with pytest.raises(SystemFault):
        fetch(f"{site.address}/a.png", (Urls(data / "none"),))
