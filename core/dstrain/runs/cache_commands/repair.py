"""`dstrain cache verify --repair`: remove what is damaged, and compute it again."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from dstrain.config import command_line, validate
from dstrain.config.options import TrainConfig
from dstrain.console import get_logger, shell_command
from dstrain.data.forms import Source
from dstrain.errors import (
    CacheError,
    DstrainError,
    Interrupted,
    OutOfMemory,
    StateError,
    UsageError,
)
from dstrain.runs.cache_commands.shards import rewrite_shard
from dstrain.runs.cache_commands.verify import (
    Problem,
    derived_problems,
    plan_problems,
    readable_record,
    whole_values,
)
from dstrain.runs.datasets.sources import dataset_source
from dstrain.runs.plan_identity import USE, VALIDATION
from dstrain.runs.runner import start
from dstrain.runs.stage_1.recorded_config import config_of
from dstrain.storage.file_memory import is_own

logger = get_logger(__name__)


@dataclass(frozen=True)
class Incomplete:
    """A plan, and how stage 1 makes it again."""

    path: Path
    sha256: str
    """Of its dataset, as it was."""
    config: TrainConfig
    """The run of stage 1 that made it."""
    source: Source | None
    """Its dataset as it is now; None if it is not here."""

    @property
    def is_outdated(self) -> bool:
        """Return whether stage 1 would make another plan, of other rows."""
        return self.source is not None and self.source.digest() != self.sha256


def repair(
    folder: Path, problems: Sequence[Problem], places: Mapping[str, Any]
) -> None:
    """Remove what is damaged, and run stage 1 for each plan that then lacks values.

    Of a damaged shard the values that are whole stay. Plans that cannot be read at all
    are removed. What was removed or repaired since the problems were found is left as it
    is.

    Args:
        folder: The cache.
        problems: What is wrong with it.
        places: Options in place of recorded ones: where models and data are here.

    Raises StateError for a cache that is in use, for a file that stage 1 did not write,
    and with the command to run where values cannot be computed here; SystemFault for a
    file that cannot be read, which is not removed.
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
        incomplete = list(_incomplete(cache, places))
    outdated = [plan for plan in incomplete if plan.is_outdated]
    configs: list[TrainConfig] = []
    for plan in incomplete:
        if plan not in outdated and plan.config not in configs:
            configs.append(plan.config)
    for config in configs:
        _compute(folder, config)
    if outdated or lost:
        raise _unrepaired(folder, outdated, lost)


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


def _incomplete(cache: FeatureCache, places: Mapping[str, Any]) -> Iterator[Incomplete]:
    """Yield the plans whose values are not all there, or whose columns are damaged."""
    known = cache.addresses[in_order(cache.addresses)]
    records = dict(stored_plans(cache.folder / "plans"))
    for path, record in records.items():
        if not any(plan_problems(path, known)):
            continue
        plan = _plan(cache.folder, path, record, places)
        if _is_validation(record):
            runs = (
                _plan(cache.folder, other, one, places)
                for other, one in records.items()
                if not _is_validation(one) and one["about"].get("config")
            )
            plan = replace(plan, config=_with_second_dataset(plan.config, runs))
        yield plan


def _is_validation(record: Mapping[str, Any]) -> bool:
    return bool(record["identity"].get(USE) == VALIDATION)


def _plan(
    folder: Path, path: Path, record: Mapping[str, Any], places: Mapping[str, Any]
) -> Incomplete:
    """Return what is known of a plan; raises CacheError for one without its flags."""
    if _is_validation(record):
        # These are of the dataset that is trained on.
        places = {
            name: value
            for name, value in places.items()
            if not name.startswith("dataset_")
        }
    config = config_of(record, path, folder, **places)
    source = None
    with suppress(UsageError):
        source = dataset_source(config)
    if source is not None and not source.path.exists():
        source = None
    return Incomplete(path, record["about"]["dataset"]["sha256"], config, source)


def _with_second_dataset(own: TrainConfig, runs: Iterable[Incomplete]) -> TrainConfig:
    """Return the run that makes the plan of a second dataset, whose own flags name it as
    the first: that of another plan, or else one in which it is both.
    """
    base, metadata = own.dataset_base_path, own.dataset_metadata_path
    for run in runs:
        has_base = run.config.validation_dataset_base_path == base
        has_metadata = run.config.validation_dataset_metadata_path == metadata
        is_here = run.source is not None and not run.is_outdated
        if has_base and has_metadata and is_here:
            return run.config
    return replace(
        own,
        validation_dataset_base_path=base,
        validation_dataset_metadata_path=metadata,
    )


def _unrepaired(
    folder: Path, outdated: Sequence[Incomplete], lost: Sequence[str]
) -> StateError:
    """Return the error that names plans which cannot be made again, and what to do."""
    reasons = []
    advice = []
    if outdated:
        names = ", ".join(plan.path.stem for plan in outdated)
        reasons.append(
            f"plans need values again, and their metadata has changed since: {names}"
        )
        advice.append("put the metadata back, and run the same command again, or")
    for plan in outdated:
        advice.append(_removal(folder, plan.path))
    if lost:
        reasons.append(
            f"plans were damaged, with the flags that they were made with: {', '.join(lost)}"
        )
        advice.append("to make them again, run the commands of stage 1 that filled it")
    return StateError(folder, "; ".join(reasons), *advice)


def _removal(folder: Path, plan: Path) -> str:
    """Return how to remove a plan that is of no use any more."""
    try:
        open_samples(plan.parent, read_record(plan))
    except CacheError:
        # `prune` opens the plans, to see what they use.
        return f"to remove it, delete {plan}"
    words = ["dstrain", "cache", "prune", str(folder), "--plan", plan.stem]
    return f"to remove it, run: {shell_command(words)}"


def _compute(folder: Path, config: TrainConfig) -> None:
    """Run stage 1."""
    try:
        validate(config)
        start(config)
    except (Interrupted, OutOfMemory):
        raise
    except DstrainError as error:
        what = f"values cannot be computed here: {error.where}: {error.what}"
        raise StateError(
            folder,
            what,
            "what was damaged is removed; where models and data are, run: "
            + command_line(config),
        ) from error
