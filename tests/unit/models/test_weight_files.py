"""Nothing in a file of weights is ever run; what is no weights is refused by name."""

import os
import pathlib
import pickle
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dstrain import StateError
from dstrain.models import recognize
from dstrain.models.weights import Weights
from dstrain.plugin import Component, Files
from safetensors.torch import save_file

ANY = Component("any", SimpleNamespace(), "any", ("*",))


def refused(path: Path, words: str = ".") -> StateError:
    with pytest.raises(StateError, match=words) as caught:
        recognize(Files((path,)), (ANY,))
    with pytest.raises(StateError, match=words):
        Weights.of(Files((path,)))
    assert caught.value.where == str(path)
    return caught.value


class Runs:
    """Unpickling this calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


class Restored:
    """Unpickling this runs its __setstate__."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __setstate__(self, state: dict[str, Path]) -> None:
        state["path"].touch()


PAYLOADS: dict[str, Callable[[Path], Any]] = {
    "system": lambda mark: Runs(os.system, f"touch {mark}"),
    "eval": lambda mark: Runs(
        eval, f"__import__('pathlib').Path({str(mark)!r}).touch()"
    ),
    "method": lambda mark: Runs(pathlib.Path.touch, mark),
    "runpy": lambda mark: Runs(runpy.run_path, str(mark.with_name("script.py"))),
    "setstate": lambda mark: Restored(mark),
    "getattr": lambda mark: Runs(getattr, Runs(__import__, "os"), "getcwd"),
}


@pytest.mark.parametrize("beside", [True, False], ids=["beside weights", "alone"])
@pytest.mark.parametrize("name", PAYLOADS)
def test_a_file_with_code_is_refused_by_name_and_not_run(
    name: str, beside: bool, tmp_path: Path
) -> None:
    mark, path = tmp_path / "it ran", tmp_path / "model.pth"
    script = f"import pathlib; pathlib.Path({str(mark)!r}).touch()"
    (tmp_path / "script.py").write_text(script)
    payload = PAYLOADS[name](mark)
    torch.save({"weight": torch.zeros(1), "more": payload} if beside else payload, path)
    assert "safetensors" in refused(path, r"model\.pth: .*: \w+").help_lines[0]
    assert not mark.exists()


@pytest.mark.parametrize("name", ["pickle", "legacy", "safetensors"])
def test_other_files_of_such_a_name_are_not_run(name: str, tmp_path: Path) -> None:
    mark, path = tmp_path / "it ran", tmp_path / "model.pth"
    weights = {"weight": torch.zeros(1)}
    if name == "pickle":
        path.write_bytes(pickle.dumps(PAYLOADS["method"](mark)))
    elif name == "legacy":
        torch.save(weights, path, _use_new_zipfile_serialization=False)
    else:
        save_file(weights, path)
    refused(path)
    assert not mark.exists()


def inside_itself() -> dict[str, Any]:
    weights: dict[str, Any] = {"a": torch.zeros(1)}
    weights["self"] = weights
    return weights


@pytest.mark.parametrize(
    "content",
    [
        [torch.zeros(1)],
        {"state_dict": {"weight": torch.zeros(1), "step": 3}},
        {"state_dict": {1: torch.zeros(1)}},
        {1: torch.zeros(1)},
        {"weight": 1.0},
        torch.zeros(1),
        inside_itself(),
    ],
    ids=["list", "nested", "nested number", "number", "float", "tensor", "itself"],
)
def test_a_file_that_is_no_state_dict_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "model.pth")
    refused(tmp_path / "model.pth")


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_a_damaged_or_absent_file_is_named(suffix: str, tmp_path: Path) -> None:
    weights, torn = {"a": torch.zeros(1)}, tmp_path / f"torn.{suffix}"
    torch.save(weights, torn) if suffix == "pth" else save_file(weights, torn)
    content = torn.read_bytes()
    torn.write_bytes(content[:-9])
    refused(torn)
    refused(tmp_path / f"absent.{suffix}")
    # It may be damaged after it was looked into, while others are read.
    torn.write_bytes(content)
    reading = Weights.of(Files((torn,))).read({"a": (1,)}, torch.float32)
    torn.write_bytes(content[:-9])
    with pytest.raises(StateError, match=torn.name):
        next(reading)
