"""Parse the options of several sizes, or several numbers of frames."""

from dstrain.errors import UsageError


def parse_resolutions(text: str | None) -> tuple[int, ...]:
    """Return the sides in pixels that a value such as 512,768 names; () for None.
    Raises UsageError for what is none, and for one that is named twice.
    """
    if text is None:
        return ()
    return _several("--resolution", text, "pixels, such as 1024")


def parse_frames(value: int | str) -> tuple[int, ...]:
    """Return the numbers of frames that a value such as 81 or 17,33,49 names, the least
    first; raises UsageError as `parse_resolutions` does.
    """
    return tuple(sorted(_several("--num_frames", str(value), "frames, such as 81")))


def _several(flag: str, text: str, noun: str) -> tuple[int, ...]:
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
