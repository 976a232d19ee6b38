"""Notice damage of files that decoding alone does not show.

Pillow raises for some damage of an image and decodes the rest to other pixels. Where
another decoder or a checksum knows more, it is asked once per file and run. The rest is
noticed only where a file changes after it was inspected.
"""

from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from dstrain.data.damage.faults import raise_system_fault
from dstrain.data.damage.truncation import JPEG_END, JPEG_FILL, JPEG_SCAN, jpeg_segments
from dstrain.errors import StateError, UsageError
from dstrain.storage import file_mark
from dstrain.storage.hashing import FileMark

MAX_BYTES = 2**30
"""Bytes of the largest JPEG that is checked, since all are read at once."""
FRAMES = frozenset({0xC0, 0xC1, 0xC2})
"""Markers of the kinds of JPEG that FFmpeg knows; others are arithmetic or lossless."""
EIGHTH = 3
"""FFmpeg's number for a decoded size of an eighth: the same data is read, in less time."""
UNREAD_BYTES = 512
UNREAD_SHARE = 100
"""A whole JPEG is also read to within this many bytes, and this part, of the end of its
last scan: more than the block of pixels that FFmpeg lets run over the end.
"""


def check_unchanged(path: str | Path, mark: FileMark) -> None:
    """Raise StateError for a file whose size or time of content was another one; one
    that is gone passes, since whoever opens it says so.
    """
    try:
        # The rest of a mark changes with the file's entry, too, such as its permissions.
        if file_mark(path)[:2] == mark[:2]:
            return
    except OSError as error:
        raise_system_fault(path, error)
        return
    raise StateError(
        path,
        "changed after the run had inspected it",
        "leave a dataset as it is while a run uses it, and run the same command again",
    )


def check_content(path: Path, form: str | None) -> None:
    """Raise for an image of Pillow's format `form` whose decoder finds it damaged.

    PNG has a checksum in every chunk; Pillow skips those of the pixels while it decodes.
    Of JPEG, libjpeg only warns, and Pillow does not show that; FFmpeg refuses more.
    """
    if form == "PNG":
        with Image.open(path, formats=("PNG",)) as image:
            image.verify()
    elif form in ("JPEG", "MPO") and find_spec("av") is not None:
        _check_jpeg(path)


def _check_jpeg(path: Path) -> None:
    """Raise UsageError unless FFmpeg finds every block of pixels, and nothing beyond."""
    if path.stat().st_size > MAX_BYTES:
        return
    data = path.read_bytes()
    segments = jpeg_segments(data)
    if not FRAMES & segments.keys():
        return
    scan = segments.get(JPEG_SCAN, len(data))
    end = data.find(JPEG_END, scan)
    if end < 0 or not _is_sound(data):
        raise UsageError(path, "is damaged: its JPEG data is invalid")
    # Zeros, as a file system leaves them for what it lost, are valid codes: there are
    # too few pixels or too many. If the end can be left out, it was never read.
    start = data.rfind(bytes([JPEG_FILL, JPEG_SCAN]), scan, end)
    unread = UNREAD_BYTES + (end - start) // UNREAD_SHARE
    if end - start > 4 * unread and _is_sound(data[: end - unread] + JPEG_END):
        raise UsageError(path, "is damaged: its JPEG data has more than its pixels")


def _is_sound(data: bytes) -> bool:
    """Return whether FFmpeg decodes a JPEG."""
    import av

    decoder = av.CodecContext.create("mjpeg", "r")
    decoder.thread_count = 1
    decoder.options = {
        "err_detect": "explode",
        "lowres": str(EIGHTH),
        "max_pixels": str(Image.MAX_IMAGE_PIXELS),
    }
    try:
        decoder.decode(av.Packet(data))
    except av.error.InvalidDataError:
        return False
    except av.error.PatchWelcomeError:
        return True  # a kind that FFmpeg does not know
    return True
