"""Write sizes of memory, and parse those of samples."""

from dstrain.errors import UsageError


def as_size(size: float) -> str:
    """Write bytes for people: '38.06 GiB', '512.0 MiB', '3.1 KiB'."""
    if size >= 2**30 / 10:
        return f"{size / 2**30:.2f} GiB"
    if size >= 2**20 / 10:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**10:.1f} KiB"


def parse_resolutions(text: str | None) -> tuple[int, ...]:
    """Return the sides in pixels that a value such as 512,768 names; () for None.

    Raises UsageError for what is none, and for one that is named twice.
    """
    if text is None:
        return ()
    return _numbers("--resolution", text, "pixels, such as 1024")


def parse_frames(value: int | str) -> tuple[int, ...]:
    """Return the numbers of frames that a value such as 81 or 17,33,49 names, the least
    first.

    Raises UsageError for what is none, and for one that is named twice.
    """
    found = _numbers("--num_frames", str(value), "frames, such as 81")
    return tuple(sorted(found))


def _numbers(flag: str, text: str, noun: str) -> tuple[int, ...]:
    found: list[int] = []
    for word in text.split(","):
        name = word.strip()
        if not (name.isascii() and name.isdigit()) or int(name) < 1:
            what = f"expected a number of {noun}, or several, comma-separated, got {text!r}"
            raise UsageError(flag, what)
        if int(name) in found:
            raise UsageError(flag, f"{name} is named twice")
        found.append(int(name))
    return tuple(found)
