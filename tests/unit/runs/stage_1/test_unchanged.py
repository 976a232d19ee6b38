"""Stage 1 with nothing to do reads no row, and leaves what it would otherwise."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from dstrain import StateError
from dstrain.cache.commands.verify import verify
from dstrain.registry import PromptRow
from dstrain.runs import data_process
from dstrain.runs.datasets.sources import dataset_source
from dstrain.runs.stage_1.unchanged import code_of_rows
from dstrain.storage import BAD_SAMPLES, file_memory, temporary
from dstrain.storage.file_digests import ModelDigests

from tests.support.caching_family import GUIDED
from tests.support.caching_project import (
    Place,
    change_weights,
    log_units,
    noise_image,
    together,
    write_place,
    write_rows,
)
from tests.support.runs import project, train

CAPTION = "a caption of some length"


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are old enough to be trusted."""
    monkeypatch.setattr(file_memory, "SETTLED", 0)


@pytest.fixture
def place(
    settled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    log_units(monkeypatch, tmp_path)
    place = write_place(tmp_path / "place")
    place.rows[0]["prompt"] = CAPTION
    write_rows(place.data, place.rows)
    place.fill()
    yield place


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".log"
    }


class RowsAreRead(Exception):
    """Ends stage 1 where it begins to read rows."""


def refuse(*_: Any) -> Any:
    raise RowsAreRead


def reads_rows(place: Place, **flags: Any) -> bool:
    """Whether stage 1 goes its ordinary way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dstrain.runs.setup.open_dataset", refuse)
        try:
            place.fill(**flags)
        except RowsAreRead:
            return True
    return False


@pytest.mark.parametrize("size", [1, 2])
def test_no_row_is_read_and_the_cache_is_mended(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    size: int,
) -> None:
    (place.data / "2.png").touch()
    place.fill()
    before = files(place.cache)
    # What is missing, or was left by runs that were killed.
    next((place.cache / "index").iterdir()).unlink()
    mark = place.cache / ".reading-node-7-0123abcd.json"
    for path in (mark, temporary(place.cache / "plans/x"), place.cache / BAD_SAMPLES):
        path.touch()
        os.utime(path, (1, 1))
    monkeypatch.setattr("dstrain.runs.setup.open_dataset", refuse)
    caplog.clear()
    together(size, lambda processes: data_process(place.setup(), processes))
    count, command = caplog.messages
    assert "0 of 4 samples" in count
    assert "--task sft:train" in command
    assert files(place.cache) == before


def test_model_files_are_read_once(place: Place) -> None:
    ModelDigests().path.unlink()  # as where they come from elsewhere
    assert not reads_rows(place)
    assert ModelDigests().path.exists()


def another_caption(place: Place) -> None:
    place.rows[1]["prompt"] = "changed"
    write_rows(place.data, place.rows)


def another_image_of_the_same_time(place: Place) -> None:
    path = place.data / "2.png"
    times = path.stat()
    noise_image(9).save(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def damaged_columns(place: Place) -> None:
    for path in place.columns:
        path.write_bytes(path.read_bytes()[:-1])


def older_metadata_again(place: Place) -> None:
    old = (place.data / "metadata.csv").read_bytes()
    write_rows(place.data, place.rows[:2])
    place.fill()
    (place.data / "metadata.csv").write_bytes(old)


CHANGES: dict[str, Callable[[Place], object]] = {
    "another caption": another_caption,
    "a touched image": lambda place: (place.data / "2.png").touch(),
    "another image of the same time": another_image_of_the_same_time,
    "a missing image": lambda place: (place.data / "3.png").unlink(),
    "a deleted shard": lambda place: place.shards[0].unlink(),
    "other weights": lambda place: change_weights("vae", place),
    "damaged columns": damaged_columns,
    "a damaged record": lambda place: place.plans[0].write_bytes(b"{}"),
    "no plan": lambda place: place.plans[0].unlink(),
    "older metadata again": older_metadata_again,
    "a secret in a row": lambda place: os.environ.update(HF_TOKEN=CAPTION),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_ends_it(
    name: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "not in a row")
    assert not reads_rows(place)
    CHANGES[name](place)
    assert reads_rows(place)


@pytest.mark.parametrize("name", ["own.py", "own/__init__.py"])
def test_another_code_of_the_family_ends_it(
    name: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a check of a column, and of a family that is a single module."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("A = 1")
    folders = [str(path.parent)] if path.name == "__init__.py" else None
    spec = spec_from_file_location("own", path, submodule_search_locations=folders)
    monkeypatch.setattr("dstrain.storage.hashing.find_spec", lambda package: spec)
    place.fill()
    assert not reads_rows(place)
    path.write_text("A = 2")
    assert reads_rows(place)


ROW = '[{"image": "0.png", "prompt": "%s"}]'
WRITTEN = [
    ("metadata.csv", 'say "a word"', 'image,prompt\n0.png,"say ""a word"""\n'),
    ("metadata.json", 'say "a word"', ROW % r"say \"a word\""),
    ("metadata.json", "one/two/three", ROW % r"one\/two\/three"),
    ("metadata.json", "a wörd or two", ROW % r"a w\u00f6rd or two"),
    ("0.txt", "some words", "some words"),
]


