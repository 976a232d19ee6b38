"""`dstrain cache show`: decoded latents, captions and sizes of the samples of a plan."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from dstrain import Frames, StateError, UsageError
from dstrain.runs import Wanted, show
from dstrain.runs.cache_commands import contact_sheet
from dstrain.runs.cache_commands.contact_sheet import choose
from dstrain.runs.cache_commands.contents import Contents
from dstrain.runs.cache_commands.page import Card
from PIL import Image

from tests.support.caching_project import Place, noise_image
from tests.support.runs import CAPTIONS, opened, project, train

ALL = Wanted(None, (), 100, {})


@pytest.fixture(scope="module")
def here(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose cache is filled; a test that changes it puts it back."""
    folder = project(tmp_path_factory.mktemp("project"))
    train(folder, task="sft:data_process", feature_cache=folder / "cache")
    return folder


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """What was written on the page."""
    found: dict[str, object] = {}

    def write(output: Path, title: str, facts: list[str], notes: list[str], cards: Iterator[Card]) -> None:  # fmt: skip
        found.update(title=title, notes=notes, cards=list(cards))

    monkeypatch.setattr(contact_sheet, "write_page", write)
    yield found


def cards(page: dict[str, object]) -> list[Card]:
    found = page["cards"]
    assert isinstance(found, list)
    return found


def test_latents_are_decoded_and_captions_are_those_of_the_rows(
    here: Path, page: dict[str, object]
) -> None:
    show(here / "cache", here / "x.html", ALL)
    found = cards(page)
    assert page["notes"] == []
    assert [card.caption for card in found] == list(CAPTIONS)
    assert [card.images[0].size for card in found] == [(16, 16), (24, 16)] * 3
    assert found[1].place == "row 1 (metadata.json:2)"
    assert found[1].sizes[0] == "input_latents 1 x 4 x 2 x 3"
    pipeline = opened(here / "model")
    with Image.open(here / "data/1.png") as image:
        values = {"input_image": image.convert("RGB")}
    encode = next(unit for unit in pipeline.spec.units if unit.name == "encode_image")
    with torch.no_grad():
        latents = encode.run(values, pipeline.bind_components(encode))["input_latents"]
        decode = pipeline.spec.decoders[0]
        want = decode.run({}, pipeline.bind_components(decode), latents=latents)
    assert np.array_equal(np.array(found[1].images[0]), np.array(want["image"]))


def test_captions_of_each_of_several_datasets_are_read_with_its_own_options(
    here: Path, page: dict[str, object], tmp_path: Path
) -> None:
    rows = [{"image": "0.png", "title": "a title", "prompt": "not read"}]
    (tmp_path / "more").mkdir()
    (tmp_path / "more/own.json").write_text(json.dumps(rows))
    shutil.copy(here / "data/0.png", tmp_path / "more/0.png")
    places = {"dataset_base_path": str(tmp_path / "more")}
    places["dataset_metadata_path"] = str(tmp_path / "more/own.json")
    titles = json.dumps({**places, "column": ["prompt=title"]})
    (tmp_path / "folder").mkdir()
    shutil.copy(here / "data/0.png", tmp_path / "folder/1.png")
    folder = {"dataset_base_path": str(tmp_path / "folder"), "default_caption": "none"}
    several = (titles, json.dumps(folder))
    cache = tmp_path / "cache"
    train(here, task="sft:data_process", feature_cache=cache, dataset=several)
    show(cache, tmp_path / "x.html", ALL)
    assert page["notes"] == []
    found = cards(page)
    captions = [card.caption for card in found]
    assert captions == [*CAPTIONS, "a title", "none"]
    assert found[6].place == "row 6 (own.json:1)"


