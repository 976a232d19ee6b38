"""Values: their kinds are checked when a unit is declared, and their storable form
loses nothing.
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
from dstrain.graph.values import DTYPES, copy_value, kind_of, read_only, tensor_names
from dstrain.storage import read_tensors, write_tensors
from PIL import Image, ImageDraw
from torch import Tensor

from tests.support.caching_project import noise_image, plain


class Marked(Tensor):
    """A tensor that may keep more than numbers."""


class Record(TypedDict):
    name: str
    masks: list[Tensor]


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [
        (Tensor, "tensor"),
        (str, "str"),
        (int, "int"),
        (float, "float"),
        (bool, "bool"),
        (type(None), "none"),
        (Image.Image, "image"),
        (Frames, "video"),
        (Image.Image | None, "image | none"),
        (list[Tensor], "list[tensor]"),
        (list[list[Frames]], "list[list[video]]"),
        (Record, "{name: str, masks: list[tensor]}"),
        (list[Record | int], "list[{name: str, masks: list[tensor]} | int]"),
    ],
)
def test_every_kind_is_named(annotation: Any, kind: str) -> None:
    assert kind_of(annotation, "unit") == kind


@pytest.mark.parametrize(
    "annotation",
    [dict, dict[str, Tensor], set[int], bytes, tuple[int, int], list, object, Any],
)
def test_what_cannot_be_stored_is_refused_naming_the_unit(annotation: Any) -> None:
    with pytest.raises(
        UsageError, match=r"unit x: .* is not a kind of value that can be stored"
    ):
        kind_of(annotation, "unit x")


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
    {"value": torch.ones(2), "shape": [], "list": {"tensor": "no"}},
    {},
]


@pytest.mark.parametrize(
    "value", [*VALUES, *(noise_image(1, mode) for mode in ("L", "RGB", "RGBA"))]
)
def test_a_value_comes_back_exactly_from_its_storable_form(value: Any) -> None:
    tensors: dict[str, Tensor] = {}
    form = json.loads(json.dumps(serialize(value, tensors, "v")))
    assert sorted(tensor_names(form)) == sorted(tensors)
    assert plain(deserialize(form, tensors)) == plain(value)


def test_tensors_of_a_value_have_names_of_their_own() -> None:
    tensors: dict[str, Tensor] = {}
    value = {"a": [torch.zeros(1), torch.ones(1)], "b": {"a": torch.full((1,), 2.0)}}
    form = serialize(value, tensors, "v")
    assert len(tensors) == 3
    assert plain(deserialize(form, tensors)) == plain(value)


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "tuple": (lambda: (1, 2), "a value of type tuple"),
    "bytes": (lambda: b"x", "a value of type bytes"),
    "set": (lambda: {1, 2}, "a value of type set"),
    "complex": (lambda: 1j, "a value of type complex"),
    "object": (lambda: object(), "a value of type object"),
    "numpy float32": (lambda: np.float32(1), "a value of type float32"),
    "numpy float64, which is a float": (lambda: np.float64(1), "a value of type float64"),
    "numpy int64": (lambda: np.int64(1), "a value of type int64"),
    "numpy text, which is a str": (lambda: np.str_("a"), "a value of type str_"),
    "numpy array": (lambda: np.zeros(2), "a value of type ndarray"),
    "ordered dict": (lambda: OrderedDict(a=1), "a value of type OrderedDict"),
    "torch.Size": (lambda: torch.Size([1]), "a value of type Size"),
    "key that is no text": (lambda: {1: "a"}, "a record with the key 1"),
    "key like a way": (lambda: {"a/b": 1}, "a record with the key 'a/b'"),
    "integer without end": (lambda: 10**5000, "an integer of more than 4096 bits"),
    "half a surrogate pair": (lambda: "\ud83d", "a text with half of a surrogate pair"),
    "two halves apart": (lambda: "\ud83d\ude00", "a text with half of a surrogate pair"),
    "key with half a pair": (lambda: {"\ude00": 1}, "a text with half of a surrogate pair"),
    "list in itself": (lambda: CYCLE, "lists and records nested more than 64 deep"),
    "complex128": (lambda: torch.zeros(2, dtype=torch.complex128), "a tensor of dtype torch.complex128"),
    "complex32": (lambda: torch.zeros(2).to(torch.complex32), "a tensor of dtype torch.complex32"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "a tensor that is nested or sparse"),
    "compressed": (lambda: torch.eye(2).to_sparse_csr(), "a tensor that is nested or sparse"),
    "nested": (lambda: torch.nested.as_nested_tensor([torch.zeros(1)]), "a tensor that is nested or sparse"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(1), 1.0, 0, torch.qint8), "dtype torch.qint8"),
    "without data": (lambda: torch.zeros(2, device="meta"), "a tensor without data"),
    "subclass": (lambda: torch.zeros(2).as_subclass(Marked), "a tensor of class Marked"),
    "frames of a numpy rate": (lambda: Frames(torch.zeros(1), np.float64(8)), "a value of type float64"),
    **{
        f"image {mode}": (partial(Image.new, mode, (2, 2)), f"an image of mode {mode}")
        for mode in ("CMYK", "P", "1", "I;16", "I", "F", "LA", "HSV", "YCbCr")
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # torch's kinds of tensors warn that they are new
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: {"x": v}])
def test_a_value_that_cannot_be_stored_exactly_is_refused_naming_it(
    case: str, wrap: Any
) -> None:
    make, fault = REFUSED[case]
    with pytest.raises(UsageError) as caught:
        copy_value(wrap(make()), "unit f", "made")
    assert caught.value.where == "unit f"
    assert caught.value.what.startswith("output 'made")
    assert fault in caught.value.what


def test_a_dtype_that_can_be_stored_is_stored(tmp_path: Path) -> None:
    """Every dtype of torch is refused, or comes back from a file as it was."""
    for dtype in {one for one in vars(torch).values() if isinstance(one, torch.dtype)}:
        if dtype in DTYPES:
            tensor = torch.arange(64, dtype=torch.uint8).view(dtype)
            write_tensors(tmp_path / "t", {"t": tensor}, {})
            back = read_tensors(tmp_path / "t")[0]["t"]
            assert back.dtype == dtype
            assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_a_tensor_that_needs_a_gradient_is_stored_without() -> None:
    tensors: dict[str, Tensor] = {}
    serialize(torch.ones(2, requires_grad=True), tensors, "v")
    assert not tensors["v"].requires_grad


@pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: [t], lambda t: {"x": t}, lambda t: Frames(t, 1.0)]
)
@pytest.mark.parametrize(
    "cut",
    [lambda t: t[1:2], lambda t: t.transpose(0, 1), lambda t: t[:1].expand(4, 8)],
    ids=["part", "turned", "wide"],
)
def test_what_a_unit_makes_is_alone_in_its_storage(wrap: Any, cut: Any) -> None:
    part = cut(torch.arange(64, dtype=torch.uint8).reshape(8, 8))
    owned = copy_value(wrap(part), "f", "v")
    tensors: dict[str, Tensor] = {}
    serialize(owned, tensors, "v")
    (mine,) = tensors.values()
    assert torch.equal(mine, part)
    assert mine.untyped_storage().nbytes() == mine.nbytes
    assert mine.is_contiguous()


def test_a_copy_shares_nothing_and_is_what_the_cache_returns() -> None:
    whole = torch.ones(4)
    first, second = copy_value([whole, whole], "f", "v")
    assert len({one.data_ptr() for one in (whole, first, second)}) == 3
    turned = torch.ones(1, 3).t().t().as_strided((1, 3), (1, 1))
    assert copy_value(turned, "f", "v").stride() == (3, 1)
    lazy = torch.tensor([1 + 2j], dtype=torch.complex64).conj()
    for one in (lazy, lazy.imag):
        copied = copy_value(one, "f", "v")
        assert torch.equal(copied, one)
        assert not copied.is_conj()
        assert not copied.is_neg()
    with torch.inference_mode():
        frozen = torch.ones(2)
    assert not copy_value(frozen, "f", "v").is_inference()
    image = Image.new("RGB", (2, 2))
    image.info["transparency"] = (0, 0, 0)
    copied = copy_value(image, "f", "v")
    image.paste((9, 9, 9), (0, 0, 1, 1))
    assert copied.info == {}
    assert copied.getpixel((0, 0)) == (0, 0, 0)


CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "add_": (torch.zeros(2), lambda v: v.add_(1)),
    "view": (torch.zeros(2), lambda v: v[:1].fill_(1)),
    "detached": (torch.zeros(2), lambda v: v.detach().mul_(2)),
    "no element": (torch.zeros(0), lambda v: v.add_(1)),
    "one number": (torch.zeros(()), lambda v: v.add_(1)),
    "transpose": (torch.zeros(2, 3), lambda v: v.t_()),
    "resize": (torch.zeros(2), lambda v: v.resize_(4)),
    "set": (torch.zeros(2), lambda v: v.set_(torch.ones(2))),
    "data": (torch.zeros(2), lambda v: setattr(v, "data", torch.ones(2))),
    "gradient": (torch.zeros(2), lambda v: v.requires_grad_()),
    "index": (torch.zeros(2), lambda v: v.__setitem__(0, 1.0)),
    "out": (torch.zeros(2), lambda v: torch.add(v, 1, out=v)),
    "append": ([1], lambda v: v.append(2)),
    "pop and append": ([[1]], lambda v: (v.pop(), v.append([1]))),
    "sort": ([2, 1], lambda v: v.sort()),
    "reverse": (["a", "b"], lambda v: v.reverse()),
    "clear": ([1], lambda v: v.clear()),
    "item": ({"a": 1}, lambda v: v.update(a=2)),
    "key": ({"a": 1}, lambda v: v.update(b=1)),
    "order of keys": ({"a": 1, "b": 2}, lambda v: v.update(a=v.pop("a"))),
    "tensor in a record in a list": ([{"a": torch.zeros(1)}], lambda v: v[0]["a"].add_(1)),
    "frames": (Frames(torch.zeros(1, 1, 1, 3), 8.0), lambda v: v.pixels.add_(1)),
    "paste": (Image.new("RGB", (2, 2)), lambda v: v.paste((1, 1, 1), (0, 0, 1, 1))),
    "putpixel": (Image.new("L", (2, 2)), lambda v: v.putpixel((0, 0), 7)),
    "drawing": (Image.new("RGBA", (2, 2)), lambda v: ImageDraw.Draw(v).point((0, 0), "red")),
    "thumbnail": (Image.new("RGB", (4, 4)), lambda v: v.thumbnail((2, 2))),
    "image in a list": ([Image.new("L", (2, 2))], lambda v: v[0].putpixel((0, 0), 7)),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_in_place_is_named(case: str) -> None:
    value, change = CHANGES[case]
    value = copy_value(value, "f", "v")
    with (
        pytest.raises(UsageError, match="unit f: changes its input 'second' in place"),
        read_only("unit f", {"first": torch.ones(1), "second": value}),
    ):
        change(value)


def test_reading_is_no_change() -> None:
    values = {
        "tensor": torch.ones(2, requires_grad=True),
        "list": [torch.ones(1), {"a": 1}],
        "image": Image.new("RGB", (2, 2)),
    }
    with read_only("unit f", values), torch.inference_mode():
        (values["tensor"] * 2).add_(1)
        [*values["list"], 3].reverse()
        values["image"].resize((4, 4)).putpixel((0, 0), (1, 1, 1))
