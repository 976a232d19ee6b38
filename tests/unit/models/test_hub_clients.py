"""Failures of a hub, a disk or a connection end in one error, leave no half file, and
the next run completes what is missing.
"""

import errno
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from dstrain.config.schema import Hub
from dstrain.errors import DstrainError, StateError, SystemFault
from dstrain.models.hub import STAGING, ModelSource, fetch
from dstrain.storage.hashing import sha256

from tests.support.hub_server import Faults, serving, use
from tests.support.hub_server import Hub as Server

TINY, PATTERN, LARGE = (
    "Tiny/Tiny",
    "transformer/*.safetensors",
    "transformer/b.safetensors",
)
NAMES = ["transformer/a.safetensors", LARGE]
SIZE = 300_000


class Case(NamedTuple):
    """A failure, and the error that it leads to.

    continued: in the same process the file is continued where it was cut.
    """

    name: str
    faults: Faults
    error: type[DstrainError] | None
    says: str = ""
    continued: bool = False


CASES = (
    Case("cut once", Faults(LARGE, 1, cut_at=100_000), None, continued=True),
    Case(
        "cut always",
        Faults(LARGE, cut_at=100_000),
        SystemFault,
        "cannot be downloaded from .*: .*b.safetensors",
        True,
    ),
    Case("cut once, no ranges", Faults(LARGE, 1, cut_at=100_000, no_range=True), None),
    Case(
        "cut always, no ranges",
        Faults(LARGE, cut_at=100_000, no_range=True),
        SystemFault,
        "cannot be downloaded from",
    ),
    Case(
        "wrong bytes",
        Faults(LARGE, wrong=True),
        SystemFault,
        "did not give what it lists: .*b.safetensors",
    ),
    Case(
        "wrong bytes of a small file",
        Faults("config.json", wrong=True),
        SystemFault,
        "did not give what it lists",
    ),
    Case(
        "too short",
        Faults(LARGE, short=True),
        SystemFault,
        r"(did not give what it lists|cannot be downloaded): |size",
    ),
    Case("slow", Faults(LARGE, delay=0.7), SystemFault, "cannot be downloaded from"),
    Case("slow once", Faults(LARGE, 1, delay=0.7), None),
    Case(
        "listed and not there", Faults(LARGE, status=404), SystemFault, "b.safetensors"
    ),
    Case(
        "file refused",
        Faults(LARGE, status=403),
        SystemFault,
        "does not allow it: .*b.safetensors",
    ),
    Case(
        "server error",
        Faults(LARGE, status=500),
        SystemFault,
        "cannot be downloaded from",
    ),
    Case("server error once", Faults(LARGE, 1, status=500), None),
    Case("busy once", Faults(LARGE, 1, status=503), None),
    Case(
        "list refused",
        Faults(listing=True, status=403),
        SystemFault,
        "does not allow it",
    ),
    Case(
        "access token needed",
        Faults(listing=True, status=401),
        SystemFault,
        "does not allow it",
    ),
    Case(
        "no such model",
        Faults(listing=True, status=404),
        StateError,
        "has no such model",
    ),
    Case(
        "list server error",
        Faults(listing=True, status=500),
        SystemFault,
        "cannot be downloaded from",
    ),
    Case("list server error once", Faults(times=1, listing=True, status=500), None),
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
        ".lock",
        "transformer",
    }
    assert {path.name for path in (folder / "transformer").iterdir()} == {
        "a.safetensors",
        "b.safetensors",
        "config.json",
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_fault_of_a_hub_is_survived_or_told_and_leaves_nothing_half(
    case: Case, server: Server, source: ModelSource, capfd: pytest.CaptureFixture[str]
) -> None:
    server.faults = case.faults
    if case.error is None:
        assert fetch(source, PATTERN) == NAMES
        assert server.ranges == (["bytes=100000-"] if case.continued else server.ranges)
    else:
        with pytest.raises(case.error, match=case.says) as caught:
            fetch(source, PATTERN)
        assert str(caught.value).startswith(
            f"dstrain: error: {TINY}: {source.hub} " if "allow" in case.says else ""
        )
        assert len(str(caught.value).splitlines()) <= 4
        assert "Traceback" not in capfd.readouterr().err
    check_nothing_is_half()
    check_the_next_run_completes(server, source)
    if case.continued and case.error:
        # huggingface_hub starts a file again that another process was fetching.
        continued = source.hub == "modelscope"
        assert server.ranges == (["bytes=100000-"] if continued else [])
        assert server.fetched == [LARGE]


def test_a_hub_that_is_not_there_is_told(
    source: ModelSource, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{free.getsockname()[1]}"
    for name in ("HF_ENDPOINT", "MODELSCOPE_ENDPOINT"):
        monkeypatch.setenv(name, nowhere)
    with pytest.raises(
        SystemFault, match=rf"cannot be downloaded from {source.hub} \({nowhere}\)"
    ) as caught:
        fetch(source, PATTERN)
    assert (
        f"put its files below {Path('models').resolve()}/{TINY}, or try --hub"
        in str(caught.value)
    )
    assert not Path("models/Tiny").exists()


@pytest.mark.usefixtures("server")
def test_a_file_that_cannot_be_written_is_told_with_its_folder() -> None:
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


def test_a_full_disk_is_told_with_its_path(server: Server) -> None:
    source = ModelSource(TINY, hub="modelscope")
    for name in NAMES:
        staged = Path(
            "models",
            TINY,
            STAGING,
            sha256(Path("published") / name),
            f"{name}.incomplete",
        )
        staged.parent.mkdir(parents=True)
        staged.symlink_to("/dev/full")
    with pytest.raises(
        SystemFault,
        match=rf"models/{TINY}: cannot be written: {os.strerror(errno.ENOSPC)}",
    ) as caught:
        fetch(source, PATTERN)
    assert "complete files are kept: make room" in str(caught.value)
    check_nothing_is_half()
    for path in Path("models", TINY, STAGING).rglob("*.incomplete"):
        path.unlink()
    check_the_next_run_completes(server, source)


def test_too_little_room_is_told_before_anything_is_fetched(
    source: ModelSource, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dstrain.models.hub.shutil.disk_usage", lambda _: SimpleNamespace(free=SIZE)
    )
    with pytest.raises(
        SystemFault,
        match=rf"models/{TINY}: 600,012 bytes are to be downloaded, and 300,000 are free",
    ):
        fetch(source, PATTERN)
    assert server.fetched == []


def test_room_is_asked_for_what_an_interrupted_fetch_has_not_yet(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ModelSource(TINY, hub="modelscope")
    server.faults = Faults(LARGE, cut_at=100_000)
    with pytest.raises(SystemFault, match="cannot be downloaded"):
        fetch(source, PATTERN)
    monkeypatch.setattr(
        "dstrain.models.hub.shutil.disk_usage",
        lambda _: SimpleNamespace(free=SIZE - 100_001),
    )
    with pytest.raises(
        SystemFault, match=r": 200,000 bytes are to be downloaded, and 199,999 are free"
    ):
        fetch(source, PATTERN)
    monkeypatch.setattr(
        "dstrain.models.hub.shutil.disk_usage",
        lambda _: SimpleNamespace(free=SIZE - 100_000),
    )
    check_the_next_run_completes(server, source)


def test_what_was_left_half_of_another_content_is_no_part_of_this_one(
    source: ModelSource, server: Server
) -> None:
    server.faults = Faults(LARGE, cut_at=100_000)
    with pytest.raises(SystemFault, match="cannot be downloaded"):
        fetch(source, PATTERN)
    (Path("published") / LARGE).write_bytes(os.urandom(SIZE))
    server.add(TINY, Path("published"))  # under the same name
    check_the_next_run_completes(server, source)
    assert server.ranges == []


def test_a_run_that_died_between_two_files_is_completed(
    source: ModelSource, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = os.fork()
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
        with pytest.raises(StateError, match="some of the files are missing"):
            fetch(source, PATTERN)
    check_the_next_run_completes(server, source)
    assert NAMES[0] not in server.fetched
