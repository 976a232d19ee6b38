"""`dstrain cache show`: a page with decoded latents, captions and sizes of the samples of a
plan, without a reference to anything outside.
"""

import base64
import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pytest
import torch
from dstrain import Frames, StateError, UsageError
from dstrain.cache.commands.listing import as_lines, listing
from dstrain_tools.caches.contact_sheet import Wanted, show
from PIL import Image
from torch import Tensor

from tests.support import family
from tests.support.caching_project import Place
from tests.support.family import write_data
from tests.support.runs import CAPTIONS, opened, project, train

pytestmark = pytest.mark.usefixtures("tiny")

Spare = Callable[[Path], Path]
ALL = Wanted(None, (), 100, {})
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "header", "h1", "main"),
    *("p", "figure", "div", "img", "figcaption"),
}
"""All elements that a page has."""


@dataclass
class Card:
    images: list[dict[str, Any]] = field(default_factory=list)
    caption: str = ""
    place: str = ""
    sizes: str = ""


class Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, Any]]] = []
        self.notes: list[str] = []
        self.cards: list[Card] = []
        self.kind = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = dict(attrs)
        self.found.append((tag, own))
        self.kind = own.get("class") or ""
        if tag == "figure":
            self.cards.append(Card())
        elif tag == "img":
            self.cards[-1].images.append(own)

    def handle_endtag(self, tag: str) -> None:
        self.kind = ""

    def handle_data(self, data: str) -> None:
        if self.kind == "note":
            self.notes.append(data)
        elif self.kind in ("caption", "place", "sizes"):
            setattr(self.cards[-1], self.kind, data)


def named(here: Path) -> Wanted:
    """All, with the model and the dataset of a project."""
    places = {"dataset_base_path": here / "data", "model_id": f"{here}/model"}
    return replace(ALL, named=places)


def page_of(cache: Path, output: Path, wanted: Wanted = ALL) -> Page:
    show(cache, output, wanted)
    return Page(output)


def shown(element: dict[str, Any]) -> Image.Image:
    """The image in an element."""
    kind, _, data = element["src"].partition(",")
    assert kind == "data:image/jpeg;base64"
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert (element["width"], element["height"]) == tuple(map(str, image.size))
    return image


def test_latents_are_decoded_and_captions_are_those_of_the_rows(
    here: Path, tmp_path: Path
) -> None:
    page = page_of(here / "whole", tmp_path / "new/folder/x.html", named(here))
    assert page.notes == []
    assert [card.caption for card in page.cards] == list(CAPTIONS)
    sizes = [shown(card.images[0]).size for card in page.cards]
    assert sizes == [(16, 16), (24, 16)] * 3
    card = page.cards[1]
    assert card.place.startswith("row 1 (metadata.json:2), 24 x 16 ")
    assert "input_latents 1 x 4 x 2 x 3" in card.sizes
    pipeline = opened(here / "model")
    with Image.open(here / "data/1.png") as image:
        values = {"input_image": image.convert("RGB")}
    encode = next(unit for unit in pipeline.spec.units if unit.name == "encode_image")
    decode = pipeline.spec.decoders[0]
    with torch.no_grad():
        latents = encode.run(values, pipeline.bind_components(encode))["input_latents"]
        want = decode.run({}, pipeline.bind_components(decode), latents=latents)
    data = io.BytesIO()
    want["image"].save(data, "JPEG", quality=85)
    assert np.array_equal(np.array(shown(card.images[0])), np.array(Image.open(data)))


@pytest.mark.parametrize("name", ["data", "data/metadata.json", "model/vae"])
def test_without_a_model_or_the_dataset_as_it_was_the_page_says_so(
    name: str, here: Path, tmp_path: Path, spare: Spare
) -> None:
    path = spare(here / name)
    if path.is_dir():
        path.rename(tmp_path / "away")
    else:
        path.write_text("[]")
    page = page_of(here / "whole", tmp_path / "x.html", named(here))
    (note,) = page.notes
    assert ("vae" if name == "model/vae" else str(path)) in note
    assert len(page.cards) == 6
    assert bool(page.cards[0].images) == (name != "model/vae")
    assert bool(page.cards[0].caption) == (name == "model/vae")


def test_of_two_datasets_the_one_that_is_trained_on_is_shown(
    here: Path, tmp_path: Path
) -> None:
    write_data(tmp_path / "second", ("an owl",))
    flags = {"validation_dataset_base_path": tmp_path / "second"}
    train(here, task="sft:data_process", feature_cache=tmp_path / "cache", **flags)
    page = page_of(tmp_path / "cache", tmp_path / "x.html", named(here))
    assert [card.caption for card in page.cards] == list(CAPTIONS)
    listed = listing(tmp_path / "cache")
    assert [plan["use"] for plan in listed["plans"]] == ["", "validation"]
    assert "sft (validation)" in as_lines(listed)


