"""What is recorded of each of several datasets, and which of those at hand differ."""

import json
from pathlib import Path
from typing import Any

import pytest
from dstrain.runs.datasets.recorded import NamedParts
from dstrain.runs.resolve import resolve
from dstrain.runs.stage_1.plan_writer import part_records

from tests.support.family import write
from tests.support.runs import config

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def place(data: Path, tmp_path: Path) -> Path:
    write(tmp_path / "model")
    return tmp_path


def named(place: Path, data: Path, **changes: Any) -> NamedParts:
    entry = json.dumps({"dataset_base_path": str(data)})
    flags = {"task": "sft:train", "feature_cache": place / "cache", **changes}
    return NamedParts(config(place, dataset=(entry,), **flags))


def test_the_parts_that_are_named_are_compared(place: Path, data: Path) -> None:
    entry = json.dumps({"dataset_base_path": str(data)})
    setup = resolve(config(place, dataset_base_path=data, dataset=(entry,)))
    records = part_records(setup)
    assert [one["rows"] for one in records] == [len(setup.parts[0].dataset.rows)] * 2
    assert records[0] == records[1]
    assert "form" not in records[0]
    dataset: dict[str, Any] = {"parts": records}
    for base in (data, None):
        parts = named(place, data, dataset_base_path=base)
        assert parts.first_changed(dataset) is None
    first, second = records
    # A plan of fewer datasets.
    both = named(place, data, dataset_base_path=place / "other")
    assert both.first_changed({}) == place / "other"
    assert both.first_changed(dataset) is None
    assert parts.first_changed({}) is None
    other = {**second, "sha256": "0"}
    # The first dataset is not named.
    assert parts.first_changed({"parts": [{**first, "sha256": "0"}, second]}) is None
    changed = parts.first_changed({"parts": [first, other]})
    assert changed == data / "metadata.json"
    # Nothing is known of what earlier versions recorded, and of what is not here.
    del other["sha256"]
    assert parts.first_changed({"parts": [first, other]}) is None
    (data / "metadata.json").unlink()
    assert named(place, place / "none").first_changed(dataset) is None
