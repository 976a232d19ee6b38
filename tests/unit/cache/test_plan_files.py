"""Plans are columns: what is written comes back, and damage is named."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from dstrain.cache import plan_files
from dstrain.cache.plan_files import (
    PlanSamples,
    commit_plans,
    open_samples,
    plan_parts,
    stored_plans,
    write_plan,
)
from dstrain.errors import CacheError

from tests.support.plan_lines import plan_line

A, B, C = (letter * 40 for letter in "abc")
LINES = [
    plan_line(0, {"image": A, "prompt": B, "height": {"value": 32}}),
    plan_line(2, {"image": C, "prompt": B, "height": {"value": 16}}),
    plan_line(2, {"image": C, "prompt": B, "height": {"value": 32}}, chunk=3),
    plan_line(5, {"image": A, "reference": C}),
]


def written(
    folder: Path, lines: Iterable[Any] = LINES, dataset: str = "d"
) -> PlanSamples:
    """Write a plan, and return the newest."""
    write_plan(folder, {"a": 1}, {"dataset": dataset}, lines)
    return open_samples(folder, newest(folder))


def newest(folder: Path) -> dict[str, Any]:
    return max(
        (one for _, one in stored_plans(folder)), key=lambda one: one["sequence"]
    )


def columns(folder: Path) -> set[Path]:
    return set(folder.glob("*.arrow"))


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    samples = written(tmp_path)
    facts = ("row", "line", "chunk", "inputs", "group", "values")
    assert list(samples) == [{name: line[name] for name in facts} for line in LINES]
    assert samples.sample_ids.tolist() == [[0, 0], [2, 0], [2, 3], [5, 0]]
    assert [samples.index(*one) for one in samples.sample_ids.tolist()] == [0, 1, 2, 3]
    assert samples.has("reference").tolist() == [False, False, False, True]
    assert samples[1:3] == [samples[1], samples[2]]


def test_slices_of_rows_are_as_one(tmp_path: Path, monkeypatch: Any) -> None:
    want = written(tmp_path)
    monkeypatch.setattr(plan_files, "BATCH_ROWS", 2)
    got = written(tmp_path)
    assert list(got) == list(want)
    assert got.digest == want.digest


def test_rows_that_use_a_value_are_found(tmp_path: Path) -> None:
    samples = written(tmp_path)
    assert list(samples.using({B, C, "not an address"})) == [
        *((0, B), (2, C), (2, B), (2, C), (2, B), (5, C))
    ]
    assert not list(samples.using(()))


def test_digests_tell_values_from_places(tmp_path: Path) -> None:
    digest = written(tmp_path).digest
    moved = [{**line, "line": line["line"] + 7} for line in LINES]
    assert written(tmp_path, moved).digest == digest
    grouped = [{**line, "group": 1} for line in LINES]
    assert written(tmp_path, grouped).digest != digest
    assert written(tmp_path, grouped).values_digest == written(tmp_path).values_digest
    other = [*LINES[:3], plan_line(5, {"image": C, "reference": A})]
    assert written(tmp_path, other).values_digest != written(tmp_path).values_digest


def test_every_plan_that_is_written_is_the_newest(tmp_path: Path) -> None:
    for dataset in ("a", "b", "c", "a", "b"):
        written(tmp_path, dataset=dataset)
        assert newest(tmp_path)["about"]["dataset"] == dataset
    assert len({record["sequence"] for _, record in stored_plans(tmp_path)}) == 3


def test_columns_that_no_record_names_go(tmp_path: Path) -> None:
    written(tmp_path)
    first = columns(tmp_path)
    (tmp_path / "notes.arrow").touch()  # somebody's
    (tmp_path / "draft.arrow").touch()
    written(tmp_path, LINES[:2])
    kept = columns(tmp_path)
    ((path, record),) = stored_plans(tmp_path)
    assert kept == {*plan_parts(path, record)[:-1], tmp_path / "notes.arrow"}
    assert first - kept


def test_records_are_committed_where_their_columns_are(tmp_path: Path) -> None:
    written(tmp_path, dataset="a")
    record = newest(tmp_path)
    written(tmp_path, dataset="b")
    commit_plans(tmp_path, [record])
    assert newest(tmp_path) == {**record, "sequence": 3}


@pytest.mark.parametrize("part", ["samples", "files", "folders"])
def test_damaged_columns_are_named(tmp_path: Path, part: str) -> None:
    written(tmp_path)
    record = newest(tmp_path)
    path = tmp_path / f"{record['columns'][part]}.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(CacheError, match=path.name):
            plan_files.open_part(tmp_path, record, part)
        path.unlink(missing_ok=True)
