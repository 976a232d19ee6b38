"""Failures of a hub end in one error, leave no half file, and the next run goes on."""

import errno
import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dstrain import DstrainError, StateError, SystemFault
from dstrain.models.hub import ModelSource, fetch
from dstrain.storage import sha256

from tests.support.forks import fork
from tests.support.hub_server import SHARDS, TINY, Faults, Hub, point_at

PATTERN = "transformer/*.safetensors"
LARGE = SHARDS[1]
BASE = "DSTRAIN_MODEL_BASE_PATH"
TOKEN = "(HF|MODELSCOPE_API)_TOKEN"
CASES: dict[str, tuple[Faults, type[DstrainError], str]] = {
    "cut": (Faults(LARGE, cut_at=500), SystemFault, LARGE),
    "wrong bytes": (Faults(LARGE, wrong=True), SystemFault, LARGE),
    "too short": (Faults(LARGE, short=True), SystemFault, LARGE),
    "slow": (Faults(LARGE, delay=0.7), SystemFault, LARGE),
    "listed and not there": (Faults(LARGE, status=404), SystemFault, LARGE),
    "file refused": (Faults(LARGE, status=403), SystemFault, f"{LARGE} (?s:.*){TOKEN}"),
    "server error": (Faults(LARGE, status=500), SystemFault, f"{LARGE} (?s:.*)--hub "),
    "list refused": (Faults(listing=True, status=403), SystemFault, TOKEN),
    "to be asked for": (
        Faults(listing=True, status=403, code="GatedRepo"),
        SystemFault,
        TOKEN,
    ),
    "access token needed": (Faults(listing=True, status=401), SystemFault, TOKEN),
    "no such model": (Faults(listing=True, status=404), StateError, TOKEN),
    "list server error": (Faults(listing=True, status=500), SystemFault, "--hub "),
}


@pytest.fixture
def source(hub: Any) -> ModelSource:
    return ModelSource(TINY, hub=hub)


@pytest.fixture
def impatient() -> Iterator[None]:
    """Both clients wait half a second at most."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "modelscope_hub._download.DOWNLOAD_MIN_BYTES_PER_SECOND",
            "modelscope_hub._legacy_api.DOWNLOAD_TIMEOUT",
            "huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT",
        ):
            patch.setattr(name, 0.4)
        yield


def refused(
    error: type[DstrainError], source: ModelSource, words: str = ""
) -> DstrainError:
    """The error of fetching; nothing that has its own name is not the published file."""
    with pytest.raises(error, match=words) as caught:
        fetch(source, PATTERN)
    folder = Path("models") / TINY
    for path in folder.rglob("*") if folder.exists() else ():
        inside = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in inside.parts):
            assert sha256(path) == sha256(Path("published") / inside), inside
    return caught.value


def check_the_next_run_completes(server: Hub, source: ModelSource) -> None:
    """Without the failure the same command succeeds, and leaves nothing behind."""
    server.faults = Faults()
    server.forget()
    assert fetch(source, PATTERN) == SHARDS
    folder = Path("models") / TINY
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")}
    configuration = "transformer/config.json"
    assert names == {".fetched.json", ".dstrain.lock", configuration, *SHARDS}
    for name in SHARDS:
        assert sha256(folder / name) == sha256(Path("published") / name)


@pytest.mark.parametrize("case", CASES)
def test_a_failure_of_a_hub_is_one_error_and_leaves_no_partial_file(
    case: str,
    server: Hub,
    source: ModelSource,
    request: pytest.FixtureRequest,
    capfd: pytest.CaptureFixture[str],
) -> None:
    server.faults, error, words = CASES[case]
    if case == "slow":
        request.getfixturevalue("impatient")
    found = refused(error, source, words)
    assert found.where == TINY
    assert len(str(found).splitlines()) <= 4
    assert "Traceback" not in capfd.readouterr().err
    check_the_next_run_completes(server, source)


def test_what_a_killed_run_had_of_a_file_is_continued_from_modelscope(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there of it needs no room."""
    source = ModelSource(TINY, hub="modelscope")
    server.faults = Faults(LARGE, cut_at=500)
    refused(SystemFault, source, LARGE)
    left = Path("published", LARGE).stat().st_size - 500
    free = SimpleNamespace(free=left - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    refused(SystemFault, source, f"models/{TINY}: {left:,} .* {left - 1:,} ")
    free.free = left
    check_the_next_run_completes(server, source)
    assert server.ranges == ["bytes=500-"]
    assert SHARDS[0] not in server.fetched


def test_a_hub_that_is_not_there_is_reported(
    source: ModelSource, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{free.getsockname()[1]}"
    point_at(monkeypatch, nowhere)
    (other,) = {"modelscope", "huggingface"} - {source.hub}
    error = refused(SystemFault, source, rf"{TINY}: .* {source.hub} \({nowhere}\)")
    advice, cause = error.help_lines
    assert f"--hub {other}" in advice and "Connection refused" in cause
    with pytest.raises(StateError, match="Tiny/Other"):
        point_at(monkeypatch, server.url)
        fetch(replace(source, model_id="Tiny/Other"), PATTERN)
    assert not Path("models/Tiny").exists()


def test_a_full_disk_is_reported_with_its_folder(server: Hub) -> None:
    source = ModelSource(TINY, hub="modelscope")
    staged = [
        Path("models", TINY, ".fetching", f"{name}.incomplete") for name in SHARDS
    ]
    for path in staged:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("/dev/full")
    words = rf"models/{TINY}: .*{os.strerror(errno.ENOSPC)}\n.*{BASE}"
    refused(SystemFault, source, words)
    for path in staged:
        path.unlink(missing_ok=True)
    check_the_next_run_completes(server, source)


def test_a_file_that_changed_on_the_hub_is_not_mixed(server: Hub) -> None:
    source, folder = ModelSource(TINY, hub="modelscope"), Path("models") / TINY
    server.faults = Faults(LARGE, cut_at=500)
    refused(SystemFault, source, LARGE)
    server.faults = Faults()
    published = Path("published", LARGE)
    published.write_bytes(os.urandom(published.stat().st_size))
    server.add(TINY, Path("published"))
    for _ in range(2):  # what was left of it, then the whole file
        refused(SystemFault, source, f"{LARGE} (?s:.*){folder.resolve()}")
        assert not (folder / LARGE).exists()
    shutil.rmtree(folder)
    check_the_next_run_completes(server, source)


def test_a_run_that_died_between_two_files_is_completed(
    source: ModelSource, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = fork()
    if child == 0:
        moved = Path.replace

        def die(self: Path, target: Path) -> Path:
            if self.name == Path(LARGE).name:
                os._exit(9)
            return moved(self, target)

        monkeypatch.setattr(Path, "replace", die)
        fetch(source, PATTERN)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert (Path("models") / TINY / SHARDS[0]).exists()
    with monkeypatch.context() as offline:
        offline.setenv("DSTRAIN_SKIP_DOWNLOAD", "True")
        refused(StateError, source, "DSTRAIN_SKIP_DOWNLOAD")
    check_the_next_run_completes(server, source)
    assert SHARDS[0] not in server.fetched
