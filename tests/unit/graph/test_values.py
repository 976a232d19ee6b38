"""Values: their kinds are checked when a unit is declared, and their storable form
loses nothing.
"""

import json
from typing import Any, TypedDict

import numpy as np
import pytest
import torch
from dstrain.errors import UsageError
from dstrain.graph.values import (
    Frames,
    copy_if_shared,
    deserialize,
    kind_of,
    serialize,
    storage_ids,
    tensor_names,
)
from PIL import Image
from torch import Tensor

from tests.support.caching_project import noise_image, plain


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


@pytest.mark.parametrize("mode", ["CMYK", "P", "1", "I;16", "F", "LA"])
def test_an_image_that_would_lose_something_is_refused(mode: str) -> None:
    with pytest.raises(
        UsageError, match=f"unit.x: an image of mode {mode} cannot be stored"
    ):
        serialize(Image.new(mode, (2, 2)), {}, "unit.x")


@pytest.mark.parametrize(
    "value",
    [b"x", (1, 2), {1, 2}, np.float32(1), object()],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_cannot_be_stored_is_refused_naming_it(value: Any) -> None:
    with pytest.raises(
        UsageError,
        match=f"unit.x: a value of type {type(value).__name__} cannot be stored",
    ):
        serialize(value, {}, "unit.x")


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
    owned = copy_if_shared(wrap(part), set())
    tensors: dict[str, Tensor] = {}
    serialize(owned, tensors, "v")
    (mine,) = tensors.values()
    assert torch.equal(mine, part)
    assert mine.untyped_storage().nbytes() == mine.nbytes
    assert mine.is_contiguous()


def test_a_value_that_is_alone_already_is_not_copied() -> None:
    whole = torch.ones(4)
    assert copy_if_shared(whole, set()).data_ptr() == whole.data_ptr()
    assert copy_if_shared(whole, storage_ids([whole])).data_ptr() != whole.data_ptr()
    first, second = copy_if_shared([whole, whole], set())
    assert first.data_ptr() != second.data_ptr()
