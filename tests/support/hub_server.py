"""A hub on this machine that answers both real clients, and fails on request.

It serves models from memory: id -> revision -> path -> bytes. As on the real hubs,
files of weights are listed with their sha256, on Hugging Face small ones with the
digest of git, and there is a commit to each revision.
"""

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest

from tests.support.family import write, write_data

TINY = "Tiny/Tiny"
SHARDS = [f"transformer/model-{i}-of-2.safetensors" for i in (1, 2)]

Files = dict[str, bytes]
USUAL = ("main", "master")
LARGE = frozenset({".safetensors", ".bin", ".pth"})


@dataclass(frozen=True)
class Faults:
    """What goes wrong, for files whose path ends with `of`, the first `times` times
    that they are asked for.

    status: answered instead of the file, or, with `listing`, instead of the list.
    code: what Hugging Face says of why it refuses a list.
    cut_at: the connection ends after so many bytes of the file. wrong: the bytes are
    others than listed; short: they are fewer. delay: seconds of silence first.
    no_range: whole files are sent whatever is asked for. lists: what else is listed.
    digest: what Hugging Face lists instead of the sha256 of large files.
    """

    of: str = ""
    times: int = 1_000_000
    status: int = 0
    code: str = ""
    listing: bool = False
    cut_at: int | None = None
    wrong: bool = False
    short: bool = False
    delay: float = 0.0
    no_range: bool = False
    lists: Mapping[str, bytes] = field(default_factory=dict)
    digest: str = ""


@dataclass
class Hub:
    """A running server: what it serves, what goes wrong, and what it was asked."""

    url: str
    models: dict[str, dict[str, Files]] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    requests: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    hits: int = 0

    def add(self, model_id: str, folder: Path, revision: str = "") -> None:
        """Serve a copy of what is in a folder now, as the usual revision or as another
        one.
        """
        files = {
            p.relative_to(folder).as_posix(): p.read_bytes()
            for p in sorted(folder.rglob("*"))
            if p.is_file()
        }
        for name in (revision,) if revision else USUAL:
            self.models.setdefault(model_id, {})[name] = files

    def forget(self) -> None:
        for asked in (self.requests, self.fetched, self.ranges):
            asked.clear()
        self.hits = 0

    def files(self, model_id: str, revision: str) -> Files | None:
        """The files of a model at a revision, its commit or the first letters of that."""
        revisions = self.models.get(model_id, {})
        for name, files in revisions.items():
            if revision == name or (
                len(revision) >= 7 and commit(files).startswith(revision)
            ):
                return files
        return None

    def strikes(self, path: str, listing: bool = False) -> bool:
        """Whether a request is one of those that go wrong."""
        fits = self.faults.listing == listing and (
            listing or path.endswith(self.faults.of)
        )
        self.hits += fits
        return fits and self.hits <= self.faults.times


def commit(files: Files) -> str:
    """The name of a revision with these files: 40 hexadecimal digits."""
    parts = (
        f"{name} {hashlib.sha256(data).hexdigest()}"
        for name, data in sorted(files.items())
    )
    return hashlib.sha1("\n".join(parts).encode()).hexdigest()


