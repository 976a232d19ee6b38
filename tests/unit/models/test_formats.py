"""Checkpoint formats map keys in both directions."""

import json
from pathlib import Path

import pytest
import torch
from dstrain.models.formats import from_checkpoint, to_checkpoint
from dstrain.plugin import CheckpointFormat, KeyMap, read_key_maps, same_config

LAYOUT = CheckpointFormat(
    key_patterns=("blocks.*.qkv.weight",),
    rows=(
        KeyMap("layers.*.mix.*.q", "blocks.*.*.qkv", 0, 1, 3),
        KeyMap("layers.*.mix.*.k", "blocks.*.*.qkv", 1, 2, 3),
        KeyMap("layers.*.mix.*.v", "blocks.*.*.qkv", 2, 3, 3),
        KeyMap("layers.*.rest", "blocks.*"),
        KeyMap("", "model"),
        KeyMap("scale", "last.gain"),
    ),
    ignored=("log.*",),
)


def test_the_longest_row_that_knows_a_name_says_what_it_is() -> None:
    fused = "blocks.3.7.qkv.weight"
    shapes = {
        fused: (6, 2),
        "blocks.3.norm.bias": (2,),
        "model.a.b": (1,),
        "last.gain": (),
        "x": (1,),
    }
    found = LAYOUT.convert({**shapes, "log.scale": ()})
    assert {own: tuple(one[:3] for one in parts) for own, parts in found.items()} == {
        "layers.3.mix.7.q.weight": ((fused, 0, 2),),
        "layers.3.mix.7.k.weight": ((fused, 2, 4),),
        "layers.3.mix.7.v.weight": ((fused, 4, 6),),
        "layers.3.rest.norm.bias": (("blocks.3.norm.bias", 0, None),),
        "a.b": (("model.a.b", 0, None),),
        "scale": (("last.gain", 0, None),),
        "x": (("x", 0, None),),
    }
    del found["x"]
    for own, ((name, *_),) in found.items():
        assert LAYOUT.original(own) == name


def test_a_format_can_be_inverted() -> None:
    q, k, v = (torch.randn(2, 3) for _ in range(3))
    parts = {"q": q, "k": k, "v": v}
    own = {f"layers.0.mix.1.{name}.weight": part for name, part in parts.items()}
    old = to_checkpoint(LAYOUT, {**own, "scale": torch.ones(())})
    assert old.keys() == {"blocks.0.1.qkv.weight", "last.gain"}
    assert torch.equal(old["blocks.0.1.qkv.weight"], torch.cat([q, k, v]))
    back = from_checkpoint(LAYOUT, old)
    assert back.keys() == {*own, "scale"}
    assert all(torch.equal(back[name], value) for name, value in own.items())


KEY_MAPS = {
    "dit": {
        "formats": {"original": {"configuration": "own"}},
        "lora": [{"program": "diffsynth", "format": "other"}],
    }
}


def test_a_file_may_have_a_matrix_transposed(tmp_path: Path) -> None:
    fields = {"rows": [["out.weight", "projection", 0, 1, 1, True]]}
    table = {"head": {"formats": {"old": {"key_patterns": ["projection"], **fields}}}}
    file = tmp_path / "maps.json"
    file.write_text(json.dumps(table))
    (layout,) = read_key_maps(file)["head"]["formats"]
    weight = torch.randn(2, 3)
    old = to_checkpoint(layout, {"out.weight": weight})
    assert torch.equal(old["projection"], weight.T)
    assert torch.equal(from_checkpoint(layout, old)["out.weight"], weight)


def test_a_mark_is_written_where_a_format_implies_something() -> None:
    marked = CheckpointFormat(
        ("w", "mark"), ignored=("mark", "other"), implies=(("kind", "new"), ("size", 2))
    )
    assert marked.marks == ("mark",)
    assert not LAYOUT.marks
    written = to_checkpoint(marked, {"w": torch.ones(1)})
    assert written["mark"].shape == (0,) and set(written) == {"w", "mark"}
    assert set(from_checkpoint(marked, written)) == {"w"}


@pytest.mark.parametrize("name", ["own", "other"])
def test_a_key_map_that_names_nothing_is_refused(name: str, tmp_path: Path) -> None:
    """A function that is not given, and a format that is not declared."""
    path = tmp_path / "key_maps.json"
    path.write_text(json.dumps(KEY_MAPS))
    known = {} if name == "own" else {"own": same_config}
    with pytest.raises(KeyError, match=name):
        read_key_maps(path, known)
