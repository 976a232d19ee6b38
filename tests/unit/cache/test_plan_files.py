"""Plans are columns: what is written comes back, and damage is named."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dstrain import StateError
from dstrain.cache import PlanSamples, StoredPlan, stored_plans
from dstrain.cache.backend.index import create_cache
from dstrain.cache.backend.plan_files import read_record, write_plan
from dstrain.storage import hash_json, write_columns

from tests.support.plan_records import IDENTITY, about, plan_line
from tests.support.runs import project, train

A, B, C = (letter * 40 for letter in "abc")
FACTS = ("row", "line", "chunk", "inputs", "group", "weight", "values")
LINES = [
    plan_line(0, {"image": A, "prompt": B, "height": {"value": 32}}),
    plan_line(2, {"image": C, "prompt": B, "height": {"value": 16}}),
    plan_line(2, {"image": C, "prompt": B, "height": {"value": 32}}, chunk=3),
    plan_line(5, {"image": A, "reference": C}, folders=[("clip", "ab" * 20)]),
]


@pytest.fixture
def plans(tmp_path: Path) -> Path:
    create_cache(tmp_path)
    return tmp_path / "plans"


def write(plans: Path, lines: Iterable[Any] = LINES, dataset: str = "d") -> PlanSamples:
    write_plan(plans.parent, dict(IDENTITY), about(dataset), lines)
    return newest(plans).samples()


def newest(plans: Path) -> StoredPlan:
    return max(stored_plans(plans.parent), key=lambda plan: plan.sequence)


def test_what_is_written_comes_back(plans: Path) -> None:
    samples = write(plans)
    assert list(samples) == [{name: line[name] for name in FACTS} for line in LINES]
    ids = [[0, 0], [2, 0], [2, 3], [5, 0]]
    assert samples.sample_ids.tolist() == ids
    assert [samples.index(*one) for one in ids] == [0, 1, 2, 3]
    assert samples.has("reference").tolist() == [False, False, False, True]
    assert list(samples[-3::2]) == [samples[1], samples[3]]
    (folder,) = newest(plans).columns("folders").to_pylist()
    assert folder == {"place": b"clip", "names": b"\xab" * 20, "sample": 3}
    assert set(samples.names) == {"image", "prompt", "height", "reference"}
    ((path, record),) = stored_plans(plans.parent)
    assert read_record(path) == record


def test_many_rows_and_their_files_come_back(plans: Path) -> None:
    count = 20_000
    mark = [*range(4), "ab" * 32]
    lines = (
        plan_line(row, {"image": f"{row:040x}"}, files=[(f"{row}.png", mark)])
        for row in range(count)
    )
    samples = write(plans, lines)
    assert len(samples) == count
    assert samples[count - 1]["values"] == {"image": {"at": f"{count - 1:040x}"}}
    table = newest(plans).columns("files")
    places = [f"{row}.png".encode() for row in range(count)]
    assert table.column("place").to_pylist() == places
    assert table.column("sample").to_pylist() == [*range(count)]


def test_rows_that_use_a_value_are_found(plans: Path) -> None:
    samples = write(plans)
    assert list(samples.using({B, C, "not an address"})) == [
        *((0, B), (2, C), (2, B), (2, C), (2, B), (5, C))
    ]
    assert not list(samples.using(()))


def test_digests_tell_values_from_places(plans: Path) -> None:
    def digests(lines: Iterable[Any]) -> tuple[str, str]:
        samples = write(plans, lines)
        return samples.digest, samples.values_digest

    whole, values = digests(LINES)
    moved = [{**line, "line": line["line"] + 7} for line in LINES]
    assert digests(moved) == (whole, values)
    for fact in ("row", "group", "weight", "chunk"):
        other_whole, same = digests([{**line, fact: 2} for line in LINES])
        assert other_whole != whole
        assert same == values
    same_height = plan_line(2, {**LINES[2]["values"], "height": {"value": 16}}, chunk=3)
    assert values not in digests([*LINES[:2], same_height, LINES[3]])
    for changed in ({"image": C, "reference": A}, {"image": A, "height": {"value": 1}}):
        other_whole, other = digests([*LINES[:3], plan_line(5, changed)])
        assert other_whole != whole
        assert other != values


def test_columns_that_no_record_names_go(plans: Path) -> None:
    write(plans)
    first = {*newest(plans).parts[:-1]}
    somebodys = plans / "notes.arrow"
    somebodys.touch()
    (plans / "draft.arrow").touch()
    write(plans, LINES[:2])
    kept = set(plans.glob("*.arrow"))
    assert kept == {*newest(plans).parts[:-1], somebodys}
    assert first - kept


# What a stranger wrote, with hashes that fit.


@pytest.fixture(scope="module")
def record(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of a plan that stage 1 wrote, as if it had a preview."""
    here = project(tmp_path_factory.mktemp("filled"))
    train(
        here,
        task="sft:data_process",
        feature_cache=here / "cache",
        validation_dataset_base_path=here / "data",
    )
    records = [record for _, record in stored_plans(here / "cache")]
    assert {one["identity"].get("use") for one in records} == {None, "validation"}
    (record,) = (dict(one) for one in records if not one["identity"].get("use"))
    record["about"]["prompt_rows"] = [
        {
            "prompt": "a dog",
            "inputs": ["prompt"],
            "branches": ["positive"],
            "sampling": {
                "num_inference_steps": 1,
                "guidance_scale": 1,
                "rand_device": "cpu",
            },
            "values": {"prompt_emb": {"at": A}},
        }
    ]
    return record


