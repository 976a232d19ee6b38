"""A key changes with everything a value is the result of, and with nothing else."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypedDict, cast

from dstrain.cache.keys import PlanKeys, step_key
from dstrain.data import Cell, input_key
from dstrain.graph import Plan, Step
from dstrain.plugin import Unit
from dstrain.storage import Digests, hash_json
from torch import Tensor


class Made(TypedDict):
    emb: Tensor


def encode(prompt: str, size: int = 0, *, text_encoder: Any, dtype: Any) -> Made: ...


def other(prompt: str, size: int = 0, *, text_encoder: Any, dtype: Any) -> Made: ...


def branched(prompt: str, *, branch: str) -> Made: ...


STEP = Step(
    Unit(encode), "positive", {"prompt": "prompt", "size": "size"}, {"emb": "emb"}
)
READS = {"prompt": "k1", "size": "k2"}
COMPONENTS = {"text_encoder": "d1", "vae": "d2"}


def test_a_key_changes_with_everything_a_value_is_the_result_of() -> None:
    keys = {
        step_key("family", STEP, READS, COMPONENTS, "float32"),
        step_key("other", STEP, READS, COMPONENTS, "float32"),
        step_key(
            "family",
            replace(STEP, unit=Unit(encode, version=2)),
            READS,
            COMPONENTS,
            "float32",
        ),
        step_key(
            "family", replace(STEP, unit=Unit(other)), READS, COMPONENTS, "float32"
        ),
        step_key("family", STEP, {"prompt": "k2", "size": "k1"}, COMPONENTS, "float32"),
        step_key("family", STEP, {"prompt": "k1"}, COMPONENTS, "float32"),
        step_key("family", STEP, READS, {"text_encoder": "d2"}, "float32"),
        step_key("family", STEP, READS, COMPONENTS, "bfloat16"),
    }
    assert len(keys) == 8


def test_a_key_does_not_change_with_what_the_unit_does_not_use() -> None:
    key = step_key("family", STEP, READS, COMPONENTS, "float32")
    assert key == step_key(
        "family",
        STEP,
        dict(reversed(READS.items())),
        COMPONENTS | {"vae": "d3"},
        "float32",
    )
    assert key == step_key(
        "family", replace(STEP, branch="negative"), READS, COMPONENTS, "float32"
    )


def test_the_branch_is_part_of_a_key_only_if_the_unit_uses_it() -> None:
    step = Step(Unit(branched), "positive", {"prompt": "prompt"}, {"emb": "emb"})
    keys = [
        step_key("f", replace(step, branch=branch), {"prompt": "k"}, {}, "float32")
        for branch in ("positive", "negative")
    ]
    assert keys[0] != keys[1]


def test_literals_of_different_kinds_or_types_have_different_keys(
    tmp_path: Path,
) -> None:
    cells = [
        Cell("text", "1"),
        Cell("integer", 1),
        Cell("number", 1.5),
        Cell("text", ""),
        Cell("texts", ["1"]),
    ]
    assert len({input_key(cell, Digests(Path("absent"))) for cell in cells}) == len(
        cells
    )


def test_a_files_key_is_its_bytes_and_how_they_are_loaded_but_not_its_name(
    tmp_path: Path,
) -> None:
    for name, data in {"a": b"1", "b": b"1", "c": b"2"}.items():
        (tmp_path / name).write_bytes(data)

    def key(*names: str, **parameters: Any) -> str:
        cell = Cell(
            "images",
            None,
            tuple(str(tmp_path / name) for name in names),
            tuple(parameters.items()),
        )
        return input_key(cell, Digests(Path("absent")))

    assert key("a", mode="RGB") == key("b", mode="RGB")
    different = {
        key("a", mode="RGB"),
        key("c", mode="RGB"),
        key("a", mode="L"),
        key("a", "c"),
        key("c", "a"),
        key("a"),
    }
    assert len(different) == 6


def joined(left: Tensor, right: Tensor) -> Made: ...


def test_rows_of_one_plan_have_the_keys_of_their_steps() -> None:
    """Also where a step uses an output, or one value under two names."""
    first = Step(Unit(encode), "positive", {"prompt": "prompt"}, {"emb": "positive"})
    both = {"left": "positive", "right": "positive"}
    second = Step(Unit(joined), "positive", both, {"emb": "all"})
    plan = SimpleNamespace(
        cached_steps=(first, second), spec=SimpleNamespace(family="family")
    )
    keys = PlanKeys(cast(Plan, plan), COMPONENTS, "float32")
    for text in ("a", 'an input "of" any text'):
        given = hash_json("literal", text)
        positive = _output_of(first, given)
        assert keys.of({"prompt": given}) == {
            "prompt": given,
            "positive": positive,
            "all": _output_of(second, positive),
        }


def _output_of(step: Step, key: str) -> str:
    inputs = dict.fromkeys(step.inputs, key)
    run = step_key("family", step, inputs, COMPONENTS, "float32")
    return hash_json("output", [run, "emb"])
