"""A run on quantized weights is exact: in a single run or two stages, stopped and resumed,
in one process or two, it trains the same bits.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dstrain import DstrainError, run
from dstrain.cache import FeatureCache, stored_plans

from tests.support.family import weights_of
from tests.support.processes import commands, in_processes, words
from tests.support.runs import config, files, log, same, train

pytestmark = [
    pytest.mark.promise(
        "R20", "quantized weights: unsplit, split, resumed, 1 and 2 processes alike"
    ),
    pytest.mark.usefixtures("tiny"),
]
ALONE = {"gradient_accumulation_steps": 2}
"""Flags of one process that has as many samples in a step as two."""
METHODS = ("fp8", "int8_block", "bitsandbytes_nf4")


@dataclass(frozen=True)
class Way:
    """How a run is made."""

    processes: int
    is_split: bool
    is_resumed: bool

    def __str__(self) -> str:
        split = "in two stages" if self.is_split else "in a single run"
        resumed = ", resumed" if self.is_resumed else ""
        return f"{self.processes} processes, {split}{resumed}"


WAYS = tuple(
    Way(processes, is_split, is_resumed)
    for processes in (2, 1)
    for is_split in (True, False)
    for is_resumed in (True, False)
)
CASES = [(method, way) for method in METHODS for way in WAYS]
# A tenth of the cases runs in the ordinary suite: of each method another one.
CASES.sort(key=lambda case: (METHODS.index(case[0]) * 5 + WAYS.index(case[1])) % 10)


def stored(method: str) -> dict[str, Any]:
    """Flags that store the denoiser and a text encoder by a method, some layers of it by
    another.
    """
    parts = f"dit:{method}/to_out;dit:fp8@to_out;text_encoder:{method}"
    return {"quant_options": parts}


@pytest.fixture(scope="module")
def whole(here: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function: method -> the output of a run in one piece."""
    made: dict[str, Path] = {}

    def run(method: str) -> Path:
        if method not in made:
            out = tmp_path_factory.mktemp("whole") / "out"
            made[method] = train(here, output_path=out, **common(method), **ALONE)
        return made[method]

    return run


def common(method: str) -> dict[str, Any]:
    return {**stored(method), "max_steps": 4, "save_steps": 2, "dataset_repeat": 2}


@pytest.mark.parametrize(("method", "way"), CASES, ids=str)
def test_a_run_on_quantized_weights_is_the_same_bits(
    method: str, way: Way, here: Path, whole: Any, tmp_path: Path
) -> None:
    given = common(method)
    if way.is_split:
        cache = tmp_path / "cache"
        precompute(here, cache, **stored(method))
        given |= {"task": "sft:train", "feature_cache": cache}
    output = tmp_path / "out"
    lengths: list[dict[str, Any]] = [{}]
    if way.is_resumed:
        lengths = [{"max_steps": 2}, {"resume": "auto"}]
    for length in lengths:
        flags = {**given, **length, "output_path": output}
        if way.processes == 1:
            train(here, **flags, **ALONE)
        else:
            line = words(as_flags(here, **flags))
            ended = in_processes(way.processes, commands(line), tmp_path)
            assert ended.codes == (0,) * way.processes, ended.said
    want = whole(method)
    assert log(output) == log(want)
    assert same(files(output), files(want))


def precompute(here: Path, cache: Path, **flags: Any) -> None:
    task = "sft:data_process"
    run(config(here, task=task, feature_cache=cache, output_path=None, **flags))


def as_flags(here: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "dataset_base_path": here / "data",
        "learning_rate": 1e-2,
        "lora_rank": 2,
        "model_paths": json.dumps(list(weights_of(here / "model").values())),
        **changes,
    }


def test_a_run_on_quantized_weights_trains_other_bits_than_one_on_others(
    here: Path, whole: Any, tmp_path: Path
) -> None:
    plain = common("fp8") | {"quant_options": None}
    train(here, output_path=tmp_path / "plain", **plain)
    trained = [files(whole(method)) for method in METHODS] + [files(tmp_path / "plain")]
    for number, one in enumerate(trained):
        assert not any(same(one, other) for other in trained[number + 1 :])


def test_what_a_stage_or_a_resumed_run_stores_differently_is_refused(
    here: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    precompute(here, cache, fp8_models="text_encoder")
    given = {"task": "sft:train", "feature_cache": cache, "max_steps": 1}
    for other in (None, "text_encoder:int8_block", "text_encoder:fp8@layer"):
        with pytest.raises(
            DstrainError, match="how weights of text_encoder are stored"
        ):
            train(here, output_path=tmp_path / "out", quant_options=other, **given)
    train(here, output_path=tmp_path / "out", fp8_models="text_encoder,dit", **given)
    given |= {"max_steps": 2, "resume": "auto", "output_path": tmp_path / "out"}
    for options in ("", ";dit:int8_block", ";dit:fp8@to_q"):
        with pytest.raises(DstrainError, match=r"quant_options|fp8_models"):
            train(here, quant_options=f"text_encoder:fp8{options}", **given)
    same_again = "dit:fp8@to_q;text_encoder:fp8;dit:fp8;dit:fp8"
    train(here, quant_options=same_again, **given)


def test_only_what_depends_on_a_quantized_component_is_computed_again(
    here: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    precompute(here, cache)
    before = stored_values(cache)
    precompute(here, cache, fp8_models="dit")
    assert stored_values(cache) == before
    precompute(here, cache, fp8_models="text_encoder")
    added = stored_values(cache) - before
    # Both of each of the six prompts.
    assert len(added) == 12
    assert {name for name, _ in added} == {"prompt_emb", "prompt_mask"}


def stored_values(cache: Path) -> set[tuple[str, str]]:
    """Name and address of all values that plans of a feature cache use; there are no
    others.
    """
    stored = FeatureCache.open(cache)
    used = set()
    for plan in stored_plans(cache):
        for row in plan.samples():
            for name, value in row["values"].items():
                if "at" in value:
                    used.add((name, value["at"]))
    assert {address for _, address in used} == set(stored)
    return used
