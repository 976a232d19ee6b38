"""Exactly what a change affects is computed again: nothing stale is used, and nothing
is computed for nothing.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dstrain.storage import ManyFiles

from tests.support import caching_family
from tests.support.caching_project import (
    Place,
    change_keeping_times,
    change_weights,
    log_units,
    noise_image,
    write_place,
    write_rows,
)
from tests.support.clock import settle


def caption(place: Place) -> None:
    place.rows[0]["prompt"] = "another word"
    write_rows(place.data, place.rows)


def one_byte_of_an_image(place: Place) -> None:
    path = place.data / "0.png"
    change_keeping_times(path, (lambda: noise_image(9).save(path)))


def tokenizer(place: Place) -> None:
    (place.folder / "model/tokenizer/offset.txt").write_text("2")


def configuration_of_the_encoder(place: Place) -> None:
    (place.folder / "model/vae/config.json").write_text('{"scale": 1}')


def touch(place: Place) -> None:
    for path in place.folder.rglob("*.*"):
        os.utime(path)


def rename(place: Place) -> None:
    for i, row in enumerate(place.rows):
        row["image"] = f"new {i}.png"
        (place.data / f"{i}.png").rename(place.data / f"new {i}.png")
    write_rows(place.data, place.rows)
    (place.folder / "model/tokenizer/.cache").mkdir()
    (place.folder / "model/tokenizer/.cache/state").touch()


def nothing(place: Place) -> None:
    pass


def another_version(place: Place) -> None:
    """A unit that two values are made by says that it makes them otherwise now."""
    caching_family.VERSIONS = {"describe": 2}


def of_a_unit_nobody_needs(place: Place) -> None:
    caching_family.VERSIONS = {"idle": 2}


ALL = Counter({"encode_prompt": 3, "describe": 3, "encode_image": 4})
IMAGES, TEXTS = Counter({"encode_image": 4}), Counter({"encode_prompt": 3})


@dataclass(frozen=True)
class Change:
    """What is done to a dataset of 4 images and 3 captions, or other flags; how
    often each unit runs then.
    """

    name: str
    computed: Mapping[str, int]
    make: Callable[[Place], object] = nothing
    flags: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


CHANGES = (
    Change("a caption", {"encode_prompt": 1, "describe": 1}, caption),
    Change(
        "an image, of equal size and time", {"encode_image": 1}, one_byte_of_an_image
    ),
    Change("--height and --width", IMAGES, flags={"height": 16, "width": 16}),
    Change("--max_pixels", IMAGES, flags={"max_pixels": 16 * 16}),
    Change("weights of an encoder of images", IMAGES, partial(change_weights, "vae")),
    Change(
        "weights of an encoder of texts", TEXTS, partial(change_weights, "text_encoder")
    ),
    Change("configuration of an encoder", IMAGES, configuration_of_the_encoder),
    Change("a file of the tokenizer", TEXTS, tokenizer),
    Change("dtype", ALL, flags={"mixed_precision": "bf16"}),
    Change("version of a unit", {"describe": 3}, another_version),
    Change("version of a unit that is not needed", {}, of_a_unit_nobody_needs),
    Change("touch", {}, touch),
    Change("rename", {}, rename),
    Change(
        "flags of training",
        {},
        flags={"learning_rate": 1.0, "dataset_repeat": 7, "max_timestep_boundary": 0.5},
    ),
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    log_units(monkeypatch, tmp_path)
    monkeypatch.setattr(caching_family, "VERSIONS", caching_family.VERSIONS)
    yield write_place(tmp_path / "place")


@pytest.mark.promise(
    "R6", "nothing stale is used: what a change affects is computed again"
)
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_exactly_what_a_change_affects_is_computed_again(
    change: Change, place: Place
) -> None:
    assert place.fill() == ALL
    settled(place)
    change.make(place)
    assert place.fill(**change.flags) == change.computed
    fresh = place.folder / "fresh"
    place.fill(**change.flags, feature_cache=fresh)
    assert place.values(**change.flags) == place.values(
        **change.flags, feature_cache=fresh
    )
    assert place.fill(**change.flags) == {}


def settled(place: Place) -> None:
    """Let stage 1 remember digests of files that were written just now."""
    memory = place.cache / "digests.npy"
    assert len(ManyFiles(memory)) == 0
    with pytest.MonkeyPatch.context() as patch:
        settle(patch)
        place.fill()
    assert len(ManyFiles(memory)) == 4
