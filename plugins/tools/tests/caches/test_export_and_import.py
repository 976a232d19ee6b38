"""`dstrain cache export` writes what the chosen plans use, and nothing else; `dstrain cache
import` adds it, whole or not at all, and is not tricked.
"""

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
from dstrain import StateError, UsageError
from dstrain.cache.backend.plan_files import read_record
from dstrain.cache.commands.listing import listing
from dstrain.cache.commands.verify import verify
from dstrain.cli.main import main
from dstrain.storage import hash_json
from dstrain_tools.caches.exporting import export
from dstrain_tools.caches.importing import import_cache

from tests.support.caching_project import Place, noise_image
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
    """What a command that failed has left."""
    return [
        path.name for path in folder.rglob("*") if not path.name.startswith(".dstrain")
    ]


def plans(cache: Path) -> list[str]:
    return [one["name"] for one in listing(cache)["plans"]]


def test_a_folder_is_a_cache_of_its_own(shared_place: Place, tmp_path: Path) -> None:
    new = tmp_path / "deep/new"
    export(shared_place.cache, new / "out", [])
    verify(new / "out")
    assert listing(new / "out")["units"] == listing(shared_place.cache)["units"]
    assert os.listdir(new) == ["out"]


def test_a_tar_has_plain_files_without_times_or_owners(
    shared_place: Place, tmp_path: Path
) -> None:
    for name in ("a.tar", "b.tar"):
        export(shared_place.cache, tmp_path / name, [])
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar", "r:") as tar:
        members = tar.getmembers()
    assert members[0].name == "store.json"
    assert members[-1].name.startswith("plans/")
    assert all(one.isreg() and one.mtime == one.uid == 0 for one in members)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "b.tar"]


