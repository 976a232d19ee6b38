"""A key changes with everything that a value is the result of, and with nothing else."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypedDict

from dstrain.cache.addresses import PlanKeys
from dstrain.data import Cell, input_key
from dstrain.graph import Step
from dstrain.graph.unit import Unit
from dstrain.plugin import versioned
from dstrain.storage import Digests, hash_json
from torch import Tensor


class Made(TypedDict):
    emb: Tensor


def encode(prompt: str, size: int = 0, *, text_encoder: Any, dtype: Any) -> Made: ...


def other(prompt: str, size: int = 0, *, text_encoder: Any, dtype: Any) -> Made: ...


def branched(prompt: str, *, branch: str) -> Made: ...


def joined(left: Tensor, right: Tensor) -> Made: ...


STEP = Step(
    Unit(encode), "positive", {"prompt": "prompt", "size": "size"}, {"emb": "emb"}
)
READS = {"prompt": "k1", "size": "k2"}
COMPONENTS = {"text_encoder": "d1", "vae": "d2"}
NO_MEMORY = Path("absent")


def keys(
    *steps: Step,
    reads: Mapping[str, str] = READS,
    family: str = "family",
    components: Mapping[str, str] = COMPONENTS,
    dtype: str = "float32",
) -> dict[str, str]:
    """The keys of all values of a row, by name."""
    spec = SimpleNamespace(family=family)
    plan: Any = SimpleNamespace(cached_steps=steps, spec=spec)
    return PlanKeys(plan, components, dtype).of(reads)


def key(step: Step = STEP, **facts: Any) -> str:
    return keys(step, **facts)["emb"]


def test_a_key_changes_with_everything_a_value_is_the_result_of() -> None:
    newer = Unit(versioned(2)(encode))
    versioned(0)(encode)
    without_size = replace(STEP, inputs={"prompt": "prompt"})
    found = {
        key(),
        key(family="other"),
        key(replace(STEP, unit=newer)),
        key(replace(STEP, unit=Unit(other))),
        key(reads={"prompt": "k2", "size": "k1"}),
        key(reads={"prompt": "k1", "size": "k1"}),
        key(without_size),
        key(components={"text_encoder": "d2"}),
        key(dtype="bfloat16"),
        # Another output of the same run has a key of its own.
        keys(replace(STEP, outputs={"other": "emb"}))["emb"],
    }
    assert len(found) == 10


def test_a_key_does_not_change_with_what_the_unit_does_not_use() -> None:
    assert key() == key(reads=dict(reversed(READS.items())))
    assert key() == key(components=COMPONENTS | {"vae": "d3"})
    assert key() == key(replace(STEP, branch="negative"))
    # Nor with the name that a plan has for a value.
    renamed = replace(STEP, inputs={"prompt": "text", "size": "size"})
    assert key(renamed, reads={"text": "k1", "size": "k2"}) == key()


def test_the_branch_is_part_of_a_key_only_if_the_unit_uses_it() -> None:
    step = Step(Unit(branched), "positive", {"prompt": "prompt"}, {"emb": "emb"})
    assert key(step) != key(replace(step, branch="negative"))


def test_the_key_of_what_is_computed_from_an_output_follows_that_one() -> None:
    """Also where a step uses one value under two names."""
    first = replace(STEP, outputs={"emb": "positive"})
    both = {"left": "positive", "right": "positive"}
    second = Step(Unit(joined), "positive", both, {"emb": "all"})
    texts = ("a", 'an input "of" any text', "a")
    reads = ({**READS, "prompt": hash_json("literal", text)} for text in texts)
    one, other, again = (keys(first, second, reads=given) for given in reads)
    assert one == again
    assert not {one["positive"], one["all"]} & set(other.values())
    assert len({*one.values()}) == 4
    # As if it had been an input.
    given = {"positive": one["positive"]}
    assert keys(second, reads=given)["all"] == one["all"]


def test_an_input_has_the_key_of_its_value_or_of_its_files_bytes_and_how_they_load(
    tmp_path: Path,
) -> None:
    for name, data in {"a": b"1", "b": b"1", "c": b"2"}.items():
        (tmp_path / name).write_bytes(data)

    def images(*names: str, **parameters: Any) -> Cell:
        files = tuple(str(tmp_path / name) for name in names)
        return Cell("images", None, files, tuple(parameters.items()))

    def of(cell: Cell) -> str:
        return input_key(cell, Digests(NO_MEMORY))

    assert of(images("a", mode="RGB")) == of(images("b", mode="RGB"))
    different = [
        *(Cell("text", "1"), Cell("text", ""), Cell("texts", ["1"])),
        *(Cell("integer", 1), Cell("number", 1.5)),
        *(images("a", mode="RGB"), images("c", mode="RGB"), images("a", mode="L")),
        *(images("a", "c"), images("c", "a"), images("a")),
    ]
    assert len(set(map(of, different))) == len(different)
