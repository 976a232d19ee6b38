"""Stage 1 with nothing to do reads no row, and says and leaves what it would otherwise."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain.runs import Setup, data_process
from dstrain.runs.stage_1 import precompute, unchanged
from dstrain.runs.stage_1.unchanged import find_unchanged, may_be_unchanged
from dstrain.storage import file_memory, hashing

from tests.support.caching_project import (
    Place,
    alone,
    change_weights,
    log_units,
    noise_image,
    together,
    write_place,
    write_rows,
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A filled cache, whose files are old enough to be trusted."""
    log_units(monkeypatch, tmp_path)
    monkeypatch.setattr(hashing, "SETTLED", 0)
    monkeypatch.setattr(file_memory, "SETTLED", 0)
    place = write_place(tmp_path / "place")
    place.rows[0]["prompt"] = "a caption of some length"
    for row in place.rows:
        row["note"] = "a column that no input reads"
    write_rows(place.data, place.rows)
    place.fill()
    yield place


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".log"
    }


def refuse(*_: Any) -> Any:
    raise AssertionError("rows are read")


@pytest.mark.parametrize("size", [1, 2])
def test_no_row_is_read_and_the_same_is_said(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    size: int,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(precompute, "may_be_unchanged", lambda _: False)
        caplog.clear()
        data_process(place.setup(), alone())
        want = caplog.messages
    before = files(place.cache)
    monkeypatch.setattr("dstrain.runs.setup.open_dataset", refuse)
    caplog.clear()
    together(size, lambda processes: data_process(place.setup(), processes))
    assert caplog.messages == want
    assert "precomputing 0 of 4 samples" in want[2]
    assert "column is not used by this variant: 'note'" in want[1]
    assert files(place.cache) == before


def test_it_is_seen_of_both_datasets(place: Place, tmp_path: Path) -> None:
    second = tmp_path / "second"
    shutil.copytree(place.data, second)
    flags = {"validation_dataset_base_path": second}
    assert not find_unchanged(place.setup(**flags))
    place.fill(**flags)
    assert len(find_unchanged(place.setup(**flags))) == 2
    (second / "1.png").touch()
    assert not find_unchanged(place.setup(**flags))


def another_caption(place: Place) -> None:
    place.rows[1]["prompt"] = "changed"
    write_rows(place.data, place.rows)


def touched_image(place: Place) -> None:
    (place.data / "2.png").touch()


def another_image_of_the_same_time(place: Place) -> None:
    path = place.data / "2.png"
    times = path.stat()
    noise_image(9).save(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def missing_image(place: Place) -> None:
    (place.data / "3.png").unlink()


def deleted_shard(place: Place) -> None:
    place.shards[0].unlink()


def other_weights(place: Place) -> None:
    change_weights("vae", place)


def damaged_columns(place: Place) -> None:
    for path in place.columns:
        path.write_bytes(path.read_bytes()[:-1])


def damaged_record(place: Place) -> None:
    place.plans[0].write_bytes(b"{}")


def no_plan(place: Place) -> None:
    place.plans[0].unlink()


def older_metadata_again(place: Place) -> None:
    old = (place.data / "metadata.csv").read_bytes()
    write_rows(place.data, place.rows[:2])
    place.fill()
    (place.data / "metadata.csv").write_bytes(old)


def secret_in_a_row(place: Place) -> None:
    os.environ["HF_TOKEN"] = "a caption of some length"


CHANGES: tuple[Callable[[Place], None], ...] = (
    another_caption,
    touched_image,
    another_image_of_the_same_time,
    missing_image,
    deleted_shard,
    other_weights,
    damaged_columns,
    damaged_record,
    no_plan,
    older_metadata_again,
    secret_in_a_row,
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_ends_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, change: Callable[[Place], None]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "not in a row")
    assert find_unchanged(place.setup())
    change(place)
    assert not find_unchanged(place.setup())


def test_other_flags_code_or_versions_end_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert find_unchanged(place.setup())
    assert not find_unchanged(place.setup(max_pixels=4096))
    assert not find_unchanged(place.setup(on_long_prompt="error"))
    assert not find_unchanged(place.setup(variant="other"))
    first = tmp_path / "first"
    first.mkdir()
    assert not find_unchanged(place.setup(dataset_root=(first,)))
    with monkeypatch.context() as patch:
        patch.setattr(unchanged, "code_of_rows", lambda _: "other")
        assert not find_unchanged(place.setup())
    setup = place.setup()
    vars(setup)["versions"] = {**setup.versions, "torch": "0"}
    assert not find_unchanged(setup)


def test_a_recipe_that_sets_the_same_does_not_end_it(place: Place) -> None:
    assert find_unchanged(place.setup(recipe="tiny-style-24gb"))


def test_an_earlier_folder_with_a_name_ends_it(place: Place, tmp_path: Path) -> None:
    second = tmp_path / "images"
    second.mkdir()
    for path in place.data.glob("*.png"):
        shutil.move(path, second)
    flags = {"dataset_root": (second,)}
    place.fill(**flags)
    assert find_unchanged(place.setup(**flags))
    os.link(second / "1.png", place.data / "1.png")
    assert not find_unchanged(place.setup(**flags))


def test_files_that_were_just_written_are_not_trusted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_memory, "SETTLED", 10**12)
    touched_image(place)
    place.fill()
    assert not find_unchanged(place.setup())


@pytest.mark.parametrize(
    "flags", [{"on_bad_sample": "skip"}, {"url_cache": Path("urls")}]
)
def test_rows_that_are_decoded_or_fetched_are_always_read(
    place: Place, flags: dict[str, Any]
) -> None:
    assert may_be_unchanged(place.setup())
    assert not may_be_unchanged(place.setup(**flags))


def test_a_model_may_be_named_through_its_parent(place: Place) -> None:
    """`..` in a path is not in the path that a plan records."""

    def setup() -> Setup:
        found = place.setup()
        models = [
            replace(
                one,
                path=str(
                    Path(one.path).parent
                    / ".."
                    / Path(one.path).parent.name
                    / Path(one.path).name
                ),
            )
            if isinstance(one.path, str) and one.path.endswith(".safetensors")
            else one
            for one in found.models
        ]
        return replace(found, models=tuple(models))

    assert find_unchanged(setup())
    data_process(setup(), alone())
    assert find_unchanged(setup())
