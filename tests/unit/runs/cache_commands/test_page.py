"""A page of images: no reference to anything outside, every text escaped."""

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from dstrain.runs.cache_commands.page import SIDE, Card, write_page
from PIL import Image

HOSTILE = (
    "</p><script>alert(1)</script>",
    '" onerror="alert(1)',
    "<img src=https://example.org/x.png>",
    "</title><style>body{display:none}</style>",
    "&lt;b&gt; \ud800 {title}",
)


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def written(path: Path, *cards: Card, title: str = "title") -> Elements:
    write_page(path, title, ["fact"], ["note"], cards)
    return Elements(path.read_text())


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_are_shown_and_never_part_of_the_page(tmp_path: Path, text: str) -> None:
    card = Card([], text, text, [text])
    want = [
        tag for tag, _ in written(tmp_path / "a.html", Card([], "a", "b", ["c"])).found
    ]
    page = written(tmp_path / "b.html", card, title=text)
    assert [tag for tag, _ in page.found] == want
    assert page.text.count(text.encode(errors="replace").decode()) == 5


def test_an_image_is_a_thumbnail_in_the_page_itself(tmp_path: Path) -> None:
    wide = Image.new("RGBA", (1000, 500), (255, 0, 0, 255))
    page = written(tmp_path / "a.html", Card([wide, wide], "", "row 0", ()))
    first, second = [own for tag, own in page.found if tag == "img"]
    assert first == second
    assert (first["width"], first["height"]) == (str(SIDE), str(SIDE // 2))
    kind, _, data = str(first["src"]).partition(",")
    assert kind == "data:image/jpeg;base64"
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert image.size == (SIDE, SIDE // 2)
    red, green, _ = image.getpixel((9, 9))
    assert red > 240 > 20 > green
    assert "row 0, 1000 x 500 pixels" in page.text


def test_nothing_outside_is_named_and_both_schemes_of_colours_are_there(
    tmp_path: Path,
) -> None:
    path = tmp_path / "new/folder/a.html"
    page = written(path, Card([Image.new("L", (4, 4))], "a", "b", ()))
    text = re.sub(r"base64,[^\"]+", "", path.read_text())
    assert not re.search(r"https?:|//|url\(|@import|<script|<link", text)
    assert "default-src 'none'" in text
    assert "color-scheme: light dark" in text
    assert ("meta", {"charset": "utf-8"}) in page.found
    assert "width=device-width" in text
