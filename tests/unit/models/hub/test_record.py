"""The record beside fetched files: what it tells, when a file is not what was fetched,
and which files are chosen.
"""

import os
import shutil
import time
from pathlib import Path

import pytest
from dstrain import ModelConfig, StateError
from dstrain.config.options import Hub
from dstrain.models.hub import RECORD, ModelSource, Record, fetch, find_local, select
from dstrain.storage import file_mark, sha256

from tests.support.hub_server import SHARDS, TINY, Hub as Server, commit

pytestmark = pytest.mark.usefixtures("tiny")


def test_a_record_tells_repository_revision_commit_size_and_sha256_of_each_file(
    server: Server, hub: Hub
) -> None:
    fetch(ModelSource(TINY, hub=hub), "transformer/*.safetensors")
    record = Record.read(Path("models") / TINY)
    assert record is not None
    assert (record.model_id, record.hub) == (TINY, hub)
    usual = {
        "modelscope": ("master", ""),
        "huggingface": ("main", commit(server.models[TINY]["main"])),
    }
    assert (record.revision, record.commit) == usual[hub]
    assert set(record.kept) == {*SHARDS, "transformer/config.json"}

    for name, file in record.kept.items():
        path = Path("models") / TINY / name
        assert (file.mark, file.sha256) == (file_mark(path), sha256(path))


def test_a_file_that_was_changed_is_named_and_not_written_over(
    server: Server, hub: Hub
) -> None:
    source, path = ModelSource(TINY, hub=hub), Path("models") / TINY / SHARDS[0]
    fetch(source, "transformer/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    time.sleep(0.05)  # longer than the clock of file systems stands still
    path.write_bytes(content)
    with pytest.raises(
        StateError, match=rf"{SHARDS[0]}: was changed after its download: its sha256"
    ):
        fetch(source, "transformer/*.safetensors")
    assert path.read_bytes() == content


def test_a_copy_is_not_read_again_if_it_kept_the_times_and_is_whole_if_it_did_not(
    server: Server, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = ModelSource(TINY, hub=hub), Path("models") / TINY
    fetch(source, "transformer/*.safetensors")
    shutil.copytree(folder, "copy")  # with the times
    shutil.rmtree(folder)
    shutil.copytree("copy", folder)
    read: list[Path] = []

    def reading(path: Path) -> str:
        read.append(path)
        return sha256(path)

    monkeypatch.setattr("dstrain.models.hub.record.sha256", reading)
    assert find_local(source, "transformer/*.safetensors") == SHARDS
    assert read == []
    os.utime(folder / SHARDS[0])
    assert find_local(source, "transformer/*.safetensors") == SHARDS
    assert read == [folder.resolve() / SHARDS[0]]


def test_files_that_were_put_here_are_taken_as_they_are_if_their_shards_are_whole(
    server: Server, hub: Hub
) -> None:
    source, folder = ModelSource(TINY, hub=hub), Path("models") / TINY
    shutil.copytree("published", folder)
    assert fetch(source, "transformer/*.safetensors") == SHARDS
    assert server.requests == []
    (folder / SHARDS[1]).unlink()
    with pytest.raises(
        StateError,
        match=r"1 shard is missing, such as transformer/model-2-of-2\.safetensors",
    ):
        ModelConfig(None, TINY, "transformer/*.safetensors").files()
    assert fetch(source, "transformer/*.safetensors") == SHARDS
    assert server.fetched == [
        SHARDS[1]
    ]  # what was here is what the hub lists, so it is recorded
    (folder / RECORD).unlink()
    (folder / SHARDS[1]).unlink()
    (folder / SHARDS[0]).write_bytes(b"my own")
    with pytest.raises(StateError, match="differs from the file of"):
        fetch(source, "transformer/*.safetensors")
    assert (folder / SHARDS[0]).read_bytes() == b"my own"


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
    files = [
        "a.safetensors",
        "b.pth",
        "x/a.json",
        "x/code.py",
        "x/w.bin",
        "x/y/b.safetensors",
        ".gitattributes",
    ]
    assert select(files, pattern) == wanted


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": 2}',
        b'{"format": 1, "tree": {"a": {}}, "kept": {}}',
    ],
)
def test_a_damaged_record_is_named(damage: bytes, server: Server) -> None:
    fetch(ModelSource(TINY), "vae/*.safetensors")
    path = Path("models") / TINY / RECORD
    path.write_bytes(damage)
    with pytest.raises(StateError, match=rf"{RECORD}: cannot be read"):
        fetch(ModelSource(TINY), "vae/*.safetensors")
    assert path.read_bytes() == damage
