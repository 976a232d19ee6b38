"""`dstrain cache import` adds what was exported, whole or not at all, and is not tricked."""

import io
import json
import os
import shlex
import shutil
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dstrain import StateError, SystemFault, UsageError
from dstrain.cache import read_record
from dstrain.cli.main import main
from dstrain.runs import export, import_cache
from dstrain.runs.cache_commands.contents import Contents
from dstrain.runs.cache_commands.verify import verified
from dstrain.storage import hash_json, lock

from tests.support.caching_project import Place, noise_image, write_rows
from tests.support.crashes import events, killed_at
from tests.support.runs import files, project, train

SHARD = f"shards/{'0' * 40}.safetensors"


@pytest.fixture(scope="module")
def exported(shared_place: Place) -> Path:
    """A tar; the same as a folder is beside it."""
    for name in ("export.tar", "export"):
        export(shared_place.cache, shared_place.folder / name, [])
    return shared_place.folder / "export.tar"


def left(folder: Path) -> list[str]:
    """What an import that failed has left."""
    return [
        path.name for path in folder.rglob("*") if not path.name.startswith(".dstrain")
    ]


def test_a_tar_and_a_folder_become_a_new_cache(exported: Path, tmp_path: Path) -> None:
    for source in (exported, exported.with_suffix("")):
        cache = tmp_path / f"of{source.suffix}" / "cache"
        import_cache(source, cache)
        assert verified(cache).problems == ()
        assert len(Contents.of(cache).plans) == 1


def test_an_import_is_added_to_what_is_there_and_is_the_newest(
    exported: Path, place: Place
) -> None:
    write_rows(place.data, place.rows[:2])
    place.fill()
    names = {path.name for path in place.plans}
    import_cache(exported, place.cache)
    contents = Contents.of(place.cache)
    assert len(contents.plans) == 3
    assert contents.plans[-1].path.name not in names
    import_cache(exported, place.cache)
    assert len(Contents.of(place.cache).plans) == 3
    assert verified(place.cache).problems == ()


@pytest.mark.usefixtures("tiny")
def test_stage_2_trains_as_on_the_machine_that_has_images_and_encoders(
    tmp_path: Path,
) -> None:
    here = project(tmp_path / "here")
    cache = here / "cache"
    train(here, task="sft:data_process", feature_cache=cache)
    want = files(train(here, task="sft:train", feature_cache=cache, max_steps=3))
    export(cache, tmp_path / "cache.tar", [])
    away = tmp_path / "away"
    shutil.copytree(here / "model/transformer", away / "model/transformer")
    shutil.rmtree(here)
    import_cache(tmp_path / "cache.tar", away / "cache")
    paths = sorted(map(str, (away / "model").rglob("*.safetensors")))
    trained = train(
        away,
        task="sft:train",
        feature_cache=away / "cache",
        dataset_base_path=None,
        max_steps=3,
        model_paths=json.dumps([paths]),
    )
    got = files(trained)
    assert got.keys() == want.keys()
    for name, tensors in want.items():
        assert all(tensor.equal(got[name][key]) for key, tensor in tensors.items())


