"""Failures of a hub, a disk or a connection end in one error, leave no half file, and
the next run completes what is missing.
"""

import errno
import os
import resource
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from dstrain import DstrainError, StateError, SystemFault
from dstrain.config.options import Hub
from dstrain.models.hub import ModelSource, fetch
from dstrain.models.hub.clients import CLIENTS
from dstrain.models.hub.source import STAGING
from dstrain.storage import sha256

from tests.support.forks import fork
from tests.support.hub_server import Faults, Hub as Server, point_at, serving, use

TINY, PATTERN, LARGE = (
    "Tiny/Tiny",
    "transformer/*.safetensors",
    "transformer/b.safetensors",
)
NAMES = ["transformer/a.safetensors", LARGE]
SIZE = 300_000


class Case(NamedTuple):
    """A failure, and the error that it leads to."""

    name: str
    faults: Faults
    error: type[DstrainError]
    says: str


CASES = (
    Case(
        "cut",
        Faults(LARGE, cut_at=100_000),
        SystemFault,
        ": .*b.safetensors cannot be downloaded from ",
    ),
    Case(
        "wrong bytes",
        Faults(LARGE, wrong=True),
        SystemFault,
        "sent something other than what it lists: .*b.safetensors",
    ),
    Case(
        "too short",
        Faults(LARGE, short=True),
        SystemFault,
        r"sent something other than what it lists|cannot be downloaded from",
    ),
    Case("slow", Faults(LARGE, delay=0.7), SystemFault, "cannot be downloaded from"),
    Case(
        "listed and not there",
        Faults(LARGE, status=404),
        SystemFault,
        ": .*b.safetensors cannot be downloaded from ",
    ),
    Case(
        "file refused",
        Faults(LARGE, status=403),
        SystemFault,
        ": .*b.safetensors cannot be downloaded from ",
    ),
    Case(
        "server error",
        Faults(LARGE, status=500),
        SystemFault,
        "cannot be downloaded from",
    ),
    Case(
        "list refused",
        Faults(listing=True, status=403),
        SystemFault,
        "cannot be downloaded from",
    ),
    Case(
        "access token needed",
        Faults(listing=True, status=401),
        SystemFault,
        "cannot be downloaded from",
    ),
    Case(
        "no such model",
        Faults(listing=True, status=404),
        StateError,
        "no such model or revision on",
    ),
    Case(
        "list server error",
        Faults(listing=True, status=500),
        SystemFault,
        "cannot be downloaded from",
    ),
)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A hub with two files of weights and their configuration; both clients wait half a
    second at most.
    """
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "published/transformer"
    folder.mkdir(parents=True)
    for name in NAMES:
        (tmp_path / "published" / name).write_bytes(os.urandom(SIZE))
    (folder / "config.json").write_text('{"width": 8}')
    for module, name in (
        ("_download", "DOWNLOAD_MIN_BYTES_PER_SECOND"),
        ("_legacy_api", "DOWNLOAD_TIMEOUT"),
    ):
        monkeypatch.setattr(f"modelscope_hub.{module}.{name}", 0.4)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.4)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    with serving() as running:
        running.add(TINY, tmp_path / "published")
        use(monkeypatch, running.url, tmp_path)
        yield running


@pytest.fixture(params=["modelscope", "huggingface"])
def source(request: pytest.FixtureRequest) -> ModelSource:
    hub: Hub = request.param
    return ModelSource(TINY, hub=hub)


def check_nothing_is_half() -> None:
    """Every file that has its own name is the published one."""
    folder = Path("models") / TINY
    for path in folder.rglob("*") if folder.exists() else ():
        inside = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in inside.parts):
            assert sha256(path) == sha256(Path("published") / inside), inside


def check_the_next_run_completes(server: Server, source: ModelSource) -> None:
    """Without the failure the same command succeeds, and leaves nothing behind."""
    server.faults = Faults()
    server.forget()
    assert fetch(source, PATTERN) == NAMES
    check_nothing_is_half()
    folder = Path("models") / TINY
    assert {path.name for path in folder.iterdir()} == {
        ".fetched.json",
        ".dstrain.lock",
        "transformer",
    }
    assert {path.name for path in (folder / "transformer").iterdir()} == {
        "a.safetensors",
        "b.safetensors",
        "config.json",
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_failure_of_a_hub_is_one_error_and_leaves_no_partial_file(
    case: Case, server: Server, source: ModelSource, capfd: pytest.CaptureFixture[str]
) -> None:
    server.faults = case.faults
    with pytest.raises(case.error, match=case.says) as caught:
        fetch(source, PATTERN)
    assert caught.value.where == TINY
    assert len(str(caught.value).splitlines()) <= 4
    assert "Traceback" not in capfd.readouterr().err
    check_nothing_is_half()
    check_the_next_run_completes(server, source)


def test_what_a_killed_run_had_of_a_file_is_continued_from_modelscope(
    server: Server,
) -> None:
    source = ModelSource(TINY, hub="modelscope")
    server.faults = Faults(LARGE, cut_at=100_000)
    with pytest.raises(SystemFault, match="cannot be downloaded"):
        fetch(source, PATTERN)
    check_the_next_run_completes(server, source)
    assert server.ranges == ["bytes=100000-"]
    assert NAMES[0] not in server.fetched


def test_a_model_that_does_not_exist_is_named(
    server: Server, source: ModelSource
) -> None:
    other = replace(source, model_id="Tiny/Other")
    with pytest.raises(StateError, match="Tiny/Other: no such model or revision on"):
        fetch(other, PATTERN)
    assert not Path("models/Tiny").exists()


def test_a_hub_that_is_not_there_is_reported(
    source: ModelSource, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{free.getsockname()[1]}"
    point_at(monkeypatch, nowhere)
    with pytest.raises(
        SystemFault, match=rf"cannot be downloaded from {source.hub} \({nowhere}\)"
    ) as caught:
        fetch(source, PATTERN)
    (other,) = CLIENTS.keys() - {source.hub}
    first, advice, cause = str(caught.value).splitlines()
    assert first == (
        f"dstrain: error: {TINY}: cannot be downloaded from {source.hub} ({nowhere})"
    )
    assert advice == (
        f"  complete files are kept: run the same command again, or try --hub {other}"
    )
    assert cause.startswith("  the cause: ") and "Connection refused" in cause
    assert not Path("models/Tiny").exists()


@pytest.mark.usefixtures("server")
def test_a_file_that_cannot_be_written_is_reported_with_its_folder() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(
            SystemFault, match=rf"models/{TINY}: cannot be written: File too large"
        ):
            fetch(ModelSource(TINY, hub="huggingface"), PATTERN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    check_nothing_is_half()


def test_a_full_disk_is_reported_with_its_path(server: Server) -> None:
    source = ModelSource(TINY, hub="modelscope")
    for name in NAMES:
        staged = Path(
            "models",
            TINY,
            STAGING,
            f"{name}.incomplete",
        )
        staged.parent.mkdir(parents=True, exist_ok=True)
        staged.symlink_to("/dev/full")
    with pytest.raises(
        SystemFault,
        match=rf"models/{TINY}: cannot be written: {os.strerror(errno.ENOSPC)}",
    ) as caught:
        fetch(source, PATTERN)
    assert "complete files are kept: free some space" in str(caught.value)
    check_nothing_is_half()
    for path in Path("models", TINY, STAGING).rglob("*.incomplete"):
        path.unlink()
    check_the_next_run_completes(server, source)


def test_too_little_room_is_reported_before_anything_is_fetched(
    source: ModelSource, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dstrain.models.hub.source.shutil.disk_usage",
        lambda _: SimpleNamespace(free=SIZE),
    )
    with pytest.raises(
        SystemFault,
        match=rf"models/{TINY}: 600,012 bytes are to be downloaded, but only 300,000 are free",
    ):
        fetch(source, PATTERN)
    assert server.fetched == []


def test_what_is_there_of_a_file_needs_no_room(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ModelSource(TINY, hub="modelscope")
    server.faults = Faults(LARGE, cut_at=100_000)
    with pytest.raises(SystemFault, match="cannot be downloaded"):
        fetch(source, PATTERN)
    free = SimpleNamespace(free=200_011)
    monkeypatch.setattr("dstrain.models.hub.source.shutil.disk_usage", lambda _: free)
    with pytest.raises(SystemFault, match="200,012 bytes are to be downloaded, but"):
        fetch(source, PATTERN)
    free.free += 1
    check_the_next_run_completes(server, source)


def test_a_file_that_changed_on_the_hub_is_not_mixed_with_what_is_here(
    server: Server,
) -> None:
    source = ModelSource(TINY, hub="modelscope")
    server.faults = Faults(LARGE, cut_at=100_000)
    with pytest.raises(SystemFault, match="cannot be downloaded"):
        fetch(source, PATTERN)
    server.faults = Faults()
    (Path("published") / LARGE).write_bytes(os.urandom(SIZE))
    server.add(TINY, Path("published"))  # under the same name
    for _ in range(2):  # what was left of it, then the whole file
        with pytest.raises(
            SystemFault, match="sent something other than what it lists"
        ) as caught:
            fetch(source, PATTERN)
        assert not (Path("models") / TINY / LARGE).exists()
    advice = f"remove {(Path('models') / TINY).resolve()} to download them again"
    assert advice in str(caught.value)
    shutil.rmtree(Path("models") / TINY)
    check_the_next_run_completes(server, source)


def test_a_run_that_died_between_two_files_is_completed(
    source: ModelSource, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = fork()
    if child == 0:
        server.faults = Faults()
        moved = Path.replace

        def die(self: Path, target: Path) -> Path:
            if self.name == "b.safetensors":
                os._exit(9)
            return moved(self, target)

        monkeypatch.setattr(Path, "replace", die)
        fetch(source, PATTERN)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert (Path("models") / TINY / NAMES[0]).exists()
    with monkeypatch.context() as offline:
        offline.setenv("DSTRAIN_SKIP_DOWNLOAD", "True")
        with pytest.raises(
            StateError, match="not all of its files are on this machine"
        ):
            fetch(source, PATTERN)
    check_the_next_run_completes(server, source)
    assert NAMES[0] not in server.fetched
