"""See that stage 1 has nothing to do, by the columns of the plan that it wrote before: no
row is read, and no plan is written.

Whatever might differ ends it, and stage 1 goes its ordinary way.
"""

import json
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dstrain.cache import (
    DIGESTS,
    MARKER,
    FeatureCache,
    SourceFiles,
    open_samples,
    stored_plans,
)
from dstrain.config import as_flags
from dstrain.config.options import options_affecting
from dstrain.console import get_logger, redacted, secrets
from dstrain.data.forms import Source, texts_of
from dstrain.errors import DstrainError
from dstrain.graph import Column
from dstrain.runs.checks.rows import lines_of_datasets, log_left_out, warnings_of_rows
from dstrain.runs.datasets.largest import largest_sample
from dstrain.runs.datasets.sources import dataset_folders, dataset_source
from dstrain.runs.feature_plan import (
    CacheInfo,
    changed_folder,
    identity_of,
    planned_parts,
)
from dstrain.runs.long_prompts import LongPromptLog, note_recorded, recorded
from dstrain.runs.prompt_rows import recorded_plan
from dstrain.runs.setup import Setup
from dstrain.runs.stage_1.component_keys import code_of_rows, component_keys
from dstrain.storage import Digests, hash_json
from dstrain.storage.hashing import files_in
from dstrain.training import CachedSamples

logger = get_logger(__name__)


@dataclass(frozen=True)
class Unchanged:
    """A dataset whose values and plan are in the cache."""

    setup: Setup
    source: Source
    info: CacheInfo
    samples: CachedSamples

    def log(self) -> None:
        """Say what stage 1 says where it computes nothing; raises UsageError for a long
        prompt, if these are refused.
        """
        setup, info = self.setup, self.info
        log = LongPromptLog(setup.config.on_long_prompt, self._name_row)
        known = recorded(setup.cache_path)
        if log.mode == "error":
            note_recorded(log, setup.cache_path, self._using(known))
        log_count(setup, 0, len(self.samples.rows) + len(info.previews), info.previews)
        note_recorded(log, setup.cache_path, self._using(known))
        log.conclude()

    def _name_row(self, row: int) -> str:
        count = int(self.info.dataset["rows"])
        if row >= count:
            return self.setup.prompt_rows[row - count].option
        rows = self.samples.rows
        return self.setup.in_words(self.info.name_row(rows[rows.index(row)]))

    def _using(self, known: Any) -> Iterator[tuple[int, list[str]]]:
        for row, address in self.samples.rows.using(known):
            yield row, [address]
        first = self.info.dataset["rows"]
        for row, preview in enumerate(self.info.previews, first):
            yield row, list(_addresses(preview))


def log_count(setup: Setup, missing: int, count: int, previews: Any) -> None:
    """Say how many samples are computed."""
    more = ", previews included," if previews else ""
    samples = setup.in_words("samples")
    logger.info(
        f"precomputing {missing} of {count} {samples}{more} into {setup.cache_path}"
    )


def as_repeatable(
    setup: Setup, source: Source | None, *digests: Digests
) -> dict[str, Any]:
    """Return what a plan records so that it is seen that there is nothing to do."""
    largest = largest_sample(setup.dataset, setup.name_row)
    return {
        "config": _config_digest(setup),
        "code": code_of_rows(setup, source),
        # A file that changes again at once may keep its times.
        "settled": not any(one.unsettled for one in digests),
        "dataset": redacted("\n".join(lines_of_datasets(setup))),
        "warnings": [redacted(line) for line in warnings_of_rows(setup)],
        # For a dry run, which says what memory it needs.
        "largest": None if largest is None else asdict(largest),
    }


def may_be_unchanged(setup: Setup) -> bool:
    """Return whether the flags let rows be taken as they were: files are neither decoded
    nor fetched for it.
    """
    if setup.config.on_bad_sample != "error" or dataset_source(setup.config) is None:
        return False
    return not any(part.setup.data_config.fetches for part in setup.parts)


def find_unchanged(setup: Setup, may_fetch: bool = True) -> list[Unchanged]:
    """Return the datasets of the run, if for none of them there is anything to do; else
    nothing. A caller that relies on it holds the lock of the cache.

    Args:
        setup: The run.
        may_fetch: Whether model files that are not here are downloaded.
    """
    if not (setup.cache_path / MARKER).exists():
        return []
    # Whatever is wrong is said on the ordinary way, which comes then.
    with suppress(DstrainError, OSError):
        cache = FeatureCache.open(setup.cache_path)
        found = [_find(one, cache, may_fetch) for one in setup.datasets]
        return [one for one in found if one is not None] if all(found) else []
    return []


def log_unchanged(found: list[Unchanged]) -> None:
    """Say what stage 1 says of these datasets."""
    setup = found[0].setup
    for reason in setup.extensions.broken:
        logger.warning(reason)
    for one in found:
        line = one.info.repeatable.get("dataset")
        if line:  # a plan of an earlier version has none
            logger.info(line)
        # Not as recorded: files that are not read change nothing of the plan.
        log_left_out(one.setup)
    for line in found[0].info.repeatable["warnings"]:
        logger.warning(line)
    for one in found:
        one.log()