class Video(TypedDict):
    video: Frames


def video_of(count: int, height: int, width: int) -> Any:
    """A decoder that gives so many frames, each brighter than the one before."""

    def decode(latents: Tensor, *, vae: Any) -> Video:
        levels = torch.arange(count, dtype=torch.uint8)[:, None, None, None] * 20
        return {"video": Frames(levels.expand(count, height, width, 3), 8.0)}

    return decode


@pytest.mark.parametrize(("count", "levels"), [(10, [0, 60, 120, 180]), (1, [0])])
def test_a_video_is_thumbnails_of_a_few_of_its_frames(
    count: int,
    levels: list[int],
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = replace(family.BASE, decoders=(video_of(count, 500, 1000),))
    monkeypatch.setitem(family.PIPELINES, "base", spec)
    page = page_of(here / "whole", tmp_path / "x.html", replace(named(here), limit=1))
    (card,) = page.cards
    images = [shown(one) for one in card.images]
    assert [image.size for image in images] == [(320, 160)] * len(levels)
    tops = [np.array(image)[0, 0, 0] for image in images]
    assert np.allclose(tops, levels, atol=2)
    assert "1000 x 500 pixels" in card.place


@pytest.mark.parametrize(
    ("rows", "limit", "chosen"),
    [
        ((), 100, [0, 1, 2, 3]),
        ((), 2, [0, 2]),
        ((range(3, 4), range(2)), 100, [3, 0, 1]),
        ((range(9),), 3, [0, 1, 2]),
    ],
)
def test_rows_are_chosen_or_spread_evenly(
    rows: tuple[range, ...],
    limit: int,
    chosen: list[int],
    shared_place: Place,
    tmp_path: Path,
) -> None:
    page = page_of(
        shared_place.cache, tmp_path / "x.html", Wanted(None, rows, limit, {})
    )
    assert [int(card.place.split()[1]) for card in page.cards] == chosen


def test_what_is_there_is_left_alone_and_what_cannot_be_shown_is_refused(
    shared_place: Place, tmp_path: Path
) -> None:
    (tmp_path / "x.html").write_text("mine")
    with pytest.raises(UsageError) as caught:
        show(shared_place.cache, tmp_path / "x.html", ALL)
    assert caught.value.where == "--output"
    assert (tmp_path / "x.html").read_text() == "mine"
    with pytest.raises(UsageError, match=r"4;.* 0 to 3") as caught:
        show(shared_place.cache, tmp_path / "y.html", replace(ALL, rows=[range(4, 9)]))
    assert caught.value.where == "--rows"
    shutil.copytree(shared_place.cache, tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache/plans")
    with pytest.raises(StateError) as caught:
        show(tmp_path / "cache", tmp_path / "y.html", ALL)
    assert caught.value.where == str(tmp_path / "cache")
    assert not (tmp_path / "y.html").exists()


HOSTILE = (
    "</p><script>alert(1)</script>",
    '" onerror="alert(1)',
    "<img src=https://example.org/x.png>",
    "</title><style>body{display:none}</style>",
    "&lt;b&gt; {title}",
    "a\N{RIGHT-TO-LEFT OVERRIDE}b & c",
)


def test_texts_are_shown_and_never_part_of_the_page_which_names_nothing_outside(
    tmp_path: Path,
) -> None:
    project(tmp_path)
    table = tmp_path / "data/metadata.json"
    rows = json.loads(table.read_text())
    for row, caption in zip(rows, HOSTILE, strict=True):
        row["prompt"] = caption
    table.write_text(json.dumps(rows))
    cache = tmp_path / "<img src=x>"
    train(tmp_path, task="sft:data_process", feature_cache=cache)
    page = page_of(cache, tmp_path / "x.html", named(tmp_path))
    assert {tag for tag, _ in page.found} == TAGS
    assert len([tag for tag, _ in page.found if tag == "img"]) == len(rows)
    assert [card.caption for card in page.cards] == [*HOSTILE]
    text = re.sub(r"base64,[^\"]+", "", (tmp_path / "x.html").read_text())
    assert not re.search(r"(?<!=)https?:|url\(|@import|<script|<link", text)
    assert "default-src 'none'" in text
    assert "color-scheme: light dark" in text
    assert ("meta", {"charset": "utf-8"}) in page.found
    assert "width=device-width" in text
