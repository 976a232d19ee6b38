"""Plans are columns: what is written comes back, and damage is named."""

import errno
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dstrain import SystemFault
from dstrain.cache import (
    PlanSamples,
    commit_plans,
    open_samples,
    plan_files,
    read_record,
    stored_plans,
)
from dstrain.cache.plan_files import NUMBERS, plan_parts, write_plan
from dstrain.errors import CacheError
from dstrain.storage import hash_json, write_columns

from tests.support.plan_facts import IDENTITY, about
from tests.support.plan_lines import plan_line
from tests.support.unreadable import make_unreadable

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
    write_plan(folder, dict(IDENTITY), about(dataset), lines)
    return open_samples(folder, newest(folder))


def newest(folder: Path) -> dict[str, Any]:
    return max(
        (one for _, one in stored_plans(folder)), key=lambda one: one["sequence"]
    )


def columns(folder: Path) -> set[Path]:
    return set(folder.glob("*.arrow"))


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    samples = written(tmp_path)
    facts = (*NUMBERS, "values")
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
        assert newest(tmp_path)["about"]["dataset"]["path"] == dataset
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


def test_a_record_that_cannot_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    ((path, _),) = stored_plans(tmp_path)
    make_unreadable(monkeypatch, path, errno.ESTALE)
    with pytest.raises(SystemFault, match="cannot be read"):
        list(stored_plans(tmp_path))


def test_a_record_that_is_gone_or_nested_too_deep_is_named(tmp_path: Path) -> None:
    path = tmp_path / f"{'0' * 40}.json"
    with pytest.raises(CacheError, match="No such file"):
        read_record(path)
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(CacheError, match="its record: "):
        read_record(path)


def test_a_record_of_a_stranger_is_named_although_its_hash_fits(tmp_path: Path) -> None:
    record = {"identity": {}, "about": {}, "columns": {}, "sequence": 1}
    head = {"record": record, "digest": hash_json("record", record)}
    path = tmp_path / f"{'0' * 40}.json"
    path.write_text(json.dumps(head) + "\n")
    with pytest.raises(CacheError, match="its record: identity has no family"):
        read_record(path)


def columns_of(folder: Path) -> dict[str, Any]:
    """The columns of samples, as Arrow has them."""
    table = plan_files.open_part(folder, newest(folder), "samples")
    return {name: table.column(name).combine_chunks() for name in table.column_names}


def without_rows(columns: dict[str, Any]) -> None:
    del columns["row"]


def with_texts(columns: dict[str, Any]) -> None:
    columns["line"] = columns["line"].cast(pa.string())


def with_gaps(columns: dict[str, Any]) -> None:
    columns["group"] = pa.array([None, 0, 0, 0], pa.int64())


def with_short_addresses(columns: dict[str, Any]) -> None:
    columns["at image"] = pa.array([b"a"] * 4, pa.binary(1))


def with_other_inputs(columns: dict[str, Any]) -> None:
    columns["inputs"] = pa.array([0, 0, 0, 1], pa.int64())


def with_no_json(columns: dict[str, Any]) -> None:
    columns["literal height"] = pa.array(["{"] * 4).dictionary_encode()


def with_plain_literals(columns: dict[str, Any]) -> None:
    columns["literal height"] = pa.array(["{}"] * 4)


@pytest.mark.parametrize(
    "change",
    [
        *(without_rows, with_texts, with_gaps, with_short_addresses),
        *(with_other_inputs, with_no_json, with_plain_literals),
    ],
)
def test_columns_of_a_stranger_are_named_although_their_hash_fits(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    written(tmp_path)
    columns = columns_of(tmp_path)
    change(columns)
    batch = pa.record_batch(columns)
    name = write_columns(tmp_path, batch.schema, [batch])
    record = newest(tmp_path)
    record["columns"]["samples"] = name
    with pytest.raises(CacheError, match="is nothing that stage 1 writes") as caught:
        open_samples(tmp_path, record)
    assert caught.value.where == str(tmp_path / f"{name}.arrow")
