"""Checkpoint formats map keys in both directions."""

import multiprocessing.reduction
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.models.components import Files
from dstrain.models.formats import (
    CheckpointFormat,
    KeyMap,
    TensorSlice,
    from_checkpoint,
    nth_of,
    to_checkpoint,
)

LAYOUT = CheckpointFormat(
    key_patterns=("blocks.*.qkv.weight",),
    rows=(
        KeyMap("layers.*.mix.*.q", "blocks.*.*.qkv", nth_of(0, 3)),
        KeyMap("layers.*.mix.*.k", "blocks.*.*.qkv", nth_of(1, 3)),
        KeyMap("layers.*.mix.*.v", "blocks.*.*.qkv", nth_of(2, 3)),
        KeyMap("layers.*.rest", "blocks.*"),
        KeyMap("", "model"),
        KeyMap("scale", "last.gain"),
    ),
    ignored=("log.*",),
)


def test_the_longest_row_that_knows_a_name_says_what_it_is() -> None:
    shapes = {
        "blocks.3.7.qkv.weight": (6, 2),
        "blocks.3.norm.bias": (2,),
        "model.a.b": (1,),
        "last.gain": (),
        "x": (1,),
    }
    assert LAYOUT.convert({**shapes, "log.scale": ()}) == {
        "layers.3.mix.7.q.weight": (TensorSlice("blocks.3.7.qkv.weight", 0, 2),),
        "layers.3.mix.7.k.weight": (TensorSlice("blocks.3.7.qkv.weight", 2, 4),),
        "layers.3.mix.7.v.weight": (TensorSlice("blocks.3.7.qkv.weight", 4, 6),),
        "layers.3.rest.norm.bias": (TensorSlice("blocks.3.norm.bias"),),
        "a.b": (TensorSlice("model.a.b"),),
        "scale": (TensorSlice("last.gain"),),
        "x": (TensorSlice("x"),),
    }


def test_parts_are_joined_in_the_order_of_the_table() -> None:
    checkpoint_format = CheckpointFormat(
        (),
        (
            KeyMap("w", "second"),
            KeyMap("w", "first"),
            KeyMap("v", "second", nth_of(1, 2)),
        ),
    )
    parts = checkpoint_format.convert({"first": (2, 3), "second": (4, 3)})
    assert parts == {
        "w": (TensorSlice("second"), TensorSlice("first")),
        "v": (TensorSlice("second", 2, 4),),
    }


def test_rows_may_follow_from_the_shapes() -> None:
    def rows(shapes: Any) -> tuple[KeyMap, ...]:
        return tuple(
            KeyMap(f"up.{len(shapes) - 1 - i}", f"down.{i}") for i in range(len(shapes))
        )

    checkpoint_format = CheckpointFormat((), rows)
    shapes = {"down.0.weight": (1,), "down.1.weight": (1,)}
    assert set(checkpoint_format.convert(shapes)) == {"up.1.weight", "up.0.weight"}
    assert checkpoint_format.original("up.1.weight", shapes) == "down.0.weight"


@pytest.mark.parametrize(
    ("own", "name"),
    [
        ("layers.3.mix.7.k.weight", "blocks.3.7.qkv.weight"),
        ("layers.3.rest.norm.bias", "blocks.3.norm.bias"),
        ("scale", "last.gain"),
        ("a.b", "model.a.b"),
    ],
)
def test_each_own_name_has_its_name_in_the_file(own: str, name: str) -> None:
    assert LAYOUT.original(own, {}) == name


def test_a_format_can_be_inverted() -> None:
    q, k, v = (torch.randn(2, 3) for _ in range(3))
    own = {
        f"layers.0.mix.1.{name}.weight": part
        for name, part in zip("qkv", (q, k, v), strict=True)
    }
    old = to_checkpoint(LAYOUT, {**own, "scale": torch.ones(())})
    assert old.keys() == {"blocks.0.1.qkv.weight", "last.gain"}
    assert torch.equal(old["blocks.0.1.qkv.weight"], torch.cat([q, k, v]))
    back = from_checkpoint(LAYOUT, old)
    assert back.keys() == {*own, "scale"}
    assert all(torch.equal(back[name], value) for name, value in own.items())


def test_files_with_their_format_can_be_sent_to_another_process() -> None:
    sent = multiprocessing.reduction.ForkingPickler.dumps(
        Files((Path("model.pth"),), checkpoint_format=LAYOUT)
    )
    assert b"model.pth" in bytes(sent)
