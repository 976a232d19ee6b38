"""Write images with captions as one HTML page without references to anything outside."""

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from dstrain.cache import replacing
from PIL import Image

SIDE = 320
"""Longer side of a thumbnail, in pixels."""
QUALITY = 85
STYLE = """
:root { color-scheme: light dark; font: 0.9rem/1.4 system-ui, sans-serif; }
body { margin: 1rem; background: Canvas; color: CanvasText; }
h1 { font-size: 1.2rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
header p { margin: 0 0 .3rem; overflow-wrap: anywhere; }
.note { border-left: .25rem solid #c60; padding-left: .6rem; }
main { display: grid; gap: 1rem; margin-top: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 14rem), 1fr)); }
figure { margin: 0; padding: .5rem; border: 1px solid color-mix(in srgb, CanvasText 25%, Canvas); border-radius: .3rem;
  min-width: 0; }
.images { display: grid; gap: .25rem; }
.several { grid-template-columns: 1fr 1fr; }
img { display: block; max-width: 100%; height: auto; margin: auto; }
figcaption { margin-top: .4rem; overflow-wrap: anywhere; }
.caption { margin: 0; white-space: pre-line; max-height: 12em; overflow: auto; }
.place, .sizes { margin: .2rem 0 0; color: color-mix(in srgb, CanvasText 65%, Canvas); font-size: .8rem; }
"""
HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
"""


@dataclass(frozen=True)
class Card:
    """A sample on the page."""

    images: Sequence[Image.Image]
    caption: str
    place: str
    """Its row, in words."""
    sizes: Sequence[str]
    """The shapes of its values, in words."""


def write_page(
    output: Path,
    title: str,
    facts: Sequence[str],
    notes: Sequence[str],
    cards: Iterable[Card],
) -> None:
    """Write a page, card by card; every text is escaped. Raises SystemFault."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with replacing(output) as building, building.open("w", encoding="utf-8") as file:
        file.write(HEAD.format(title=_safe(title), style=STYLE))
        file.write(f"<header>\n<h1>{_safe(title)}</h1>\n")
        for fact in facts:
            file.write(f"<p>{_safe(fact)}</p>\n")
        for note in notes:
            file.write(f'<p class="note">{_safe(note)}</p>\n')
        file.write("</header>\n<main>\n")
        for card in cards:
            file.write(_figure(card))
        file.write("</main>\n</body>\n</html>\n")


def _figure(card: Card) -> str:
    several = " several" if len(card.images) > 1 else ""
    lines = ["<figure>"]
    if card.images:
        images = "".join(map(_img, card.images))
        lines.append(f'<div class="images{several}">{images}</div>')
    lines.append("<figcaption>")
    if card.caption:
        lines.append(f'<p class="caption">{_safe(card.caption)}</p>')
    size = ""
    if card.images:
        width, height = card.images[0].size
        size = f", {width} x {height} pixels"
    lines.append(f'<p class="place">{_safe(card.place + size)}</p>')
    if card.sizes:
        lines.append(f'<p class="sizes">{_safe("; ".join(card.sizes))}</p>')
    return "\n".join([*lines, "</figcaption>", "</figure>", ""])


def _img(image: Image.Image) -> str:
    """Return an image as an element that contains its thumbnail."""
    small = image.convert("RGB")
    small.thumbnail((SIDE, SIDE))
    data = io.BytesIO()
    small.save(data, "JPEG", quality=QUALITY)
    text = base64.b64encode(data.getvalue()).decode()
    width, height = small.size
    return f'<img width="{width}" height="{height}" alt="" src="data:image/jpeg;base64,{text}">'


def _safe(text: str) -> str:
    # A caption may have half of a surrogate pair, which no file takes.
    return escape(text.encode(errors="replace").decode())
