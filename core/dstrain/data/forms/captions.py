"""Captions in files of their own beside images and videos."""

import json
from pathlib import Path

from dstrain.data.forms.metadata import BOM
from dstrain.data.table import MAX_CELL_LENGTH, text_fault
from dstrain.errors import POINTER, UsageError
from dstrain.storage import read_limited

SUFFIXES = (".txt", ".caption", ".json")
"""Endings of files with captions."""
KEYS = ("caption", "prompt", "text")
"""Where an object of json has the caption; of several, the texts must be equal."""
MAX_BYTES = 4 * MAX_CELL_LENGTH


def read_caption(path: Path) -> str:
    """Return the caption in a file; '' if it has none.

    Of a .json file that is no object with a caption nothing is wrong: other programs write
    what they know of an image under its name. Raises ValueError that says what is wrong,
    UsageError for what is no file of this size, and OSError.
    """
    data = read_limited(path, MAX_BYTES)
    if data.startswith(POINTER):
        raise UsageError(path, "is no caption")
    text = data.removeprefix(BOM).decode(errors="surrogateescape")
    if path.suffix.lower() == ".json":
        text = _in_json(text)
    if fault := text_fault(text):
        raise ValueError(fault)
    return as_caption(text)


def as_caption(text: str) -> str:
    """Return the caption that a text is: all of its lines, without blanks at its ends."""
    # As an editor shows it: a file from Windows is the caption of one from elsewhere.
    return text.replace("\r\n", "\n").strip()


def _in_json(text: str) -> str:
    """Return the caption in a text of json, '' if it has none; raise ValueError."""
    if not text.strip():
        return ""
    try:
        # Pairs, since a dict would hide a name that is written twice.
        pairs = json.loads(text, object_pairs_hook=tuple)
    except RecursionError as error:
        raise ValueError("is not valid JSON: is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from error
    if not isinstance(pairs, tuple):
        return ""
    names = [name for name, _ in pairs]
    content = {name: value for name, value in pairs if value is not None}
    for key in KEYS:
        if names.count(key) > 1:
            raise ValueError(f"has {key} twice")
        if not isinstance(content.get(key, ""), str):
            raise ValueError(f"has a {key} that is not text")
    found = [key for key in KEYS if key in content]
    if len({as_caption(content[key]) for key in found}) > 1:
        raise ValueError(f"has different texts in {' and '.join(found)}: leave one")
    return str(content[found[0]]) if found else ""
