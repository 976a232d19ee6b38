"""A plan's record is taken if stage 1 may have written it, and otherwise refused in words."""

import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from dstrain.cache import stored_plans
from dstrain.cache.plan_records import check_record
from dstrain.runs.feature_plan import CacheInfo
from dstrain.runs.reports.preview_plans import RECORDED

from tests.support.plan_facts import IDENTITY, about
from tests.support.runs import project, train

ALWAYS = ("previews",)
"""Fields with a default that every plan has, and that commands read without asking."""
UNIT = "unit encode, negative branch,"


@pytest.fixture
def record() -> dict[str, Any]:
    """A record with all that stage 1 may write."""
    preview = {
        "prompt": "a dog",
        "inputs": ["prompt"],
        "branches": ["positive"],
        "sampling": dict.fromkeys(RECORDED, 1) | {"rand_device": "cpu"},
        "values": {
            "prompt_emb": {"at": "a" * 40},
            "sizes": {"list": [{"value": 1}, {"record": {"a": {"value": None}}}]},
        },
    }
    repeatable = {
        "config": "c",
        "code": "c",
        "settled": True,
        "warnings": [],
        "largest": {"place": "metadata.csv:1", "inputs": {"prompt": {"literal": ""}}},
    }
    identity = {**IDENTITY, "use": "validation", UNIT: {"outputs": {"a": "tensor"}}}
    files = {"vae": [["/vae", "", [1, 2, 3, 4, "d"]]]}
    more = {
        "previews": [preview],
        "sizes": [["8 x 8", 1, 0.5]],
        "config": {},
        "repeatable": repeatable,
    }
    return {
        "identity": identity,
        "about": {**about(), **more, "files": files, "configs": {"vae": {"a": 1}}},
        "columns": dict.fromkeys(("files", "folders", "samples"), "0" * 32),
        "sequence": 1,
    }


def test_what_stage_1_may_write_is_taken(record: dict[str, Any]) -> None:
    check_record(record)
    record["about"]["repeatable"] = {}
    check_record(record)
    record["about"]["repeatable"] = {**record["about"]["repeatable"]}
    del record["about"]["config"]
    check_record(record)


@pytest.mark.usefixtures("tiny")
def test_what_stage_1_writes_is_taken(tmp_path: Path) -> None:
    here = project(tmp_path)
    train(
        here,
        task="sft:data_process",
        feature_cache=here / "cache",
        preview_prompt=("a dog",),
        validation_dataset_base_path=here / "data",
    )
    records = [record for _, record in stored_plans(here / "cache/plans")]
    assert sorted(len(one["about"]["previews"]) for one in records) == [0, 1]
    assert [*{one["identity"].get("use") for one in records}] != [None]


@pytest.mark.parametrize("field", [one.name for one in fields(CacheInfo)])
def test_fields_that_are_needed_are_those_of_cache_info(
    record: dict[str, Any], field: str
) -> None:
    (own,) = (one for one in fields(CacheInfo) if one.name == field)
    is_needed = own.default is own.default_factory is MISSING or field in ALWAYS
    del record["about"][field]
    if is_needed:
        with pytest.raises(ValueError, match=f"about has no {field}"):
            check_record(record)
    else:
        check_record(record)


def put(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    """Returns what replaces an entry of a record."""

    def change(record: dict[str, Any]) -> None:
        for name in path[:-1]:
            record = record[name]
        record[path[-1]] = to

    return change


ABOUT, PREVIEW = ("about",), ("about", "previews", 0)
CHANGES = {
    "identity is no record": put("identity", to=[]),
    "the family is no text": put("identity", "family", to=None),
    "the use is no text": put("identity", "use", to=["validation"]),
    "a unit without outputs": put("identity", UNIT, to={}),
    "outputs are a list": put("identity", UNIT, "outputs", to=[["a"]]),
    "more than a plan has": put("more", to=1),
    "a field of another version": put("about", "more", to=1),
    "the sequence is true": put("sequence", to=True),
    "the sequence is a text": put("sequence", to="1"),
    "columns lead out": put("columns", "samples", to="../" * 10 + "aa"),
    "other columns": put("columns", "more", to="0" * 32),
    "a dataset that is a text": put(*ABOUT, "dataset", to="d"),
    "rows are half": put(*ABOUT, "dataset", "rows", to=0.5),
    "a folder is a number": put(*ABOUT, "dataset", "folders", to=[1]),
    "inputs are lists": put(*ABOUT, "inputs", to=[[["a"]]]),
    "a digest is a list": put(*ABOUT, "components", "vae", to=[]),
    "a configuration is a text": put(*ABOUT, "configs", "vae", to="x"),
    "a mark is short": put(*ABOUT, "files", "vae", 0, 2, to=[1, 2, 3, "d"]),
    "a file is a text": put(*ABOUT, "files", "vae", to=["x"]),
    "a version is a number": put(*ABOUT, "versions", "torch", to=2.6),
    "repeatable is half": put(*ABOUT, "repeatable", to={"settled": True}),
    "warnings are numbers": put(*ABOUT, "repeatable", "warnings", to=[1]),
    "flags are a list": put(*ABOUT, "config", to=["model"]),
    "a preview is a text": put(*PREVIEW, to="a dog"),
    "a preview lies nowhere": put(*PREVIEW, "values", "x", to={"at": "../x"}),
    "a preview has a tensor": put(*PREVIEW, "values", "x", to={"tensor": "x"}),
    "a preview has a deep tensor": put(
        *PREVIEW, "values", "x", to={"list": [{"tensor": "x"}]}
    ),
    "a sampler has another option": put(*PREVIEW, "sampling", "more", to=1),
    "the steps are a text": put(*PREVIEW, "sampling", "num_inference_steps", to="4"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_stage_1_never_writes_is_refused_in_words(
    record: dict[str, Any], name: str
) -> None:
    CHANGES[name](record)
    with pytest.raises(ValueError, match=r"^\w[\w .,\[\]']* (is|has) "):
        check_record(json.loads(json.dumps(record)))


@pytest.mark.parametrize("data", [None, 1, "x", [], {}])
def test_what_is_no_record_at_all_is_refused_in_words(data: Any) -> None:
    with pytest.raises(ValueError, match=r"it has no names|it has no identity|^it "):
        check_record(data)
