"""A unit's outputs are of kinds that can be stored, and lose nothing by it."""

from pathlib import Path
from typing import Any, TypedDict

import pytest
import torch
from dstrain import Frames, UsageError
from dstrain.graph import serialize
from dstrain.graph.unit import Unit
from dstrain.storage import read_tensors, write_tensors
from PIL import Image
from torch import Tensor


class Made(TypedDict):
    made: Tensor


class Record(TypedDict):
    name: str
    masks: list[Tensor]


def of_unit(value: Any) -> Any:
    """Return a value as a unit's output."""

    def unit() -> Made:
        return {"made": value}

    return Unit(unit).run({}, {})["made"]


def declared_kind(annotation: Any) -> str:
    def unit() -> Any: ...

    unit.__annotations__["return"] = TypedDict("Output", {"output": annotation})
    return Unit(unit).outputs["output"]


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [
        (Tensor, "tensor"),
        (str, "str"),
        (int, "int"),
        (float, "float"),
        (bool, "bool"),
        (type(None), "none"),
        (Image.Image | None, "image | none"),
        (list[Tensor], "list[tensor]"),
        (list[list[Frames]], "list[list[video]]"),
        (list[Record | int], "list[{name: str, masks: list[tensor]} | int]"),
    ],
)
def test_every_kind_is_named(annotation: Any, kind: str) -> None:
    assert declared_kind(annotation) == kind


@pytest.mark.parametrize(
    "annotation",
    [dict, dict[str, Tensor], set[int], bytes, tuple[int, int], list, object, Any],
)
def test_what_cannot_be_stored_is_refused_by_unit_and_output(annotation: Any) -> None:
    with pytest.raises(UsageError, match=r"\.unit -> output"):
        declared_kind(annotation)


def test_every_dtype_is_refused_or_comes_back_from_a_file(tmp_path: Path) -> None:
    stored = set()
    for dtype in {one for one in vars(torch).values() if isinstance(one, torch.dtype)}:
        tensor = torch.arange(64, dtype=torch.uint8).view(dtype)
        try:
            of_unit(tensor)
        except UsageError:
            continue
        stored.add(dtype)
        write_tensors(tmp_path / "t", {"t": tensor}, {})
        back = read_tensors(tmp_path / "t")[0]["t"]
        assert back.dtype == dtype
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
    assert len(stored) == 19


def test_an_output_keeps_its_gradient_and_is_stored_without() -> None:
    weight = torch.ones(4, requires_grad=True)
    made = of_unit((weight * 2)[:2])
    tensors: dict[str, Tensor] = {}
    serialize(made, tensors, "v")
    assert not tensors["v"].requires_grad
    made.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2, 0, 0]
