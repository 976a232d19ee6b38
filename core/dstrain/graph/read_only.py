"""Notice a function that changes one of its inputs in place."""

from collections.abc import Mapping
from typing import Any

from PIL import Image
from torch import Tensor

from dstrain.errors import UsageError
from dstrain.graph.values import Frames


class read_only:
    """Raise UsageError if the block changes one of the values in place, by its name.

    What torch does not count is not seen: writes through `.data` or `.numpy()`.
    """

    # No generator, which would take longer than a step's values.
    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self.values = values
        self.before = {name: _parts(value) for name, value in values.items()}

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Compare, unless the block raised."""
        if kind is not None:
            return
        for name, before in self.before.items():
            if _differ(before, _parts(self.values[name])):
                raise UsageError(
                    self.where,
                    f"changes its input {name!r} in place; others read the same value",
                    "change a copy: tensor.clone(), list(values), dict(record), image.copy()",
                )


Parts = list[tuple[Any, Any]]
"""Each part of a value, with what an in-place change of it alters."""


def _parts(value: Any) -> Parts:
    parts: Parts = []
    _add_parts(value, parts)
    return parts


def _add_parts(value: Any, parts: Parts) -> None:
    """Add the parts of a value; a few microseconds, since every step does it."""
    if isinstance(value, Tensor):
        try:
            version = value._version  # torch has no public name for it
        except RuntimeError:
            version = 0  # Inference tensors count no versions.
        parts.append((value, (version, value.data_ptr(), value.requires_grad)))
    elif isinstance(value, Image.Image):
        parts.append((value, (value.mode, value.size, value.tobytes())))
    elif isinstance(value, Frames):
        _add_parts(value.pixels, parts)
    elif isinstance(value, list):
        parts.append((value, None))
        for item in value:
            _add_parts(item, parts)
    elif isinstance(value, dict):
        parts.append((value, list(value)))
        for item in value.values():
            _add_parts(item, parts)
    else:
        parts.append((value, None))


def _differ(before: Parts, after: Parts) -> bool:
    """Return whether a part is another object or was changed; `before` keeps its
    objects alive, so that no new one has the id of an old one.
    """
    if len(before) != len(after):
        return True
    pairs = zip(before, after, strict=True)
    return any(old is not new or was != now for (old, was), (new, now) in pairs)
