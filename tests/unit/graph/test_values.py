"""A unit's outputs and inputs are of kinds that can be stored, and nobody else changes
them; their storable form loses nothing.
"""

import json
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pytest
import torch
from dstrain import Frames, UsageError
from dstrain.graph import deserialize, serialize
from dstrain.graph.unit import Unit
from dstrain.storage import read_tensors, write_tensors
from PIL import Image, ImageDraw
from torch import Tensor

from tests.support.caching_project import noise_image, plain


class Made(TypedDict):
    made: Tensor


class Marked(Tensor):
    """A tensor that may keep more than numbers."""


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
def test_what_cannot_be_stored_is_refused_naming_unit_and_output(
    annotation: Any,
) -> None:
    with pytest.raises(UsageError, match=r"\.unit -> output"):
        declared_kind(annotation)


VALUES = [
    torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    torch.tensor(1.5, dtype=torch.float64),
    torch.zeros(0, 3),
    torch.arange(12).reshape(3, 4).T,
    'a "text"\n\u2028 ä',
    "",
    -(2**53) - 1,
    0.1 + 0.2,
    1e-320,
    True,
    None,
    Frames(torch.full((1, 2, 3, 3), 7, dtype=torch.uint8), 23.976),
    [],
    [1, [torch.ones(1), None], "x"],
    {"a": [torch.zeros(1), torch.ones(1)], "b": {"a": torch.full((1,), 2.0)}},
    {"value": torch.ones(2), "shape": [], "list": {"tensor": "no"}},
    {},
    *(noise_image(1, mode) for mode in ("L", "RGB", "RGBA")),
]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_comes_back_exactly_from_its_storable_form(value: Any) -> None:
    tensors: dict[str, Tensor] = {}
    form = json.loads(json.dumps(serialize(of_unit(value), tensors, "v")))
    assert plain(deserialize(form, tensors)) == plain(value)
    if isinstance(value, Image.Image | Frames | Tensor):
        assert form["shape"] == list(next(iter(tensors.values())).shape)


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
REFUSED: dict[str, Callable[[], Any]] = {
    "tuple": lambda: (1, 2),
    "bytes": lambda: b"x",
    "set": lambda: {1, 2},
    "complex": lambda: 1j,
    "object": object,
    "numpy float64, which is a float": lambda: np.float64(1),
    "numpy text, which is a str": lambda: np.str_("a"),
    "numpy int64": lambda: np.int64(1),
    "numpy array": lambda: np.zeros(2),
    "ordered dict": lambda: OrderedDict(a=1),
    "torch.Size": lambda: torch.Size([1]),
    "key that is no text": lambda: {1: "a"},
    "key like a way": lambda: {"a/b": 1},
    "integer without end": lambda: 10**5000,
    "half a surrogate pair": lambda: "\ud83d",
    "two halves apart": lambda: "\ud83d\ude00",
    "key with half a pair": lambda: {"\ude00": 1},
    "list in itself": lambda: CYCLE,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "compressed": lambda: torch.eye(2).to_sparse_csr(),
    "nested": lambda: torch.nested.as_nested_tensor([torch.zeros(1)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(1), 1.0, 0, torch.qint8),
    "without data": lambda: torch.zeros(2, device="meta"),
    "subclass": lambda: torch.zeros(2).as_subclass(Marked),
    "frames of a numpy rate": lambda: Frames(torch.zeros(1), np.float64(8)),
    **{
        f"image {mode}": partial(Image.new, mode, (2, 2))
        for mode in ("CMYK", "P", "1", "I;16", "I", "F", "LA", "HSV", "YCbCr")
    },
}


@pytest.mark.filterwarnings("ignore")  # torch's kinds of tensors warn that they are new
@pytest.mark.parametrize("case", REFUSED)
def test_a_value_that_cannot_be_stored_exactly_is_refused_naming_it(case: str) -> None:
    for nested, way in ((lambda v: v, "made"), (lambda v: [{"x": v}], "made/0/x")):
        with pytest.raises(UsageError, match=f"unit unit: .*'{way}"):
            of_unit(nested(REFUSED[case]()))


def test_every_dtype_is_refused_or_comes_back_from_a_file_as_it_was(
    tmp_path: Path,
) -> None:
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
    assert len(stored) == 18


def test_an_output_keeps_its_gradient_and_is_stored_without() -> None:
    weight = torch.ones(4, requires_grad=True)
    made = of_unit((weight * 2)[:2])
    tensors: dict[str, Tensor] = {}
    serialize(made, tensors, "v")
    assert not tensors["v"].requires_grad
    made.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2, 0, 0]


CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "add_": (torch.zeros(2), lambda v: v.add_(1)),
    "view": (torch.zeros(2), lambda v: v[:1].fill_(1)),
    "detached": (torch.zeros(2), lambda v: v.detach().mul_(2)),
    "no element": (torch.zeros(0), lambda v: v.add_(1)),
    "transpose": (torch.zeros(2, 3), lambda v: v.t_()),
    "resize": (torch.zeros(2), lambda v: v.resize_(4)),
    "set": (torch.zeros(2), lambda v: v.set_(torch.ones(2))),
    "data": (torch.zeros(2), lambda v: setattr(v, "data", torch.ones(2))),
    "gradient": (torch.zeros(2), lambda v: v.requires_grad_()),
    "out": (torch.zeros(2), lambda v: torch.add(v, 1, out=v)),
    "append": ([1], lambda v: v.append(2)),
    "pop and append": ([[1]], lambda v: (v.pop(), v.append([1]))),
    "reverse": (["a", "b"], lambda v: v.reverse()),
    "item": ({"a": 1}, lambda v: v.update(a=2)),
    "key": ({"a": 1}, lambda v: v.update(b=1)),
    "order of keys": ({"a": 1, "b": 2}, lambda v: v.update(a=v.pop("a"))),
    "tensor in a record in a list": (
        [{"a": torch.zeros(1)}],
        lambda v: v[0]["a"].add_(1),
    ),
    "frames": (Frames(torch.zeros(1, 1, 1, 3), 8.0), lambda v: v.pixels.add_(1)),
    "paste": (Image.new("RGB", (2, 2)), lambda v: v.paste((1, 1, 1), (0, 0, 1, 1))),
    "drawing": (
        Image.new("RGBA", (2, 2)),
        lambda v: ImageDraw.Draw(v).point((0, 0), "red"),
    ),
    "thumbnail": (Image.new("RGB", (4, 4)), lambda v: v.thumbnail((2, 2))),
    "image in a list": ([Image.new("L", (2, 2))], lambda v: v[0].putpixel((0, 0), 7)),
}


@pytest.mark.parametrize("case", CHANGES)
def test_an_input_that_a_unit_changes_in_place_is_named(case: str) -> None:
    value, change = CHANGES[case]

    def unit(second: Any, first: Tensor) -> Made:
        change(second)
        return {"made": first}

    first = torch.ones(1)
    with pytest.raises(UsageError, match=r"unit unit: .*'second'"):
        Unit(unit).run({"first": first, "second": of_unit(value)}, {})
    with pytest.raises(UsageError, match=r"unit unit: .*'second'"):
        Unit(unit, given=("second",)).run({"first": first}, {}, second=of_unit(value))
