"""Name the rows whose prompts are longer than the model takes: --on_long_prompt."""

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from dstrain.cache.backend.index import note_value, noted_values
from dstrain.config.options import OnLongPrompt
from dstrain.console import FILE_ONLY, get_logger, number_of, redacted
from dstrain.errors import UsageError
from dstrain.graph import LongPrompt

logger = get_logger(__name__)

SHOWN = 60
"""Characters of what is cut that a message shows; the log has all."""


@dataclass
class LongPromptLog:
    """The long prompts of a run: refused, or a warning and a line of the log for each."""

    mode: OnLongPrompt
    place_of: Callable[[int], str]
    """Row -> its name in messages."""
    warns_at_once: bool = False
    """Whether the first one is named when it is met, since the run is long."""
    rows: dict[tuple[bool, int, str], str] = field(default_factory=dict)
    """What was said of a row and a model, usual cuts last."""

    @property
    def _worst(self) -> tuple[list[tuple[bool, int, str]], ...]:
        """Return what was said, in order: of unusual cuts, and of usual ones."""
        return tuple(
            [key for key in sorted(self.rows) if key[0] == one] for one in (False, True)
        )

    def note(self, row: int, found: LongPrompt) -> None:
        """Log a long prompt once; raises UsageError, without the row, if it is an error."""
        place = self.place_of(row)
        short = f"{place}: {shown_short(found)}"
        if self.mode == "error" and not found.usual:
            raise UsageError(
                "prompt",
                shown_short(found).removeprefix("prompt "),
                "shorten it, or give --on_long_prompt truncate to cut such prompts",
            )
        key = (found.usual, row, found.model)
        if key in self.rows:
            return
        logger.info(f"{place}: {found}", extra=FILE_ONLY)
        if self.warns_at_once and not found.usual and not self._worst[0]:
            logger.warning(f"{short}; rows like it are listed in dstrain.log")
        self.rows[key] = short

    def conclude(self) -> None:
        """Say how many rows there were, with the first; usual cuts only where there are no
        others.
        """
        worst, usual = self._worst
        keys = worst or usual
        rows = {row for _, row, _ in keys}
        if len(rows) > (self.warns_at_once and bool(worst)):
            first = "; ".join(self.rows[key] for key in keys[:3])
            more = ", which are listed in dstrain.log" if len(keys) > 3 else ""
            logger.warning(
                f"prompts of {number_of(len(rows), 'row')} are cut{more}: {first}"
            )


def shown_short(found: LongPrompt) -> str:
    """Return what is wrong with a prompt, with the beginning of what is cut."""
    short = found.cut if len(found.cut) <= SHOWN else found.cut[:SHOWN] + "..."
    return str(replace(found, cut=short))


def record(folder: Path, rank: int, address: str, found: LongPrompt) -> None:
    """Record in a cache that a value about to be stored is of a long prompt, so that this is
    known without computing it again.
    """
    line = json.dumps({"at": address, **asdict(found)}, ensure_ascii=False)
    note_value(folder, rank, redacted(line))


def recorded(folder: Path) -> dict[str, list[LongPrompt]]:
    """Return the long prompts by the addresses of their values."""
    found: dict[str, list[LongPrompt]] = {}
    for line in noted_values(folder):
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # written when the process was killed: its value is not stored
        address = entry.pop("at")
        long = LongPrompt(**entry)
        if long not in found.setdefault(address, []):
            found[address].append(long)
    return found


def note_recorded(
    log: LongPromptLog, folder: Path, rows: Iterator[tuple[int, Collection[str]]]
) -> None:
    """Note the rows, each with the addresses of its values, whose values are recorded."""
    known = recorded(folder)
    if not known:
        return
    for row, addresses in rows:
        for address in addresses:
            for found in known.get(address, ()):
                try:
                    log.note(row, found)
                except UsageError as error:
                    raise error.at([log.place_of(row)]) from error
