"""The record beside fetched files tells when one is not what was fetched."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from dstrain import ModelConfig, StateError
from dstrain.models.hub import RECORD, ModelSource, fetch
from dstrain.models.hub.model_source import find_local
from dstrain.models.hub.record import Record, select
from dstrain.storage import file_mark, sha256

from tests.support.hub_server import SHARDS, TINY, Hub, commit

pytestmark = pytest.mark.usefixtures("tiny")
PATTERN = "transformer/*.safetensors"
FOLDER = Path("models") / TINY


def changed(path: Path) -> bytes:
    """Change the last byte of a file, at another time; returns its content."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    return bytes(content)


def test_a_record_tells_repository_revision_commit_size_and_sha256_of_each_file(
    server: Hub, hub: Any
) -> None:
    fetch(ModelSource(TINY, hub=hub), PATTERN)
    record = Record.read(FOLDER)
    assert record is not None
    assert (record.model_id, record.hub) == (TINY, hub)
    usual: dict[Any, tuple[str, str]] = {
        "modelscope": ("master", ""),
        "huggingface": ("main", commit(server.models[TINY]["main"])),
    }
    assert (record.revision, record.commit) == usual[hub]
    assert set(record.kept) == {*SHARDS, "transformer/config.json"}
    for name, file in record.kept.items():
        path = FOLDER / name
        assert (file.mark, file.sha256) == (file_mark(path), sha256(path))
    # What is fetched from another hub later is of what that one lists.
    (other,) = usual.keys() - {hub}
    fetch(ModelSource(TINY, hub=other), "vae/*.safetensors")
    record = Record.read(FOLDER)
    assert record and (record.hub, record.revision) == (other, usual[other][0])


@pytest.mark.usefixtures("server")
def test_a_file_that_was_changed_is_named_and_not_written_over(hub: Any) -> None:
    """One whose time and size stayed is not read again; a copy may lose its time."""
    source, path = ModelSource(TINY, hub=hub), FOLDER / SHARDS[0]
    fetch(source, PATTERN)
    before = path.stat()
    shutil.copytree(FOLDER, "copy")  # with the times
    shutil.rmtree(FOLDER)
    shutil.copytree("copy", FOLDER)
    os.utime(path)
    assert find_local(source, PATTERN) == SHARDS
    content = changed(path)
    with pytest.raises(StateError, match=f"{SHARDS[0]}: (?s:.*)--model_paths"):
        fetch(source, PATTERN)
    assert path.read_bytes() == content
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert find_local(source, PATTERN) == SHARDS


def test_files_that_were_put_here_are_taken_as_they_are_if_their_shards_are_whole(
    server: Hub, hub: Any
) -> None:
    source = ModelSource(TINY, hub=hub)
    shutil.copytree("published", FOLDER)
    assert fetch(source, PATTERN) == SHARDS
    assert find_local(ModelSource(TINY, "v2", hub), PATTERN) == []  # they may be others
    assert server.requests == []
    (FOLDER / SHARDS[1]).unlink()
    with pytest.raises(StateError, match=f"1 shard .* {SHARDS[1]}"):
        ModelConfig(None, TINY, PATTERN).files()
    assert fetch(source, PATTERN) == SHARDS
    # What was here is what the hub lists, so it is recorded.
    assert server.fetched == [SHARDS[1]]
    (FOLDER / RECORD).unlink()
    (FOLDER / SHARDS[1]).unlink()
    (FOLDER / SHARDS[0]).write_bytes(b"my own")
    with pytest.raises(StateError) as caught:
        fetch(source, PATTERN)
    assert Path(caught.value.where) == (FOLDER / SHARDS[0]).resolve()
    assert (FOLDER / SHARDS[0]).read_bytes() == b"my own"
    shutil.rmtree(FOLDER)
    shutil.copytree("published", FOLDER)
    config = FOLDER / "transformer/config.json"
    config.write_bytes(config.read_bytes() + b"\n")
    (FOLDER / SHARDS[1]).unlink()
    with pytest.raises(StateError) as caught:
        fetch(source, PATTERN)
    assert Path(caught.value.where) == config.resolve()


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("*.safetensors", ["a.safetensors"]),
        ("x/", ["x/a.json", "x/y/b.safetensors"]),
        ("x/*", ["x/a.json"]),
        ("x/*.py", ["x/code.py"]),
        ("x/w.bin", ["x/w.bin"]),
        ("x/*/b.*", ["x/y/b.safetensors"]),
        ("x/[ab].json", ["x/a.json"]),
        ("*", ["a.safetensors"]),
        ("../a.safetensors", []),
    ],
)
def test_patterns_stay_in_a_folder_and_leave_code_out_unless_they_name_it(
    pattern: str, wanted: list[str]
) -> None:
    files = "a.safetensors b.pth x/a.json x/code.py x/w.bin x/y/b.safetensors .hidden"
    files += "".join(f" x/code.{one}" for one in ("pt", "ckpt", "pkl", "pickle"))
    assert select(files.split(), pattern) == wanted


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    "damage",
    [b"", b"[]", b'{"format": 1}', b'{"format": 2, "tree": {"a": {}}, "kept": {}}'],
)
def test_a_damaged_record_is_named(damage: bytes) -> None:
    fetch(ModelSource(TINY), "vae/*.safetensors")
    path = FOLDER / RECORD
    path.write_bytes(damage)
    with pytest.raises(StateError) as caught:
        fetch(ModelSource(TINY), "vae/*.safetensors")
    assert Path(caught.value.where) == path.resolve()
    assert path.read_bytes() == damage
