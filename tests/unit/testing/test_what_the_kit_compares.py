"""Rows and trained sets follow from a family's declarations; values are told apart, and
LoRA files are applied by the published rules of other programs.
"""

import json
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dstrain import Frames, UsageError
from dstrain.data import DataConfig, Resolution, load_cell
from dstrain.data.row_checks import open_dataset
from dstrain.graph import FunctionSpec
from dstrain.plugin import Column, Constant, Measured, one_of, versioned
from dstrain.registry import ModelFamily, load_family
from dstrain.testing import LoraReader
from dstrain.testing.compare import greatest_difference
from dstrain.testing.fingerprints import (
    changed,
    fingerprint,
    matches,
    read_fingerprints,
    unit_fingerprints,
    write_fingerprints,
)
from dstrain.testing.kinds import has_kind
from dstrain.testing.rows import inputs, least_sizes, usual_size, write_rows
from dstrain.testing.split_equivalence import Outcome, differences, without_gradient
from PIL import Image
from torch import nn

from tests.support.kit import install_family


@pytest.fixture
def fine(site: Path) -> ModelFamily:
    """The template's family."""
    install_family("fine", site)
    return load_family("fine")


def test_rows_are_made_for_columns_of_every_kind_and_lack_what_is_optional(
    fine: ModelFamily, tmp_path: Path
) -> None:
    more = {
        "film": Column("film", "video", multiple=24, frame_multiple=4, fps=16.0),
        "first": Column("film", "image", frame="first", multiple=24),
        "count": Measured("film", "frames"),
        "mask": Column("mask", "image", mode="L"),
        "layer": Column("layer", "image", mode="RGBA"),
        "pictures": Column("pictures", "images"),
        "words": Column("words", "texts"),
        "kind": Column("kind", check=one_of("canny", "depth")),
        "number": Column("number", "number"),
        "whole": Column("whole", "integer"),
        "area": Constant(64),
    }
    plain = fine.spec("base")
    spec = replace(plain, inputs={**plain.inputs, **more})
    assert astuple(usual_size(spec)) == (48, 48, 9)
    assert [astuple(size) for size in least_sizes(spec)] == [
        (24, 24, 1),
        (24, 48, 5),
        (48, 24, 9),
        (48, 72, 13),
    ]
    folder = write_rows(spec, tmp_path / "data")
    config = DataConfig(folder, None, None, Resolution(None, None, 2**20))
    rows = open_dataset(config, spec.inputs).rows
    lacking = {"first", "mask", "layer", "pictures", "number", "whole", "film", "count"}
    full = set(spec.inputs) - {"negative_prompt"}
    assert [set(row) for row in rows] == [full] * 3 + [full - lacking] * 2
    values = inputs(spec)
    for name, cell in rows[0].items():
        loaded, value = load_cell(cell), values[name]
        assert type(loaded) is type(value), name
        if isinstance(value, Frames):
            assert (loaded.pixels.shape, loaded.fps) == (value.pixels.shape, value.fps)
        elif isinstance(value, Image.Image):
            assert (loaded.mode, loaded.size) == (value.mode, value.size)
            assert name == "first" or loaded.tobytes() == value.tobytes()
        elif name == "pictures":
            pixels = [image.tobytes() for image in value]
            assert [image.tobytes() for image in loaded] == pixels
        else:
            assert loaded == value, name


def test_the_greatest_difference_is_named_by_position_and_values() -> None:
    ours, published = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)
    ours[1, 0, 2] = 0.5
    ours[0, 1, 1] = 9.0
    published[0, 1, 1] = float("nan")
    difference, where = greatest_difference(ours, published)
    assert difference == 0.5
    assert "[1, 0, 2]: 0.5," in where
    difference, where = greatest_difference(
        torch.tensor([5.0, float("nan")]), torch.zeros(2)
    )
    assert difference == float("inf")
    assert "[1]: nan" in where
    difference, where = greatest_difference(torch.zeros(2), torch.zeros(1, 2))
    assert difference == float("inf")
    assert "[2]" in where and "[1, 2]" in where