@pytest.mark.parametrize("name", ["out", "out.tar"])
def test_of_several_plans_only_what_the_chosen_one_uses(
    two_plans: Place, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    new = plans(two_plans.cache)[1]
    export(two_plans.cache, tmp_path / name, [new[:7]])
    folder = tmp_path / "out"
    if name == "out.tar":
        with tarfile.open(tmp_path / name) as tar:
            tar.extractall(folder, filter="data")
    found = listing(folder)
    assert f"1 plan, {found['values']} values" in capsys.readouterr().out
    assert plans(folder) == [new]
    assert found["rows"] == 2
    assert found["used_by_no_plan"]["values"] == 0
    assert found["values"] < listing(two_plans.cache)["values"]
    verify(folder)


def test_an_output_that_exists_or_would_be_compressed_is_refused(
    shared_place: Place, tmp_path: Path
) -> None:
    (tmp_path / "out.tar").write_text("mine")
    (tmp_path / "out").mkdir()
    for name in ("out.tar", "out", "out.tar.gz", "out.zip"):
        with pytest.raises(UsageError, match=name) as caught:
            export(shared_place.cache, tmp_path / name, [])
        assert caught.value.where == "OUTPUT"
    assert (tmp_path / "out.tar").read_text() == "mine"
    assert left(tmp_path / "out") == []


def test_a_damaged_or_incomplete_cache_is_refused_and_nothing_is_written(
    place: Place, tmp_path: Path
) -> None:
    (shard,), (plan,) = place.shards, place.plans
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for name in ("out", "out.tar"):
        with pytest.raises(StateError, match=str(shard)):
            export(place.cache, tmp_path / "to" / name, [])
    for path, where in ((shard, plan), (plan, place.cache)):
        path.unlink()
        with pytest.raises(StateError) as caught:
            export(place.cache, tmp_path / "to/out", [])
        assert caught.value.where == str(where)
    assert not list((tmp_path / "to").iterdir())


def test_an_import_is_added_to_what_is_there_and_is_the_newest(
    exported: Path, place: Place
) -> None:
    place.fill(max_pixels=4096)
    own = plans(place.cache)
    for source in (exported, exported.with_suffix("")):
        import_cache(source, place.cache)
        found = plans(place.cache)
        assert len(found) == 3
        assert found[-1] not in own
    verify(place.cache)


def test_stage_2_trains_as_on_the_machine_that_has_images_and_encoders(
    tiny: Path, tmp_path: Path
) -> None:
    here, away = project(tmp_path / "here"), tmp_path / "away"
    flags: dict[str, Any] = {"task": "sft:train", "max_steps": 3}
    train(here, task="sft:data_process", feature_cache=here / "cache")
    want = files(train(here, feature_cache=here / "cache", **flags))
    export(here / "cache", tmp_path / "cache.tar", [])
    shutil.copytree(here / "model/transformer", away / "model/transformer")
    shutil.rmtree(here)
    import_cache(tmp_path / "cache.tar", away / "cache")
    paths = sorted(map(str, (away / "model").rglob("*.safetensors")))
    flags |= {"dataset_base_path": None, "model_paths": json.dumps([paths])}
    got = files(train(away, feature_cache=away / "cache", **flags))
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
    assert left(tmp_path / "to/cache") == []
    assert [path.name for path in tmp_path.iterdir()] == ["bad.tar"]


def refused(bad: Path, cache: Path) -> None:
    with pytest.raises(StateError) as caught:
        import_cache(bad, cache)
    assert caught.value.where == str(bad)
    assert left(cache) == []


def test_a_tar_that_is_cut_or_changed_anywhere_is_refused(
    exported: Path, tmp_path: Path
) -> None:
    whole, bad = exported.read_bytes(), tmp_path / "bad.tar"
    with tarfile.open(exported) as tar:
        members = [one for one in tar.getmembers() if one.name != "store.json"]
    end = max(one.offset_data + one.size for one in members)
    for kept in (0, 10, 600, end - 2000):
        bad.write_bytes(whole[:kept])
        refused(bad, tmp_path / "cache")
    for one in members:
        for at in (0, one.size // 2, one.size - 1):
            content = bytearray(whole)
            content[one.offset_data + at] ^= 4
            bad.write_bytes(content)
            refused(bad, tmp_path / "cache")


def test_killed_at_any_moment_it_leaves_nothing_half(
    exported: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "to/cache"
    body = partial(import_cache, exported, cache)
    total = events(body, tmp_path / "to")
    whole = listing(cache)
    for event in range(0, total, 3):
        shutil.rmtree(tmp_path / "to")
        assert killed_at(event, body, tmp_path / "to", torn=bool(event % 2))
        if (cache / "store.json").exists():
            verify(cache)
        import_cache(exported, cache)
        verify(cache)
        assert listing(cache)["units"] == whole["units"], event
        assert not list(cache.glob(".tmp-*")), event


def hostile(plan: Path) -> Path:
    """Put a plan of a stranger, with a hash that fits, beside another one."""
    record = read_record(plan)
    record["about"]["prompt_rows"] = ["x"]
    path = plan.with_stem("0" * 40)
    head = {"record": record, "digest": hash_json("record", record)}
    path.write_text(json.dumps(head) + "\n")
    return path


def test_the_plan_of_a_stranger_is_refused_by_every_command(
    exported: Path,
    shared_place: Place,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = shutil.copytree(exported.with_suffix(""), tmp_path / "export")
    (plan,) = (source / "plans").glob("*.json")
    path = hostile(plan)
    before = left(shared_place.cache)
    with pytest.raises(StateError, match=path.name):
        import_cache(source, tmp_path / "cache")
    assert left(tmp_path / "cache") == []
    with pytest.raises(StateError):
        verify(source)
    problem, _ = capsys.readouterr().out.splitlines()
    assert problem.startswith(f"{path}: ")
    filled = partial(shared_place.fill, feature_cache=source)
    trained = partial(shared_place.values, feature_cache=source)
    for use in (partial(listing, source), filled, trained):
        with pytest.raises(StateError) as caught:
            use()
        assert caught.value.where == str(path)
        assert caught.value.exit_code == 3
    assert left(shared_place.cache) == before


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
    said = capsys.readouterr().err.splitlines()
    assert left(place.cache) == before
    assert place.values() == new != old
    apart, removal = (line.partition(": dstrain ")[2] for line in said[-2:])
    assert main(shlex.split(apart)) == 0
    verify(place.cache.with_name("cache-imported"))
    assert main([*shlex.split(removal), "--yes"]) == 0
    import_cache(tmp_path / "old.tar", place.cache)
    noise_image(0).save(place.data / "0.png")
    assert place.values() == old


def test_files_of_others_in_a_cache_are_not_exported_and_stay_at_an_import(
    place: Place, tmp_path: Path
) -> None:
    theirs = [place.cache / name for name in ("notes.txt", "shards/a.bin", "plans/a")]
    for path in theirs:
        path.write_text("mine")
    export(place.cache, tmp_path / "out", [])
    exported = {path.name for path in (tmp_path / "out").rglob("*")}
    assert not {"notes.txt", "a.bin", "a"} & exported
    import_cache(tmp_path / "out", place.cache)
    assert [path.read_text() for path in theirs] == ["mine"] * 3