def test_captions_are_shown_as_the_model_is_given_them(
    tmp_path: Path, page: dict[str, object]
) -> None:
    project(tmp_path)
    table = tmp_path / "data/metadata.json"
    rows = json.loads(table.read_text())[:3]
    for row, caption in zip(rows, ("a [trigger]", "b, c", "sks\na dog"), strict=True):
        row["prompt"] = caption
    table.write_text(json.dumps(rows))
    more = {"dataset_base_path": str(tmp_path / "data"), "trigger_word": "tok"}
    train(
        tmp_path,
        task="sft:data_process",
        feature_cache=tmp_path / "cache",
        trigger_word="sks",
        caption_lines=True,
        shuffle_tags=True,
        dataset=(json.dumps(more),),
    )
    show(tmp_path / "cache", tmp_path / "x.html", ALL)
    captions = dict.fromkeys(card.caption for card in cards(page))
    first = ["a sks", "sks, b, c", "sks\nsks, a dog"]
    assert list(captions) == [*first, "a tok", "tok, b, c", "tok, sks\ntok, a dog"]


def test_without_a_model_or_a_dataset_the_page_says_so(
    here: Path, page: dict[str, object]
) -> None:
    for name, note in (
        ("data", "['captions are not shown"),
        ("model/vae", "['latents are not decoded"),
    ):
        (here / name).rename(here / "away")
        try:
            show(here / "cache", here / "x.html", ALL)
        finally:
            (here / "away").rename(here / name)
        is_data = name == "data"
        assert str(page["notes"]).startswith(note)
        assert len(cards(page)) == 6
        assert bool(cards(page)[0].images) == is_data
        assert bool(cards(page)[0].caption) != is_data


def test_a_caption_of_metadata_that_changed_is_not_shown(
    here: Path, page: dict[str, object]
) -> None:
    path = here / "data/metadata.json"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"cat", b"cow"))
    try:
        show(here / "cache", here / "x.html", ALL)
    finally:
        path.write_bytes(whole)
    assert "has changed" in str(page["notes"])
    assert not any(card.caption for card in cards(page))


def test_images_of_the_cache_are_shown_as_they_are(
    shared_place: Place, page: dict[str, object]
) -> None:
    show(shared_place.cache, shared_place.folder / "x.html", ALL)
    notes = str(page["notes"])
    assert "neither captions nor decoded latents are shown" in notes
    assert len(cards(page)) == 4


def test_rows_are_chosen_or_spread_evenly(shared_place: Place) -> None:
    (plan,) = Contents.of(shared_place.cache).plans
    assert choose(plan, (), 100) == [0, 1, 2, 3]
    assert choose(plan, (), 2) == [0, 2]
    assert choose(plan, (range(3, 4), range(2)), 100) == [3, 0, 1]
    assert choose(plan, (range(9),), 3) == [0, 1, 2]
    with pytest.raises(UsageError, match="no row 4; the plan has rows 0 to 3"):
        choose(plan, (range(4, 9),), 100)


def test_a_video_is_a_few_of_its_frames() -> None:
    pixels = torch.arange(10, dtype=torch.uint8)[:, None, None, None].expand(
        10, 2, 2, 3
    )
    images = contact_sheet._images(
        {"a": Frames(pixels, 8.0), "b": noise_image(1), "c": 3}
    )
    tops = [np.array(one)[0, 0, 0] for one in list(images)[:4]]
    assert tops == [0, 3, 6, 9]
    (only,) = contact_sheet._images({"a": Frames(pixels[:1], 8.0)})
    assert only.size == (2, 2)


def test_what_is_there_is_left_alone_and_a_cache_without_plans_is_refused(
    shared_place: Place, tmp_path: Path
) -> None:
    (tmp_path / "x.html").write_text("mine")
    with pytest.raises(UsageError, match="existing files were not modified"):
        show(shared_place.cache, tmp_path / "x.html", ALL)
    assert (tmp_path / "x.html").read_text() == "mine"
    shutil.copytree(shared_place.cache, tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache/plans")
    with pytest.raises(StateError, match="contains no plan"):
        show(tmp_path / "cache", tmp_path / "y.html", ALL)
