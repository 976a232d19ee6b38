"""An image file that is cut, or a PNG that is damaged, is refused when it is decoded, and
no sound one is.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain import UsageError
from dstrain.data import load_image, read_size
from PIL import Image

from tests.support.bad_files import encoded
from tests.support.noise_images import noise_image

SMALL = noise_image(52, 40)
NOISE = noise_image(168, 120)
END = b"\xff\xd9"
"""Of a JPEG."""
KINDS: dict[str, tuple[Image.Image, dict[str, Any]]] = {
    "PNG": (SMALL, {}),
    "JPEG": (SMALL, {"quality": 90}),
    "JPEG progressive": (SMALL, {"progressive": True}),
    "MPO": (SMALL, {"save_all": True, "append_images": [SMALL]}),
    "GIF": (SMALL, {}),
    "WEBP": (SMALL, {"lossless": True}),
    "AVIF": (SMALL, {}),
    "BMP": (SMALL, {}),
    "BMP 1": (SMALL.convert("1"), {}),
    "PPM": (SMALL, {}),
    "PPM L": (SMALL.convert("L"), {}),
    "PPM 1": (SMALL.convert("1"), {}),
    "PPM I;16B": (Image.fromarray(np.full((40, 52), 40_000, np.uint16)), {}),
    "TIFF": (SMALL, {}),
    "TIFF strips": (SMALL, {"compression": "tiff_lzw", "strip_size": 512}),
    "PNG 1": (SMALL.convert("1"), {}),
}


def written(kind: str) -> bytes:
    image, options = KINDS[kind]
    return encoded(kind.split()[0], image, **options)


def load(folder: Path, content: bytes) -> Image.Image:
    """Load an image with these bytes."""
    (folder / "a").write_bytes(content)
    return load_image(folder / "a", "RGB", None)


def refused(folder: Path, content: bytes) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load(folder, content)
    assert caught.value.where == str(folder / "a")
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_is_accepted_also_with_something_behind_it(
    tmp_path: Path, kind: str
) -> None:
    content = written(kind)
    endings = [b"", b"\0" * 8, b"more of it" * 20]
    for more in endings[: 2 if kind in ("GIF", "AVIF") else 3]:
        assert load(tmp_path, content + more).size == (52, 40)
        assert read_size(tmp_path / "a") == (40, 52)
    tiny = encoded(kind.split()[0], Image.new(KINDS[kind][0].mode, (1, 1)))
    load(tmp_path, tiny)
    assert read_size(tmp_path / "a") == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, kind: str) -> None:
    content = written(kind)
    if kind == "MPO":
        # Of several images the first is read.
        load(tmp_path, content[:-20])
        content = content[: content.find(END, 1000) + 2]
    for length in range(1, len(content), max(1, len(content) // 25)):
        refused(tmp_path, content[:length])


def test_every_checksum_of_a_png_is_compared(tmp_path: Path) -> None:
    content = encoded("PNG", NOISE)
    load(tmp_path, content + b"more")
    for place in range(40, len(content) - 12, len(content) // 50):
        changed = bytearray(content)
        changed[place] ^= 1
        refused(tmp_path, bytes(changed))
