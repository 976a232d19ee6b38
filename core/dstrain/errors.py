"""What a user is told when something is wrong, and the exit code that goes with it."""

import difflib
from collections.abc import Iterable


class DstrainError(Exception):
    """An error a user can act on: where it is, what is wrong, and up to three lines of what to do next."""

    exit_code = 1

    def __init__(self, where: str, what: str, *help_lines: str) -> None:
        super().__init__(where, what, *help_lines)
        self.where = where
        self.what = what
        self.help_lines = help_lines

    def __str__(self) -> str:
        return "\n".join([f"dstrain: error: {self.where}: {self.what}", *(f"  {line}" for line in self.help_lines)])


class UsageError(DstrainError):
    """Usage, configuration, data set or plugin is wrong."""

    exit_code = 2


class StateError(DstrainError):
    """A checkpoint, feature store or LoRA does not fit, is damaged or in use."""

    exit_code = 3


class SystemFault(DstrainError):
    """The system failed: disk full, read-only, download failed."""

    exit_code = 4


class Diverged(DstrainError):
    """The loss became NaN or infinite; the weights are untouched."""

    exit_code = 5


class OutOfMemory(DstrainError):
    """The device has too little memory for this step."""

    exit_code = 6


class Interrupted(DstrainError):
    """A signal asked the run to stop; it was saved at the last step boundary."""

    exit_code = 75


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the known name most like `name`, or '' when none is near."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""