def test_fingerprints_agree_within_a_thousandth_and_tell_all_else_apart() -> None:
    values = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    moved = values.clone()
    moved[5, 5] += 1
    mask = torch.ones(4, dtype=torch.bool)
    black, grey = (Image.new("RGB", (8, 8), (level,) * 3) for level in (0, 9))
    assert matches(fingerprint(values, "x"), fingerprint(values * (1 + 2e-4), "x"))
    for one, other in (
        (values, values * (1 + 5e-3)),
        (values, values.T),
        (values, moved),
        ("a", "b"),
        ([values], values),
        (black, grey),
        (mask, ~mask),
        (1, 2),
    ):
        found = fingerprint(one, "x")
        assert not matches(found, fingerprint(other, "x"))
        assert matches(found, json.loads(json.dumps(found)))
    assert matches(fingerprint(torch.zeros(0), "x"), fingerprint(torch.zeros(0), "x"))


def test_a_version_is_recorded_with_what_it_makes_once(tmp_path: Path) -> None:
    def made(version: int, value: float) -> dict[str, Any]:
        unit = versioned(version)(lambda: None)
        unit.__name__ = "encode"
        spec: Any = SimpleNamespace(units=[FunctionSpec.of(unit)], decoders=[])
        values = {"encode": {"x": torch.full((4,), value)}}
        return {"base": unit_fingerprints(spec, values)}

    write_fingerprints(tmp_path, made(1, 1.0))
    recorded = read_fingerprints(tmp_path)
    write_fingerprints(tmp_path, made(1, 1.0001))
    with pytest.raises(UsageError, match="encode"):
        write_fingerprints(tmp_path, made(1, 2.0))
    assert read_fingerprints(tmp_path) == recorded
    assert changed(recorded, made(2, 2.0)["base"], "base")
    write_fingerprints(tmp_path, made(2, 2.0))
    assert read_fingerprints(tmp_path) != recorded


def test_runs_differ_by_any_value_loss_or_gradient_of_any_batch() -> None:
    one, zero = torch.ones(2), torch.zeros(2)
    gradients = {"a": {"w": zero, "b": None}, "b": {"w": one, "b": None}}
    run = Outcome(None, {"a": one, "b": one}, gradients, {0: {"x": one}})  # type: ignore[arg-type]
    assert differences(run, run) == []
    assert without_gradient(run) == ["b"]
    for part, other in (
        ("values", {0: {}}),
        ("values", {0: {"x": one, "y": one}}),
        ("losses", {"a": one, "b": one.nextafter(zero)}),
        ("gradients", {**gradients, "a": {"w": zero, "b": zero}}),
        ("gradients", {**gradients, "b": {"w": one.double(), "b": None}}),
    ):
        changed: Any = {part: other}
        assert len(differences(run, replace(run, **changed))) == 1, part


@pytest.mark.parametrize(
    ("value", "kind", "fits"),
    [
        (torch.ones(1), "tensor", True),
        (1, "tensor", False),
        (True, "int", False),
        (None, "tensor | none", True),
        ([torch.ones(1)], "list[tensor]", True),
        ([torch.ones(1), 1], "list[tensor]", False),
        ({"a": 1}, "{a: int}", True),
        ("a", "str", True),
    ],
    ids=str,
)
def test_kinds_of_values(value: object, kind: str, fits: bool) -> None:
    assert has_kind(value, kind) is fits


@pytest.mark.parametrize(("alpha", "scale"), [(None, 1.0), (6.0, 1.5)])
def test_a_lora_is_added_by_alpha_over_rank_and_unknown_keys_are_left(
    alpha: float | None, scale: float
) -> None:
    reader = LoraReader(None, "lora_unet_", underscored=True)
    assert reader.layer("1.0.weight") == "lora_unet_1_0"
    below = LoraReader(None, "diffusion_model.")
    assert below.layer("1.0.weight") == "diffusion_model.1.0"
    plain = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2)))
    weight = plain[0].weight.detach().clone()
    file = reader.lora(plain, rank=4, alpha=alpha)
    changed, left = reader.read(plain, {**file, "lora_unet_9.alpha": torch.ones(())})
    assert left == ["lora_unet_9.alpha"]
    names = ("lora_A", "lora_B") if alpha is None else ("lora_down", "lora_up")
    down, up = (
        one.double()
        for name in names
        for key, one in file.items()
        if key.startswith("lora_unet_0.") and f".{name}." in key
    )
    wanted = weight.double() + scale * (up @ down)
    assert torch.equal(changed.state_dict()["0.weight"], wanted)
    assert torch.equal(plain[0].weight, weight)
