"""Errors that a user can act on, each kind with an exit code of its own."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

POINTER = b"version https://git-lfs.github.com/spec/"
"""What a file of a repository begins with that was cloned without Git LFS."""


def _is_pointer(path: str | Path) -> bool:
    """Return whether a file is a pointer of Git LFS."""
    try:
        if not Path(path).is_file():
            return False  # opening a pipe would wait for what writes to it
        with Path(path).open("rb") as file:
            return file.read(len(POINTER)) == POINTER
    except (OSError, ValueError):
        return False


class DstrainError(Exception):
    """An error a user can act on: where it is, what is wrong, and a few lines of what to
    do next.
    """

    exit_code = 1

    def __init__(self, where: str | Path, what: str, *help_lines: str) -> None:
        # A path is that of a file which was read; a text may be a name that a stranger wrote.
        if isinstance(where, Path) and _is_pointer(where):
            # Whatever is wrong with it is due to that.
            what = "is a pointer of Git LFS in the place of the file"
            help_lines = ("`git lfs pull` fetches the file; or download it again",)
        super().__init__(str(where), what, *help_lines)
        self.where: str = str(where)
        self.what = what
        self.help_lines = help_lines
        self.rows: tuple[int, ...] = ()
        """Rows of the dataset that it is about, from 0."""
        self.faults: tuple[tuple[str, str], ...] = ()
        """Each place that it is about, with what is wrong there."""

    def __str__(self) -> str:
        return "\n".join(
            [
                f"dstrain: error: {self.where}: {self.what}",
                *(f"  {line}" for line in self.help_lines),
            ]
        )


class UsageError(DstrainError):
    """The command line, configuration, dataset or a plugin is invalid."""

    exit_code = 2

    def at(self, places: Iterable[str]) -> "UsageError":
        """Return the error with the places of its rows before its own."""
        what = f"{self.where}: {self.what}"
        return UsageError(", ".join(places), what, *self.help_lines)


def secret_error(where: str, variable: str) -> UsageError:
    """Return the error of a text that would be written with the value of a variable,
    a secret.
    """
    what = f"contains the value of the environment variable {variable}"
    return UsageError(where, what, f"take it out, or unset {variable}")


class InputError(UsageError):
    """A value that a unit or another function of a family cannot use."""


@contextmanager
def about_rows(rows: Iterable[int]) -> Iterator[None]:
    """Note in a UsageError of the block which rows it is about."""
    try:
        yield
    except UsageError as error:
        error.rows = error.rows or tuple(rows)
        raise


@contextmanager
def about_dataset(name: str) -> Iterator[None]:
    """Name one of several datasets in a UsageError of the block that is about an option;
    others name a file already. '' is the dataset of the run's own options.
    """
    try:
        yield
    except UsageError as error:
        if not name or not error.where.startswith("--"):
            raise
        where = f"{name}: {error.where}"
        raise UsageError(where, error.what, *error.help_lines) from error


class StateError(DstrainError):
    """A checkpoint, feature cache or LoRA file does not fit, is damaged or in use."""

    exit_code = 3


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Take what a library raises while it reads a file for a fault of the file, and name
    that: raises StateError. Errors of dstrain and of the machine stay as they are.
    """
    try:
        yield
    except (DstrainError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        what = f"cannot be read: {lines[0]}"
        if isinstance(error, KeyError):
            what = f"has no {error}"
        raise StateError(path, what, "if it is damaged, download it again") from error


class MissingFiles(StateError):
    """Files that are not on this machine."""


class CacheError(StateError):
    """A feature cache is absent, damaged or incomplete: stage 1 has to fill it again."""


class SystemFault(DstrainError):
    """The system failed: disk full, read-only, download failed."""

    exit_code = 4


class Diverged(DstrainError):
    """A number became NaN or infinite: the weights are unchanged, and no image is written."""

    exit_code = 5


class OutOfMemory(DstrainError):
    """The device or the machine ran out of memory."""

    exit_code = 6


class Interrupted(DstrainError):
    """A signal interrupted the run; training is saved after the current step."""

    exit_code = 75


def first_few(names: Iterable[str]) -> str:
    """Join the first three names for a message."""
    names = list(names)
    if len(names) > 3:
        names[3:] = ["..."]
    return ", ".join(names)


SIMILAR = 0.75
"""Least similarity of an option, or of a word of the command line, to what is offered in its
place: names share words, so many that mean something else are half alike.
"""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "; did you mean 'x'?" for the known name that is most similar, or the only
    one that starts with the typed one; else ''.

    Neither case nor '-' for '_' counts. A name less similar than the cutoff, from 0 to 1,
    is none.
    """
    names = {one.lower().replace("-", "_"): one for one in known}
    typed = name.lower().replace("-", "_")
    found = get_close_matches(typed, names, n=1, cutoff=cutoff)
    if not found and typed:
        found = [one for one in names if one.startswith(typed)]
    return f"; did you mean {names[found[0]]!r}?" if len(found) == 1 else ""
