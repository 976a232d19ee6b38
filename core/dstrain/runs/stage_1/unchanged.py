"""See that stage 1 has nothing to do, by what the newest plan records: no row is read, and
no plan is written. Whatever might differ ends it, and stage 1 goes its ordinary way.
"""

import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dstrain.cache import CacheInfo, FeatureCache, StoredPlan, is_cache, stored_plans
from dstrain.cache.backend.index import others_in
from dstrain.cache.source_files import are_as_recorded
from dstrain.config import as_flags
from dstrain.config.options import options_affecting
from dstrain.console import get_logger, redacted, secrets
from dstrain.data.tables import Source, texts_of
from dstrain.errors import DstrainError, UsageError, first_few
from dstrain.graph import Column
from dstrain.registry import warn_once
from dstrain.runs.checks.rows import log_left_out
from dstrain.runs.datasets.sizes import largest_sample
from dstrain.runs.datasets.sources import dataset_folders, dataset_source
from dstrain.runs.feature_plan import identity_of, planned_parts
from dstrain.runs.prompt_rows import recorded_plan
from dstrain.runs.setup import Setup
from dstrain.runs.stage_1.keyed_samples import component_keys
from dstrain.storage import Digests, hash_json
from dstrain.storage.file_digests import ModelDigests
from dstrain.storage.hashing import package_digest
from dstrain.training import CachedSamples

logger = get_logger(__name__)


@dataclass(frozen=True)
class Unchanged:
    """A dataset whose values and plan are in the cache."""

    setup: Setup
    source: Source
    info: CacheInfo
    samples: int


def refuse_folder(setup: Setup) -> None:
    """Refuse a folder that stage 1 would fill among the user's files.

    Raises UsageError for one that has anything in it and is no feature cache; StateError
    if stage 1 would write to a place outside of it.
    """
    folder = setup.cache_path
    if others := others_in(folder):
        flag = "--feature_cache" if setup.config.feature_cache else "--output_path"
        what = (
            f"{folder} is not empty and no feature cache: give an empty or new folder"
        )
        raise UsageError(flag, what, f"it contains {first_few(others)}")


def log_count(setup: Setup, missing: int, count: int) -> None:
    """Say how many samples are computed, rows of plugins among them."""
    more = ", rows of plugins included," if setup.prompt_rows else ""
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
        **_facts(setup, source),
        # A file that changes again at once may keep its times.
        "settled": not any(one.unsettled for one in digests),
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

    may_fetch: Whether model files that are not here are downloaded.
    """
    if not is_cache(setup.cache_path):
        return []
    # Whatever is wrong is said on the ordinary way, which comes then.
    with suppress(DstrainError, OSError):
        cache = FeatureCache.open(setup.cache_path)
        found = [_find(one, cache, may_fetch) for one in setup.datasets]
        return [one for one in found if one is not None] if all(found) else []
    return []


def log_unchanged(found: list[Unchanged]) -> None:
    """Say that there is nothing to compute, and what is not read."""
    warn_once(found[0].setup.extensions.broken)
    for one in found:
        log_left_out(one.setup)
        log_count(one.setup, 0, one.samples)


def _find(setup: Setup, cache: FeatureCache, may_fetch: bool) -> Unchanged | None:
    source = dataset_source(setup.config)
    plan = None if source is None else _newest(setup, cache.folder, source)
    if plan is None or source is None:
        return None
    info = plan.info
    facts = _facts(setup, source)
    if not (
        {**info.repeatable, **facts, "settled": True} == info.repeatable
        and info.versions == setup.versions
        and _records_all_files(setup, info)
        and not _has_secrets(source)
        and _has_equal_components(setup, info, may_fetch)
        and all(are_as_recorded(plan, *one) for one in planned_parts(setup, plan))
    ):
        return None
    input_sets = [frozenset(names) for names in info.inputs]
    samples = CachedSamples.of(cache, plan.samples(), input_sets)
    more = plan.prompt_addresses
    if len(samples.lacking()) or not all(one in cache for one in more):
        return None
    return Unchanged(setup, source, info, len(samples.rows) + len(info.prompt_rows))


def _newest(setup: Setup, folder: Path, source: Source) -> StoredPlan | None:
    """Return the newest plan of this identity, if it is of this dataset."""
    for plan in sorted(stored_plans(folder), key=lambda one: -one.sequence):
        if plan.identity == identity_of(setup, plan):
            dataset = plan.info.dataset
            here = {
                "path": redacted(str(source.path.resolve())),
                "sha256": source.digest(),
                "folders": [redacted(one) for one in dataset_folders(setup.config)],
            }
            return plan if {**dataset, **here} == dataset else None
    return None


def _facts(setup: Setup, source: Source | None) -> dict[str, str]:
    """Return the digests of the options, and of the code that reads rows."""
    options = as_flags(setup.config)
    for name in options_affecting("start"):
        options.pop(name, None)
    code = code_of_rows(setup, source)
    return {"config": hash_json("config", options), "code": code}


def code_of_rows(setup: Setup, source: Source | None) -> str:
    """Return a digest of what decides which rows and inputs there are: all the code of
    dstrain, of the family's package and of those of the forms that read the dataset, and
    the rows that plugins add.
    """
    family = setup.family.components.partition(":")[0]
    sources = () if source is None else (source, *source.parts)
    forms = {type(one.reader).__module__ for one in sources if one.reader is not None}
    code = [package_digest(name) for name in ("dstrain", family, *sorted(forms))]
    code += [str((row.text, row.prompt, row.arguments)) for row in setup.prompt_rows]
    return hash_json("code of rows", code)


def _records_all_files(setup: Setup, info: CacheInfo) -> bool:
    """Return whether no file was checked that the plan, as nothing uses it, leaves out."""
    for names in info.inputs:
        for name in set(names) - setup.plan(frozenset(names)).used_inputs:
            column = setup.spec.inputs[name]
            if isinstance(column, Column) and column.is_file:
                return False
    return True


def _has_secrets(source: Source) -> bool:
    """Return whether a secret may stand in the dataset: its rows are refused then."""
    if source.parts:
        return any(map(_has_secrets, source.parts))
    # The longest part that every kind of file writes as it is.
    parts = [
        max(re.findall(rb"[A-Za-z0-9]+", one.encode()), key=len, default=b"")
        for one in secrets()
    ]
    if not parts:
        return False
    if source.form != "table":
        return any(one in text.encode() for text in texts_of(source) for one in parts)
    with source.path.open("rb") as lines:
        return any(one in line for line in lines for one in parts)


def _has_equal_components(setup: Setup, info: CacheInfo, may_fetch: bool) -> bool:
    plans = [setup.plan(frozenset(names)) for names in info.inputs]
    plans += [recorded_plan(setup, line) for line in info.prompt_rows]
    found = setup.find(plans) if may_fetch else setup.find(plans, [])
    digests = ModelDigests()
    components = component_keys(setup, found, digests)
    digests.save()
    return bool(
        components == info.components
        and json.loads(json.dumps(found.configs)) == info.configs
    )