def _find(setup: Setup, cache: FeatureCache, may_fetch: bool) -> Unchanged | None:
    plans = cache.folder / "plans"
    source = dataset_source(setup.config)
    record = None if source is None else _newest(setup, plans, source)
    if record is None or source is None:
        return None
    info = CacheInfo(**record["about"])
    if not (
        _has_equal_facts(setup, source, info)
        and not _has_secrets(source)
        and _has_equal_components(setup, info, may_fetch)
        and _has_equal_files(setup, plans, record)
    ):
        return None
    input_sets = [frozenset(names) for names in info.inputs]
    samples = CachedSamples.of(cache, open_samples(plans, record), input_sets)
    previews = [one for line in info.previews for one in _addresses(line)]
    if len(samples.lacking()) or not all(one in cache for one in previews):
        return None
    return Unchanged(setup, source, info, samples)


def _has_equal_files(setup: Setup, plans: Path, record: dict[str, Any]) -> bool:
    """Return whether no file of a dataset was touched since the plan was written."""
    files = SourceFiles.open(plans, record)
    for part in planned_parts(setup, plans, record):
        folders, samples = part.folders, part.samples
        if not files.of_samples(samples).are_as_recorded(folders):
            return False
        if changed_folder(plans, record, folders, samples) is not None:
            return False
    return True


def _newest(setup: Setup, plans: Path, source: Source) -> dict[str, Any] | None:
    """Return the newest plan of this identity, if it is of this dataset."""
    newest: dict[str, Any] | None = None
    for _, record in stored_plans(plans):
        if newest is not None and record["sequence"] < newest["sequence"]:
            continue
        if record["identity"] == identity_of(setup, record):
            newest = record
    if newest is None:
        return None
    dataset = newest["about"]["dataset"]
    here = {
        "path": redacted(str(source.path.resolve())),
        "sha256": source.digest(),
        "folders": [redacted(folder) for folder in dataset_folders(setup.config)],
    }
    return newest if here == {name: dataset[name] for name in here} else None


def _has_equal_facts(setup: Setup, source: Source, info: CacheInfo) -> bool:
    repeatable = info.repeatable
    if not repeatable.get("settled") or info.versions != setup.versions:
        return False
    for names in info.inputs:
        for name in set(names) - setup.plan(frozenset(names)).used_inputs:
            column = setup.spec.inputs[name]
            # The plan does not record files that are checked and not used.
            if isinstance(column, Column) and column.is_file:
                return False
    return bool(
        repeatable["config"] == _config_digest(setup)
        and repeatable["code"] == code_of_rows(setup, source)
    )


def _has_secrets(source: Source) -> bool:
    """Return whether a secret may stand in the dataset: its rows are refused then."""
    values = secrets()
    if not values:
        return False
    if source.parts:
        return any(map(_has_secrets, source.parts))
    if source.form != "table":
        return any(any(one in text for one in values) for text in texts_of(source))
    with (
        source.path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
        if text.find(b"\\u") >= 0:
            return True
        forms = {form for one in values for form in (one, json.dumps(one)[1:-1])}
        forms |= {one.replace('"', '""') for one in values}
        forms |= {one.replace("/", "\\/") for one in values}
        return any(text.find(form.encode()) >= 0 for form in forms)


def _has_equal_components(setup: Setup, info: CacheInfo, may_fetch: bool) -> bool:
    plans = [setup.plan(frozenset(names)) for names in info.inputs]
    plans += [recorded_plan(setup, line) for line in info.previews]
    found = setup.find(plans) if may_fetch else setup.find(plans, [])
    # Not the digests of the cache: those of a million images are as many entries.
    digests = Digests(setup.cache_path / f"{DIGESTS}.none")
    known = {path: entry for one in info.files.values() for path, _, entry in one}
    if found.files.keys() != info.files.keys():
        return False
    for component in found.files.values():
        for _, file in files_in(component.paths):
            # As it was recorded: without `..`, as `Path.absolute` leaves it.
            path = redacted(os.path.abspath(file))
            if path not in known:
                return False
            *mark, digest = known[path]
            try:
                digests.remember(str(file), mark, bytes.fromhex(digest))
            except (ValueError, struct.error):  # a stranger's numbers
                return False
    return bool(
        component_keys(setup, found, digests) == info.components
        and json.loads(json.dumps(found.configs)) == info.configs
    )


def _config_digest(setup: Setup) -> str:
    values = as_flags(setup.config)
    for name in options_affecting("start"):
        values.pop(name, None)
    return hash_json("config", values)


def _addresses(preview: Any) -> Iterator[str]:
    for form in preview["values"].values():
        if "at" in form:
            yield form["at"]