def blob(data: bytes) -> str:
    """The digest that git gives to a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of `modelscope` and `huggingface_hub` for lists and files."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), dict(parse_qsl(url.query))
        self.hub.requests.append(f"{self.command} {path}")
        self.hub.tokens |= {
            value
            for name in ("Authorization", "Cookie")
            if (value := self.headers.get(name))
        }
        path = self.without_kind(path)
        if hit := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self.listing(hit[1], hit[2] or "main", self.huggingface)
        elif hit := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.file(hit[1], hit[2], hit[3])
        elif hit := re.fullmatch(
            r"/api/v1/models/([^/]+/[^/]+)/repo/(?:files|tree)", path
        ):
            self.listing(hit[1], query.get("Revision", "master"), self.modelscope)
        elif hit := re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)/repo", path):
            self.file(
                hit[1], query.get("Revision", "master"), query.get("FilePath", "")
            )
        else:
            self.answer(
                {"Code": 404, "Message": "no such route", "error": "no such route"}, 404
            )

    do_HEAD = do_POST = do_GET

    def without_kind(self, path: str) -> str:
        """Return the path of a model in place of that of a dataset with its id."""
        if path.startswith("/api/datasets/"):  # of Hugging Face
            return path.replace("/api/datasets/", "/api/models/", 1)
        if path.startswith("/datasets/"):
            return path.removeprefix("/datasets")
        return path.replace("/api/v1/datasets/", "/api/v1/models/", 1)

    def listing(self, model_id: str, revision: str, form: Any) -> None:
        if self.hub.strikes("", listing=True):
            time.sleep(self.hub.faults.delay)
            if self.hub.faults.status:
                self.answer(
                    {"Message": "out of order", "error": "out of order"},
                    self.hub.faults.status,
                    {"X-Error-Code": self.hub.faults.code},
                )
                return
        files = self.hub.files(model_id, revision)
        if files is None:
            known = model_id in self.hub.models
            # Hugging Face does not tell a model that does not exist from a private one.
            private = form == self.huggingface and not known
            self.answer(
                {"Code": 404, "Message": "not found", "error": "not found"},
                401 if private else 404,
                {"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"},
            )
        else:
            self.answer(form(model_id, {**files, **self.hub.faults.lists}))

    def huggingface(self, model_id: str, files: Files) -> Any:
        siblings = []
        for name, data in files.items():
            large = {
                "size": len(data),
                "sha256": self.hub.faults.digest or hashlib.sha256(data).hexdigest(),
                "pointerSize": 134,
            }
            lfs = {"lfs": large} if PurePosixPath(name).suffix in LARGE else {}
            siblings.append(
                {"rfilename": name, "size": len(data), "blobId": blob(data), **lfs}
            )
        own = self.hub.models[model_id]
        sha = next(
            commit(one)
            for one in own.values()
            if set(one) <= set(files) and one.items() <= files.items()
        )
        return {
            "id": model_id,
            "modelId": model_id,
            "sha": sha,
            "private": False,
            "tags": [],
            "siblings": siblings,
        }

    def modelscope(self, model_id: str, files: Files) -> Any:
        """The answer of /repo/files."""
        entries = [
            {
                "Name": PurePosixPath(name).name,
                "Path": name,
                "Type": "blob",
                "Size": len(data),
                "Sha256": hashlib.sha256(data).hexdigest(),
            }
            for name, data in files.items()
        ]
        folders = {str(PurePosixPath(name).parent) for name in files} - {"."}
        entries += [
            {"Name": folder, "Path": folder, "Type": "tree", "Size": 0}
            for folder in folders
        ]
        return {
            "Code": 200,
            "Success": True,
            "Message": "success",
            "Data": {"Files": entries},
        }

    def file(self, model_id: str, revision: str, path: str) -> None:
        """Answer with a file, or with what goes wrong."""
        data = (self.hub.files(model_id, revision) or {}).get(path)
        if data is None:
            self.answer(
                {"Code": 404, "Message": "not found"},
                404,
                {"X-Error-Code": "EntryNotFound"},
            )
            return
        if self.command == "HEAD":  # asked before each file by `huggingface_hub`
            self.head(self.hub.models[model_id], revision, path, data)
            return
        self.hub.fetched.append(path)
        faults = (
            self.hub.faults
            if self.hub.strikes(path)
            else Faults(no_range=self.hub.faults.no_range)
        )
        time.sleep(faults.delay)
        if faults.status:
            self.answer(
                {"Message": "out of order", "error": "out of order"}, faults.status
            )
            return
        data = (
            bytes(byte ^ 1 for byte in data)
            if faults.wrong
            else data[: len(data) // 2]
            if faults.short
            else data
        )
        start = 0
        if hit := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            self.hub.ranges.append(self.headers["Range"])
            start = 0 if faults.no_range else int(hit[1])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header(
                "Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}"
            )
        self.end_headers()
        stop = len(data) if faults.cut_at is None else max(start, faults.cut_at)
        self.wfile.write(data[start:stop])
        if stop < len(data):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def head(
        self, revisions: dict[str, Files], revision: str, path: str, data: bytes
    ) -> None:
        """Answer with the size, the digest and the commit of a file."""
        large = PurePosixPath(path).suffix in LARGE
        files = next(
            files
            for name, files in revisions.items()
            if revision in (name, commit(files))
        )
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", commit(files))
        digest = hashlib.sha256(data).hexdigest() if large else blob(data)
        self.send_header("ETag", f'"{digest}"')
        self.end_headers()

    def answer(
        self, data: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")


class Impatient:
    """The module `time` for those who should not wait."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, _: float) -> None:
        """Do not."""


