"""`dstrain cache verify --repair`: remove what is damaged, and compute it again."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain.cache.in_use import exclusive
from dstrain.cache.shards import HASH
from dstrain.config.options.train import TrainConfig
from dstrain.config.serialize import command_line
from dstrain.config.validation import validate
from dstrain.console import get_logger
from dstrain.errors import DstrainError, Interrupted, OutOfMemory, StateError
from dstrain.runs.cache_commands.contents import Contents
from dstrain.runs.cache_commands.shards import rewrite_shard
from dstrain.runs.cache_commands.verify import (
    Problem,
    check_is_cache,
    readable_record,
    whole_values,
)
from dstrain.runs.runner import start
from dstrain.runs.stage_1.recorded_config import config_of

logger = get_logger(__name__)


def repair(
    folder: Path, problems: Sequence[Problem], places: Mapping[str, Any]
) -> None:
    """Remove what is damaged, and run stage 1 for each plan that then lacks values.

    Of a damaged shard the values that are whole stay. Plans that cannot be read at all
    are removed.

    Args:
        folder: The cache.
        problems: What is wrong with it.
        places: Options in place of recorded ones: where models and data are here.

    Raises StateError for a cache that is in use, for a file that stage 1 did not write,
    and with the command to run where values cannot be computed here.
    """
    check_is_cache(folder)
    damaged = list(dict.fromkeys(problem.path for problem in problems))
    with exclusive(folder):
        foreign = [path for path in damaged if not HASH.fullmatch(path.stem)]
        if foreign:
            what = "stage 1 makes no file of this name"
            raise StateError(foreign[0], what, "move it away")
        configs: list[TrainConfig] = []
        lost = []
        for path in damaged:
            if path.parent.name == "shards":
                _remove_damaged(folder, path)
                continue
            record = readable_record(path)
            if record is None:
                path.unlink()
                lost.append(path.stem)
            else:
                configs.append(config_of(record, path, folder, **places))
        contents = Contents.of(folder, skip_damaged=True)
    for plan in contents.plans:
        if plan.lacks_values and plan.path not in damaged:
            configs.append(config_of(plan.record, plan.path, folder, **places))
    for number, config in enumerate(configs):
        if config not in configs[:number]:
            _compute(folder, config)
    if lost:
        what = f"plans were damaged, with the flags that they were made with: {', '.join(lost)}"
        advice = "to make them again, run the commands of stage 1 that filled it"
        raise StateError(folder, what, advice)


def _remove_damaged(folder: Path, path: Path) -> None:
    """Remove a shard but for the values that are whole."""
    whole = whole_values(folder, path)
    rewrite_shard(folder, path, whole)
    logger.info(f"removed {path}; {len(whole)} of its values stay")


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
