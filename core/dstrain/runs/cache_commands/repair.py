"""`dstrain cache verify --repair`: remove what is damaged, and say how to fill it again."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain.cache import (
    DIGESTS,
    FeatureCache,
    check_is_cache,
    exclusive,
    open_samples,
    read_record,
    stored_plans,
)
from dstrain.cache.addresses import in_order
from dstrain.cache.shards import HASH
from dstrain.console import get_logger, shell_command
from dstrain.errors import CacheError, StateError
from dstrain.runs.cache_commands.shards import rewrite_shard
from dstrain.runs.cache_commands.verify import (
    Problem,
    derived_problems,
    plan_problems,
    readable_record,
    whole_values,
)
from dstrain.runs.plan_identity import USE, VALIDATION
from dstrain.runs.stage_1.recorded_config import refill_command
from dstrain.storage.file_memory import is_own

logger = get_logger(__name__)
AGAIN = "to fill it again, run the commands of stage 1 that filled it"


def repair(folder: Path, problems: Sequence[Problem]) -> None:
    """Remove what is damaged.

    Of a damaged shard the values that are whole stay. Plans that cannot be read at all
    are removed. What was removed or repaired since the problems were found is left as it
    is.

    Raises StateError for a cache that is in use, for a file that stage 1 did not write,
    and with the commands to run where plans then lack values; SystemFault for a file that
    cannot be read, which is not removed.
    """
    check_is_cache(folder)
    damaged = list(dict.fromkeys(problem.path for problem in problems))
    with exclusive(folder):
        for path in damaged:
            if path.exists() and not _is_own(path):
                what = "stage 1 makes no file of this name"
                if path.name == DIGESTS:
                    what = "is nothing that stage 1 writes"
                raise StateError(path, what, "move it away")
        lost = _remove(folder, damaged)
        cache = FeatureCache.open(folder)
        cache.write_index()
        plans = dict(stored_plans(folder / "plans"))
        known = cache.addresses[in_order(cache.addresses)]
        incomplete = [path for path in plans if any(plan_problems(path, known))]
    if incomplete or lost:
        raise _incomplete(folder, plans, incomplete, lost)


def _is_own(path: Path) -> bool:
    """Return whether stage 1 may have written a file that is damaged now."""
    if path.name == DIGESTS:
        return is_own(path)
    # Only those of an index that have the names of one are looked at.
    return path.parent.name == "index" or HASH.fullmatch(path.stem) is not None


def _remove(folder: Path, damaged: Iterable[Path]) -> list[str]:
    """Remove those of the files that are damaged now; return the names of plans whose
    records are among them.
    """
    lost = []
    derived = {problem.path for problem in derived_problems(folder)}
    for path in damaged:
        if not path.exists() or (path.parent.name == "plans" and readable_record(path)):
            continue
        if path.parent.name == "shards":
            _remove_damaged(folder, path)
        elif path.parent.name == "plans":
            path.unlink()
            lost.append(path.stem)
        elif path in derived:
            path.unlink()
    return lost


def _remove_damaged(folder: Path, path: Path) -> None:
    """Remove a damaged shard but for the values that are whole."""
    whole = whole_values(folder, path)
    if whole is not None:
        rewrite_shard(folder, path, whole)
        logger.info(f"removed {path}; {len(whole)} of its values stay")


def _incomplete(
    folder: Path,
    plans: Mapping[Path, Mapping[str, Any]],
    incomplete: Sequence[Path],
    lost: Sequence[str],
) -> StateError:
    """Return the error that names what is removed, or not there, and how to fill it again."""
    reasons = []
    advice = []
    if incomplete:
        names = ", ".join(path.stem for path in incomplete)
        reasons.append(f"what was damaged is removed; plans need values again: {names}")
    for path in incomplete:
        command = refill_command(_flags(plans, path), folder)
        advice.append(f"to fill it again, run: {command}" if command else AGAIN)
    if lost:
        reasons.append(
            f"plans were damaged, with the flags that they were made with: {', '.join(lost)}"
        )
        advice.append(AGAIN)
    advice += [_removal(folder, path) for path in incomplete]
    return StateError(folder, "; ".join(reasons), *dict.fromkeys(advice))


def _flags(plans: Mapping[Path, Mapping[str, Any]], path: Path) -> Mapping[str, Any]:
    """Return the recorded flags of the run that makes a plan: for that of a second
    dataset, whose own flags name it as the first, those of another plan, or else of a run
    in which it is both.
    """
    flags = {one: record["about"].get("config", {}) for one, record in plans.items()}
    own: Mapping[str, Any] = flags.pop(path)
    if plans[path]["identity"].get(USE) != VALIDATION:
        return own
    dataset = own.keys() & {"dataset_base_path", "dataset_metadata_path"}
    second = {f"validation_{name}": own[name] for name in sorted(dataset)}
    runs = (one for one in flags.values() if second.items() <= one.items())
    return next(runs, {**own, **second})


def _removal(folder: Path, plan: Path) -> str:
    """Return how to remove a plan that is of no use any more."""
    try:
        open_samples(plan.parent, read_record(plan))
    except CacheError:
        # `prune` opens the plans, to see what they use.
        return f"to remove the plan, delete {plan}"
    words = ["dstrain", "cache", "prune", str(folder), "--plan", plan.stem]
    return f"to remove the plan, run: {shell_command(words)}"