@pytest.mark.parametrize(("name", "secret", "text"), WRITTEN)
def test_a_secret_is_seen_in_whatever_way_it_is_written(
    name: str, secret: str, text: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place.folder / "told"
    folder.mkdir()
    shutil.copy(place.data / "0.png", folder)
    (folder / name).write_text(text)
    given = {"dataset_base_path": str(folder)}
    for flags in (given, {"dataset": (json.dumps(given),)}):  # alone, and the second
        monkeypatch.delenv("HF_TOKEN", raising=False)
        place.fill(**flags)
        assert not reads_rows(place, **flags)
        monkeypatch.setenv("HF_TOKEN", secret)
        assert reads_rows(place, **flags)


@pytest.mark.parametrize(
    "flags",
    [
        {"max_pixels": 4096},
        {"on_long_prompt": "error"},
        {"variant": "other"},
        {"task": GUIDED},
        {"dataset_root": (Path(),)},
    ],
)
def test_other_flags_end_it(place: Place, flags: dict[str, Any]) -> None:
    assert reads_rows(place, **flags)


def test_rows_of_plugins_end_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = place.setup()
    source = dataset_source(setup.config)
    row = PromptRow("a", "a", "--x")
    rows = [row, replace(row, text="b"), replace(row, prompt="b")]
    rows.append(replace(row, arguments={"seed": 1}))
    found = {
        code_of_rows(replace(setup, prompt_rows=some), source)
        for some in [(), *((one,) for one in rows), rows]
    }
    assert len(found) == 6


@pytest.mark.usefixtures("tiny", "settled")
def test_values_of_a_preview_that_are_gone_come_again(tmp_path: Path) -> None:
    project(tmp_path)
    cache = tmp_path / "cache"
    flags: dict[str, Any] = {"task": "sft:data_process", "feature_cache": cache}
    train(tmp_path, **flags)
    before = set((cache / "shards").iterdir())
    flags["preview_prompt"] = ("an owl",)
    train(tmp_path, **flags)
    (added,) = set((cache / "shards").iterdir()) - before
    added.unlink()
    with pytest.raises(StateError):
        verify(cache)
    train(tmp_path, **flags)
    verify(cache)


def test_files_that_were_just_written_are_not_trusted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_memory, "SETTLED", 10**12)
    (place.data / "2.png").touch()
    change_weights("vae", place)
    place.fill()
    assert reads_rows(place)


def test_rows_that_are_decoded_are_always_read(place: Place) -> None:
    place.fill(on_bad_sample="skip")
    assert reads_rows(place, on_bad_sample="skip")
