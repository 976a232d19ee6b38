"""What a user is told when something is wrong, and the exit code that goes with it."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path


class DstrainError(Exception):
    """An error a user can act on: where it is, what is wrong, and up to three lines of
    what to do next.
    """

    exit_code = 1

    def __init__(self, where: str | Path, what: str, *help_lines: str) -> None:
        super().__init__(str(where), what, *help_lines)
        self.where = str(where)
        self.what = what
        self.help_lines = help_lines

    def __str__(self) -> str:
        return "\n".join(
            [
                f"dstrain: error: {self.where}: {self.what}",
                *(f"  {line}" for line in self.help_lines),
            ]
        )


class UsageError(DstrainError):
    """Usage, configuration, data set or plugin is wrong."""

    exit_code = 2


class InputError(UsageError):
    """A value that a unit or another function of a family cannot use."""


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


GENERIC = frozenset(
    {
        "dir",
        "file",
        "folder",
        "max",
        "min",
        "model",
        "models",
        "name",
        "num",
        "path",
        "size",
        "use",
    }
)
"""Words that many names have, so that sharing one says little."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the known name that is meant, or '' when none
    is, or when several could be.

    Neither case nor '-' matters. A name is meant by one that is mistyped a little, that
    begins it and no other, or that shares most of its words.
    """
    names = {_folded(one): one for one in known if one}
    wanted = _folded(name)
    if not wanted.strip("_"):
        return ""
    scores = sorted(
        ((_likeness(wanted, one), one) for one in names), key=lambda pair: -pair[0]
    )
    begun = [one for one in names if one.startswith(wanted)]
    if begun and scores[0][0] < 0.8:
        return f"; did you mean {names[begun[0]]!r}?" if len(begun) == 1 else ""
    if (
        not scores
        or scores[0][0] < 0.6
        or (len(scores) > 1 and scores[0][0] - scores[1][0] < 0.02)
    ):
        return ""
    return f"; did you mean {names[scores[0][1]]!r}?"


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")


def _likeness(name: str, known: str) -> float:
    """How likely `known` is what `name` means, 0 to 1: by slips of typing in it or its
    start, or by shared words.
    """
    a, b = name.replace("_", ""), known.replace("_", "")
    slips = _slips(a, b)
    typed = (
        1 - slips / (2 * max(len(a), len(b), 1))
        if slips <= max(1, min(len(a), len(b)) // 4)
        else 0.0
    )
    begun = 0.65 if len(a) > 4 and _slips(a, b[: len(a)]) <= len(a) // 4 else 0.0
    return max(
        typed,
        begun,
        _shared(re.findall("[a-z0-9]+", name), re.findall("[a-z0-9]+", known)),
    )


def _shared(words: Sequence[str], known: Sequence[str]) -> float:
    """The weight of the words that two names share, against all they have; a longer
    word tells more.
    """
    left, both, telling = list(known), 0.0, False
    for word in words:
        same = next((one for one in left if one == word), None) or next(
            (o for o in left if _is_word(word, o)), None
        )
        if same is not None:
            left.remove(same)
            both += _weight(word) + _weight(same)
            telling |= word not in GENERIC
    total = sum(map(_weight, (*words, *known)))
    return 0.95 * both / total if telling else 0.0


def _is_word(word: str, known: str) -> bool:
    """Whether a word is another, mistyped or cut short."""
    short, long = sorted((word, known), key=len)
    return (len(short) >= 4 and long.startswith(short)) or _slips(word, known) <= min(
        len(short), 8
    ) // 4


def _weight(word: str) -> float:
    return len(word) / 2 if word in GENERIC else float(len(word))


def _slips(a: str, b: str) -> int:
    """Letters left out, put in, changed, or swapped with the next, that lead from a to
    b (Damerau, 1964).
    """
    rows = [list(range(len(b) + 1))]
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            best = min(
                rows[-1][j] + 1, row[j - 1] + 1, rows[-1][j - 1] + (letter != other)
            )
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]