class Quiet(ThreadingHTTPServer):
    """A server that says nothing of clients that hang up."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None: ...


@contextmanager
def serving() -> Iterator[Hub]:
    """Run a hub without models on a free port of this machine."""
    handler = type("OfThisHub", (Handler,), {})
    server = Quiet(("127.0.0.1", 0), handler)
    handler.hub = hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def point_at(patch: pytest.MonkeyPatch, url: str) -> None:
    """Let both clients ask this address, which one reads when it is imported."""
    patch.setenv("HF_ENDPOINT", url)
    patch.setenv("MODELSCOPE_ENDPOINT", url)
    constants = "huggingface_hub.constants"
    patch.setattr(f"{constants}.ENDPOINT", url)
    files = url + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", files)


def use(patch: pytest.MonkeyPatch, url: str, home: Path) -> None:
    """Let both clients ask this hub, keep what they keep below `home`, and not wait
    long between their attempts.
    """
    for name, value in {
        "MODELSCOPE_HOME": str(home / "modelscope-home"),
        "MODELSCOPE_CACHE": str(home / "modelscope-cache"),
        "MODELSCOPE_DOWNLOAD_INTRA_CLOUD": "false",
        "DSTRAIN_MODEL_BASE_PATH": str(home / "models"),
    }.items():
        patch.setenv(name, value)
    for name in (
        "DSTRAIN_SKIP_DOWNLOAD",
        "DIFFSYNTH_SKIP_DOWNLOAD",
        "HF_TOKEN",
        "MODELSCOPE_API_TOKEN",
    ):
        patch.delenv(name, raising=False)
    point_at(patch, url)
    patch.setattr("modelscope_hub._legacy_api.REPO_TREE_PAGE_MAX_ATTEMPTS", 2)
    patch.setattr("modelscope_hub._download.DOWNLOAD_RETRY_TIMES", 1)
    patch.setattr("modelscope_hub._download.DOWNLOAD_INTEGRITY_RETRY_BACKOFF", 0.01)
    for module in (
        "huggingface_hub.file_download",
        "huggingface_hub.utils._http",
        "modelscope_hub._legacy_api",
    ):
        patch.setattr(f"{module}.time", Impatient())


@contextmanager
def tiny_hub(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the model Tiny/Tiny, which both clients ask; `folder`, the working
    directory, has a dataset.
    """
    patch.chdir(folder)
    write(folder / "published")
    (folder / "published/model_index.json").write_text("{}")
    (folder / "published/README.md").write_text("words")
    (folder / "published/transformer/code.py").write_text("raise SystemExit")
    (folder / "published/text_encoder/model.bin").write_bytes(b"pickle")
    write_data(folder / "data", ("dog", "cat"))
    with serving() as running:
        running.add(TINY, folder / "published")
        use(patch, running.url, folder)
        yield running
