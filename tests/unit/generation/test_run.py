"""`dstrain generate` generates one output or a dataset, and explains a lack of memory."""

from pathlib import Path
from typing import Any

import pytest
from dstrain import GenerateConfig, OutOfMemory, UsageError
from dstrain.generation import run
from dstrain.training import GENERATE_ADVICE


def config(**changes: Any) -> GenerateConfig:
    given = {"model": "tiny", "output": Path("x"), "toy": True}
    return GenerateConfig(**{**given, **changes})


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    for name in ("generate_one", "generate_dataset"):
        monkeypatch.setattr(
            run, name, lambda *given, name=name: calls.append((name, *given))
        )
    return calls


def test_a_table_makes_a_dataset_and_a_prompt_one_output(
    called: list[tuple[Any, ...]],
) -> None:
    one = config(prompt="dog")
    many = config(dataset=Path("prompts.csv"))
    run.generate(one)
    run.generate(many)
    assert called == [
        ("generate_one", one),
        ("generate_dataset", many, Path("prompts.csv")),
    ]


def test_a_configuration_is_checked_first(called: list[tuple[Any, ...]]) -> None:
    with pytest.raises(UsageError):
        run.generate(config())
    assert not called


def test_a_lack_of_memory_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: GenerateConfig) -> None:
        raise MemoryError

    monkeypatch.setattr(run, "generate_one", full)
    with pytest.raises(OutOfMemory, match="generate: out of memory at") as caught:
        run.generate(config(prompt="dog"))
    assert caught.value.help_lines == GENERATE_ADVICE
