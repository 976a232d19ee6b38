"""What identifies a plan: the flags that count, units, columns, and every set of inputs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from dstrain.graph import code_of
from dstrain.plugin import Column
from dstrain.runs.plan_identity import _input_record, plan_identity

from tests.support import caching_family
from tests.support.caching_project import Place, log_units, write_place, write_rows


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    log_units(monkeypatch, tmp_path)
    yield write_place(tmp_path / "place")


def facts(place: Place, **config: Any) -> dict[str, Any]:
    setup = place.setup(**config)
    return plan_identity(setup, list(dict.fromkeys(map(frozenset, setup.dataset.rows))))


@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        (
            {},
            {
                "--height": None,
                "--width": None,
                "--max_pixels": 1048576,
                "--data_file_keys": None,
                "--extra_inputs": None,
            },
        ),
        (
            {"height": 16, "width": 24, "data_file_keys": " image,"},
            {
                "--height": 16,
                "--width": 24,
                "--max_pixels": None,
                "--data_file_keys": "image",
                "--extra_inputs": None,
            },
        ),
    ],
)
def test_flags_count_in_one_of_the_ways_to_write_them(
    place: Place, given: dict[str, Any], recorded: dict[str, Any]
) -> None:
    found = facts(place, **given)
    assert {name: found[name] for name in found if name.startswith("--")} == recorded


def test_units_and_inputs_are_facts_of_their_own(place: Place) -> None:
    found = facts(place)
    unit = found["unit encode_image"]
    assert unit["version"] == 0
    assert unit["code"] == code_of(caching_family.encode_image).digest
    assert unit["reads"] == {"input_image": "input_image"}
    assert unit["uses"] == ["dtype", "vae"]
    assert found["input input_image"]["multiple"] == 8
    assert found["input input_image"]["mode"] == "RGB"
    assert found["input height"] == {"is": "the height of input_image"}
    # Nothing needs this unit, and no row has this column.
    assert not [name for name in found if "idle" in name or "reference" in name]


def test_every_set_of_inputs_has_its_values(place: Place) -> None:
    place.rows[1]["reference"] = "0.png"
    write_rows(place.data, place.rows)
    found = facts(place)
    without = found["cached values for rows without reference"]
    assert "reference" in found["cached values"]
    assert "reference" not in without
    assert found["input reference"]["mode"] == "RGBA"


def test_the_order_of_rows_does_not_count(place: Place) -> None:
    place.rows[1]["reference"] = "0.png"
    write_rows(place.data, place.rows)
    first = facts(place)
    write_rows(place.data, place.rows[::-1])
    assert facts(place) == first


def test_a_set_of_inputs_without_a_plan_is_a_fact(place: Place) -> None:
    setup = place.setup()
    found = plan_identity(setup, [frozenset(setup.dataset.rows[0]), frozenset()])
    (plan,) = [name for name in found if name.startswith("plan for rows without ")]
    assert found[plan].startswith("none: predict needs ")


def test_a_frame_of_a_video_has_the_frame_rate_of_the_video(place: Place) -> None:
    setup = place.setup()
    video = Column("image", "video", multiple=8, frame_multiple=4, fps=15.0)
    inputs = {
        **setup.spec.inputs,
        "input_image": Column("image", "image", frame="first"),
        "clip": video,
    }
    # The record is not checked again: nothing reads the clip.
    spec = setup.spec
    changed = replace(setup, spec=spec)
    object.__setattr__(spec, "inputs", MappingProxyType(inputs))
    found = plan_identity(changed, [frozenset(setup.dataset.rows[0])])
    assert found["input input_image"]["frame"] == "first"
    assert found["input input_image"]["fps"] == 15.0
    assert found["input input_image"]["frame_multiple"] == 4


def test_what_masks_are_of_is_recorded_of_masks_alone(place: Place) -> None:
    setup = place.setup()
    inputs = {**setup.spec.inputs, "mask": Column("mask", "image", of="input_image")}
    spec = setup.spec
    object.__setattr__(spec, "inputs", MappingProxyType(inputs))
    assert _input_record(setup, "mask")["of"] == "input_image"
    # As it was before masks said it: caches stay usable.
    assert set(_input_record(setup, "input_image")).isdisjoint({"of", "entries"})


def test_a_run_without_masks_is_identified_as_before_there_were_masks(
    place: Place,
) -> None:
    facts = plan_identity(place.setup(), place.setup().dataset.input_sets)
    assert not [fact for fact in facts if "mask" in fact]