def member(
    name: str, data: bytes = b"x", **fields: object
) -> Callable[[tarfile.TarFile], None]:
    """Adds a file of this name."""

    def add(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        for field, value in fields.items():
            setattr(info, field, value)
        tar.addfile(info, io.BytesIO(data))

    return add


LINK = tarfile.SYMTYPE
HOSTILE = {
    "a path upwards": member("../evil"),
    "an absolute path": member("/tmp/evil"),
    "a path through a folder": member("shards/../../evil"),
    "another file": member("shards/notes.txt"),
    "a hidden file": member(".dstrain.lock"),
    "a file with a name like a shard's": member(SHARD + ".exe"),
    "a link": member(SHARD, b"", type=LINK, linkname="/etc/passwd"),
    "a hard link": member(SHARD, b"", type=tarfile.LNKTYPE, linkname="store.json"),
    "a link in the place of a folder": member("shards", b"", type=LINK, linkname="/tmp"),
    "a device": member(SHARD, b"", type=tarfile.CHRTYPE),
    "a pipe": member(SHARD, b"", type=tarfile.FIFOTYPE),
    "another folder": member("more", b"", type=tarfile.DIRTYPE),
    "a file twice": member("store.json", b"{}"),
    "a shard that is none": member(SHARD),
    "a plan that is none": member(f"plans/{'0' * 40}.jsonl", b"{}\n"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_tar_is_refused_and_nothing_is_left(
    kind: str, exported: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.tar"
    shutil.copy(exported, bad)
    with tarfile.open(bad, "a:") as tar:
        HOSTILE[kind](tar)
    with pytest.raises(StateError) as caught:
        import_cache(bad, tmp_path / "to/cache")
    assert caught.value.where == str(bad)
    assert "nothing was imported" in caught.value.help_lines[0]
    assert left(tmp_path / "to/cache") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.tar", "to"]


@pytest.mark.parametrize("kept", [0, 10, 600, -2000])
def test_a_tar_that_is_cut_is_refused(
    exported: Path, tmp_path: Path, kept: int
) -> None:
    whole = exported.read_bytes()
    with tarfile.open(exported) as tar:
        end = max(one.offset_data + one.size for one in tar.getmembers())
    bad = tmp_path / "bad.tar"
    bad.write_bytes(whole[: kept if kept >= 0 else end + kept])
    with pytest.raises(StateError, match=r"bad\.tar"):
        import_cache(bad, tmp_path / "cache")
    assert left(tmp_path / "cache") == []


def test_every_changed_byte_of_the_data_is_noticed(
    exported: Path, tmp_path: Path
) -> None:
    with tarfile.open(exported) as tar:
        members = [one for one in tar.getmembers() if one.name != "store.json"]
    whole = exported.read_bytes()
    for one in members:
        for at in (0, one.size // 2, one.size - 1):
            bad = bytearray(whole)
            bad[one.offset_data + at] ^= 4
            (tmp_path / "bad.tar").write_bytes(bad)
            with pytest.raises(StateError):
                import_cache(tmp_path / "bad.tar", tmp_path / "cache")
    assert left(tmp_path / "cache") == []


def test_a_folder_with_links_or_other_files_is_refused(
    exported: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(exported.with_suffix(""), bad)
    (bad / SHARD).symlink_to(exported)
    with pytest.raises(StateError, match="which is no file of an export"):
        import_cache(bad, tmp_path / "cache")
    (bad / SHARD).unlink()
    (bad / "plans/notes.txt").write_text("mine")
    with pytest.raises(StateError, match=r"contains plans/notes\.txt"):
        import_cache(bad, tmp_path / "cache")


def test_a_place_that_is_something_else_is_refused(
    exported: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("mine")
    with pytest.raises(StateError, match="not a feature cache"):
        import_cache(exported, tmp_path / "notes")
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["a.txt"]
    with pytest.raises(SystemFault, match="is a file"):
        import_cache(exported, tmp_path / "notes/a.txt")
    with pytest.raises(UsageError, match="does not exist"):
        import_cache(tmp_path / "nothing.tar", tmp_path / "cache")
    with (
        lock(tmp_path / "cache"),
        pytest.raises(StateError, match="is in use by process"),
    ):
        import_cache(exported, tmp_path / "cache")


@pytest.mark.slow
def test_killed_at_any_moment_it_leaves_nothing_half(
    exported: Path, tmp_path: Path
) -> None:
    body = partial(import_cache, exported, tmp_path / "to/cache")
    total = events(body, tmp_path / "to")
    whole = verified(tmp_path / "to/cache")
    for event in range(total):
        shutil.rmtree(tmp_path / "to")
        assert killed_at(event, body, tmp_path / "to", torn=bool(event % 2))
        cache = tmp_path / "to/cache"
        if (cache / "store.json").exists():
            assert verified(cache).problems == (), event
        import_cache(exported, cache)
        assert verified(cache) == whole, event
        assert not list(cache.glob(".tmp-*")), event


def hostile(plan: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Put a plan of a stranger, with a hash that fits, beside another one."""
    record = read_record(plan)
    change(record)
    path = plan.with_stem("0" * 40)
    head = {"record": record, "digest": hash_json("record", record)}
    path.write_text(json.dumps(head) + "\n")
    return path


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no identity": lambda record: record.update(identity={}),
    "an identity that is a list": lambda record: record.update(identity=[]),
    "a variant that is none": lambda record: record["identity"].update(variant=None),
    "a unit without outputs": lambda record: record["identity"].update({"unit x": {}}),
    "nothing of the run": lambda record: record.update(about={}),
    "no inputs": lambda record: record["about"].pop("inputs"),
    "inputs that are lists": lambda record: record["about"].update(inputs=[[["a"]]]),
    "no previews": lambda record: record["about"].pop("previews"),
    "previews that are texts": lambda record: record["about"].update(previews=["x"]),
    "files that are texts": lambda record: record["about"].update(files={"vae": ["x"]}),
    "no rows": lambda record: record["about"]["dataset"].pop("rows"),
    "a dataset that is a text": lambda record: record["about"].update(dataset="x"),
    "no sequence": lambda record: record.pop("sequence"),
    "a sequence that is a text": lambda record: record.update(sequence="x"),
    "no columns": lambda record: record.update(columns={}),
    "a field of another version": lambda record: record["about"].update(more=1),
    "half of what stage 1 compares": lambda record: record["about"].update(
        repeatable={"settled": True}
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_plan_of_a_stranger_is_refused_in_words_by_every_command(
    name: str, exported: Path, shared_place: Place, tmp_path: Path
) -> None:
    source, cache = tmp_path / "export", tmp_path / "cache"
    shutil.copytree(exported.with_suffix(""), source)
    (plan,) = (source / "plans").glob("*.json")
    path = hostile(plan, CHANGES[name])
    before = left(shared_place.cache)
    with pytest.raises(StateError, match=f"{path.name} is damaged: its record: "):
        import_cache(source, cache)
    assert left(cache) == []
    (problem,) = verified(source).problems
    assert problem.path == path
    listed, filled = Contents.of, partial(shared_place.fill, feature_cache=source)
    trained = partial(shared_place.values, feature_cache=source)
    for use in (partial(listed, source), filled, trained):
        with pytest.raises(StateError, match="its record: ") as caught:
            use()
        assert caught.value.where == str(path)
        assert caught.value.exit_code == 3
    assert left(shared_place.cache) == before


def test_a_plan_of_a_stranger_that_is_there_twice_is_refused(
    exported: Path, tmp_path: Path
) -> None:
    source = tmp_path / "export"
    shutil.copytree(exported.with_suffix(""), source)
    hostile(next((source / "plans").glob("*.json")), lambda record: None)
    with pytest.raises(StateError, match=r"contains plan .* twice"):
        import_cache(source, tmp_path / "cache")
    assert left(tmp_path / "cache") == []


def test_a_plan_of_the_cache_with_newer_values_is_not_replaced(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(place.cache, tmp_path / "old.tar", [])
    old = place.values()
    noise_image(77).save(place.data / "0.png")
    place.fill()
    new = place.values()
    before = left(place.cache)
    assert main(["cache", "import", str(tmp_path / "old.tar"), str(place.cache)]) == 3
    said = capsys.readouterr().err
    assert "with other values; nothing was imported" in said
    assert left(place.cache) == before
    assert place.values() == new != old
    apart, removal = (
        line.partition(": dstrain ")[2] for line in said.splitlines()[-2:]
    )
    assert main(shlex.split(apart)) == 0
    assert verified(place.cache.with_name("cache-imported")).problems == ()
    assert main([*shlex.split(removal), "--yes"]) == 0
    import_cache(tmp_path / "old.tar", place.cache)
    noise_image(0).save(place.data / "0.png")
    assert place.values() == old


def test_a_plan_of_the_cache_with_the_same_values_stays_as_it_is(
    place: Place, tmp_path: Path
) -> None:
    export(place.cache, tmp_path / "old", [])
    (plan,) = place.plans
    os.utime(place.data / "0.png")
    place.fill()
    own = read_record(plan)
    assert own["columns"] != read_record(tmp_path / "old/plans" / plan.name)["columns"]
    import_cache(tmp_path / "old", place.cache)
    assert {**read_record(plan), "sequence": 0} == {**own, "sequence": 0}
    assert verified(place.cache).problems == ()


def test_a_damaged_plan_of_the_cache_is_replaced(place: Place, tmp_path: Path) -> None:
    export(place.cache, tmp_path / "old", [])
    for path in place.columns:
        path.write_bytes(path.read_bytes()[:-1])
    import_cache(tmp_path / "old", place.cache)
    assert verified(place.cache).problems == ()
