"""Fields of a frozen dataclass are converted and frozen as they are given."""

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, replace
from typing import Any

import pytest
from dstrain.graph import freeze
from dstrain.graph.frozen import ConvertedField


@dataclass(frozen=True, kw_only=True)
class Record:
    count: ConvertedField[str | int, int] = ConvertedField(int)
    limit: ConvertedField[str, int] = ConvertedField(int, default=7)
    table: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        freeze(self)


def test_a_field_is_converted_and_may_have_a_default() -> None:
    assert Record(count="3").count == 3
    assert Record(count="3").limit == 7
    assert Record(count="3", limit="8").limit == 8
    assert Record(count="3") == Record(count=3)


def test_a_field_without_a_default_is_required() -> None:
    with pytest.raises(TypeError, match="count"):
        Record()  # type: ignore[call-arg]  # what is tested


def test_a_replaced_record_keeps_the_other_fields() -> None:
    assert replace(Record(count="3", limit="8"), count="4") == Record(
        count=4, limit="8"
    )


def test_a_field_cannot_be_set_afterwards() -> None:
    with pytest.raises(FrozenInstanceError):
        Record(count="3").count = 4  # type: ignore[misc]  # what is tested


def test_mappings_and_lists_are_copied_and_cannot_be_changed() -> None:
    table = {"sizes": [1, 2], "nested": {"a": 1}}
    record = Record(count=1, table=table)
    table["more"] = 3
    assert set(record.table) == {"sizes", "nested"}
    assert record.table["sizes"] == (1, 2)
    with pytest.raises(TypeError):
        record.table["more"] = 3  # type: ignore[index]  # what is tested
    with pytest.raises(TypeError):
        record.table["nested"]["a"] = 2
