"""Find what is to be captioned in a folder, as datasets find its images and captions."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from dstrain import UsageError
from dstrain.data import VIDEOS, Medium, left_out, list_media, printable, read_caption

SUFFIX = ".txt"
REWRITTEN = (SUFFIX, ".caption")
"""Endings of files that hold nothing but a caption."""


@dataclass(frozen=True)
class Task:
    """An image or a video to caption."""

    name: str
    """Relative to the folder."""
    path: Path
    output: Path
    """The file of its caption."""
    is_video: bool

    @property
    def has_caption(self) -> bool:
        """Return whether there is a caption in its file now."""
        place = self.output
        return place.is_file() and _has_text(place.parent, place.name, overwrite=True)


@dataclass
class Tasks:
    """What a folder has to be captioned."""

    tasks: list[Task] = field(default_factory=list)
    captioned: int = 0
    """Images and videos that have a caption, which is kept."""
    faults: dict[str, str] = field(default_factory=dict)
    """Name of an image or a video -> why no caption of it can be written."""


def find_tasks(folder: Path, overwrite: bool) -> Tasks:
    """Find what is to be captioned in a folder and below it.

    Raises UsageError for what is no folder, or has no image and no video, and what
    `list_media` raises.

    overwrite: Whether captions that exist are replaced.
    """
    if not folder.is_dir():
        raise UsageError(folder, "is not a folder")
    found = Tasks()
    for medium in list_media(folder):
        try:
            output = _output(folder, medium, overwrite)
        except ValueError as error:
            found.faults[medium.name] = str(error)
            continue
        if output is None:
            found.captioned += 1
            continue
        is_video = os.path.splitext(medium.name)[1].lower() in VIDEOS
        path = folder / medium.name
        found.tasks.append(Task(medium.name, path, output, is_video))
    if not (found.tasks or found.captioned or found.faults):
        raise UsageError(folder, f"has no image or video; {left_out(folder, {})}")
    return found


def _output(folder: Path, medium: Medium, overwrite: bool) -> Path | None:
    """Return the file for the caption of an image or a video; None if it has one, which
    is kept. Raises ValueError that says why none can be written.
    """
    written = [name for name in medium.captions if _has_text(folder, name, overwrite)]
    if written and not overwrite:
        return None
    if medium.twins:
        names = " and ".join(map(printable, medium.twins))
        raise ValueError(f"has the same name as {names}: give each a name of its own")
    if len(written) > 1:
        names = " and ".join(map(printable, written))
        raise ValueError(f"has two captions, in {names}: remove one of them")
    path = (folder / medium.name).with_suffix(SUFFIX)
    if written:
        path = folder / written[0]
    if path.suffix.lower() not in REWRITTEN:
        # It may hold more than the caption; a second caption would be refused.
        raise ValueError(f"has its caption in {printable(written[0])}: move it away")
    _check_place(path)
    return path


def _check_place(path: Path) -> None:
    """Raise ValueError that says why a file cannot be written, before a model is loaded."""
    if path.is_dir():
        what = f"its caption would be {printable(path.name)}, which is a folder"
        raise ValueError(f"{what}: move it away")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError("is in a folder that you may not write to")


def _has_text(folder: Path, name: str, overwrite: bool) -> bool:
    """Return whether a file has a caption; raises ValueError for one that cannot be read,
    unless it is to be replaced.
    """
    try:
        return bool(read_caption(folder / name))
    except (OSError, ValueError, UsageError) as error:
        if overwrite:
            return True
        reason = getattr(error, "what", None) or getattr(error, "strerror", None)
        what = f"has a caption file that cannot be used: {printable(name)}"
        raise ValueError(f"{what}: {reason or error}") from error