def read(folder: Path, record: Any) -> Any:
    head = {"record": record, "digest": hash_json("record", record)}
    path = folder / f"{'0' * 40}.json"
    path.write_text(json.dumps(head) + "\n")
    return read_record(path)


def refused(folder: Path, record: Any) -> None:
    with pytest.raises(StateError) as caught:
        read(folder, record)
    assert caught.value.where == str(folder / f"{'0' * 40}.json")


ABOUT: tuple[Any, ...] = ("about",)
ROW: tuple[Any, ...] = (*ABOUT, "prompt_rows", 0)
CHANGES: dict[str, tuple[Any, ...]] = {
    "a unit without outputs": ("identity", "unit encode", {}),
    "more than a plan has": ("more", 1),
    "a field of another version": (*ABOUT, "more", 1),
    "columns lead out": ("columns", "samples", "../" * 10 + "aa"),
    "repeatable is half": (*ABOUT, "repeatable", {"settled": True}),
    "a row lies nowhere": (*ROW, "values", "x", {"at": "../x"}),
    "a row has a deep one": (*ROW, "values", "x", {"list": [{"tensor": ""}]}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_record_that_stage_1_never_writes_is_refused(
    plans: Path, record: dict[str, Any], name: str
) -> None:
    changed: Any = json.loads(json.dumps(record))
    assert read(plans, changed) == record
    *path, last, entry = CHANGES[name]
    inner = changed
    for step in path:
        inner = inner[step]
    inner[last] = entry
    refused(plans, changed)


def test_a_plan_of_older_versions_is_read(plans: Path, record: dict[str, Any]) -> None:
    older: Any = json.loads(json.dumps(record))
    older["about"]["previews"] = older["about"].pop("prompt_rows")
    older["about"]["config"] = {"model": "tiny", "max_pixels": 4096}
    older["about"]["repeatable"] |= {"warnings": ["short"], "dataset": "of 3 rows"}
    found = read(plans, older)["about"]
    assert found["prompt_rows"] == record["about"]["prompt_rows"] != []
    assert "previews" not in found


FREE = re.compile(r"/identity/(?![fvt])|.*/(caption|configs?/|values/|largest/inp)")
"""Places of what may be of any kind."""


def test_everything_is_of_its_kind(plans: Path, record: dict[str, Any]) -> None:
    changed: Any = json.loads(json.dumps(record))

    def change(inner: Any, place: str) -> None:
        for name in inner if isinstance(inner, dict) else range(len(inner)):
            before, here = inner[name], f"{place}/{name}"
            if isinstance(before, dict | list) and before:
                change(before, here)
            elif not FREE.match(here):
                inner[name] = [True]
                refused(plans, changed)
                inner[name] = before

    change(changed, "")


def test_what_every_plan_has_is_needed(plans: Path, record: dict[str, Any]) -> None:
    optional = {"config", "repeatable", "sizes"}
    entries = [(name,) for name in record] + [
        ("about", name) for name in record["about"]
    ]
    for *path, name in entries:
        changed: Any = json.loads(json.dumps(record))
        del (changed["about"] if path else changed)[name]
        (read if name in optional else refused)(plans, changed)
    read(plans, {**record, "about": {**record["about"], "repeatable": {}}})


def test_what_is_no_record_cut_or_nested_too_deep_is_refused(
    plans: Path, record: dict[str, Any]
) -> None:
    for data in (None, 1, "x", [], {}):
        refused(plans, data)
    path = plans / f"{'0' * 40}.json"
    head = {"record": record, "digest": hash_json("record", [])}
    whole = {"record": record, "digest": hash_json("record", record)}
    for content in (json.dumps(head) + "\n", json.dumps(whole), "[" * 100_000 + "\n"):
        path.write_text(content)
        with pytest.raises(StateError) as caught:
            read_record(path)
        assert caught.value.where == str(path)


STRANGE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "texts": ("line", lambda column: column.cast(pa.string())),
    "gaps": ("group", lambda _: pa.array([None, 0, 0, 0], pa.int64())),
    "short addresses": ("at image", lambda _: pa.array([b"a"] * 4, pa.binary(1))),
    "other inputs": ("inputs", lambda _: pa.array([0, 0, 0, 1], pa.int64())),
    "inputs below 0": ("inputs", lambda _: pa.array([0, 0, 0, -1], pa.int64())),
    "no json": ("literal height", lambda _: pa.array(["{"] * 4).dictionary_encode()),
    "plain literals": ("literal height", lambda _: pa.array(["{}"] * 4)),
    "nothing": ("row", lambda _: None),
}


@pytest.mark.parametrize("name", STRANGE)
def test_columns_of_a_stranger_are_named_although_their_hash_fits(
    plans: Path, name: str
) -> None:
    write(plans)
    plan = newest(plans)
    table = plan.columns("samples")
    columns = {one: table.column(one).combine_chunks() for one in table.column_names}
    title, change = STRANGE[name]
    columns[title] = change(columns[title])
    left = {name: column for name, column in columns.items() if column is not None}
    batch = pa.record_batch(left)
    plan.record["columns"]["samples"] = write_columns(plans, batch.schema, [batch])
    with pytest.raises(StateError) as caught:
        plan.samples()
    path = plans / f"{plan.record['columns']['samples']}.arrow"
    assert caught.value.where == str(path)
