"""The plan files of a feature cache: which run they were made for, and the rows that
stage 2 trains on.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from dstrain.cache import CacheInfo, FeatureCache, PlanSamples, StoredPlan, stored_plans
from dstrain.cache.source_files import first_changed_source
from dstrain.console import get_logger, redacted
from dstrain.data.tables import Source
from dstrain.errors import CacheError, StateError
from dstrain.graph.code_digest import CODE
from dstrain.models import Found
from dstrain.models.component_files import named_models
from dstrain.models.configs import differing_entries
from dstrain.models.needed_components import find_given
from dstrain.runs.datasets.sources import (
    NamedParts,
    dataset_folders,
    folders_of_parts,
    source_here,
)
from dstrain.runs.plan_identity import VALIDATION, plan_identity
from dstrain.runs.setup import Setup
from dstrain.storage.hashing import files_in
from dstrain.storage.recorded_files import first_changed
from dstrain.training import CachedSamples

logger = get_logger(__name__)

MOST_FACTS = 12
"""Most differences between two plans that an error lists."""
MOST_ROWS = 1_000_000
"""Most rows of a dataset whose files stage 2 looks at before it starts."""


def open_plan(setup: Setup, cache: FeatureCache) -> tuple[CachedSamples, CacheInfo]:
    """Return the samples of the plan that this run asks for, and what it records.

    Raises StateError that says in words what differs, and how to refill.
    """
    plans = [
        plan
        for plan in stored_plans(cache.folder)
        if (plan.use == VALIDATION) == setup.is_validation
    ]
    identities = [identity_of(setup, plan) for plan in plans]
    fitting, of_other_code = [], []
    for plan, identity in zip(plans, identities, strict=True):
        if plan.identity == identity:
            fitting.append(plan)
        elif _without_code(plan.identity) == _without_code(identity):
            of_other_code.append(plan)
    differences = _differences(identities, [plan.identity for plan in plans])
    if not fitting and setup.config.accept_code_change and of_other_code:
        logger.warning(
            f"feature cache {cache.folder} was filled with other code, and its values are"
            f" used: {differences}"
        )
        fitting = of_other_code
    if not fitting:
        lines = [differences]
        if of_other_code:
            lines.append(
                "fill it again; if no value changed, accept it with --accept_code_change"
            )
        elif plans:
            lines.append("use the flags it was filled with, or fill it again")
        option = "--validation_dataset_base_path"
        what = f"the rows of {option}" if setup.is_validation else "this run"
        raise CacheError(cache.folder, f"contains no plan for {what}", *lines)
    plan, rows = _choose(setup, cache, fitting)
    info = plan.info
    samples = CachedSamples.of(cache, rows, [frozenset(one) for one in info.inputs])
    lacking = samples.lacking()
    if len(lacking):
        # Shards may have been deleted, or not copied.
        first = info.name_row(rows[int(lacking[0])])
        what = f"lacks values of {len(lacking):,} of {len(rows):,} rows; the first is {first}"
        raise CacheError(cache.folder, what)
    check_components(setup, cache, info)
    if not setup.is_validation:
        warn_of_versions(setup, cache, info)
    return samples, info


def warn_of_versions(setup: Setup, cache: FeatureCache, info: CacheInfo) -> None:
    """Name the libraries that stage 1 had in other versions; that is accepted."""
    others = [
        f"{name} {info.versions.get(name, 'absent')} (here {here})"
        for name, here in setup.versions.items()
        if name != "device" and info.versions.get(name) != here
    ]
    if others:
        logger.warning(
            f"feature cache {cache.folder} was filled with other versions:"
            f" {', '.join(others)}; its values are used"
        )


def identity_of(setup: Setup, plan: StoredPlan) -> dict[str, Any]:
    """Return the identity that this run gives to a plan of the sets of inputs in a
    stored one.
    """
    input_sets = [frozenset(names) for names in plan.info.inputs]
    facts = plan_identity(setup, input_sets, plan.info.configs)
    # As JSON has it.
    identity: dict[str, Any] = json.loads(json.dumps(facts))
    return identity


def _without_code(fact: Any) -> Any:
    """Return facts of an identity without the digests of modules."""
    if not isinstance(fact, dict):
        return fact
    return {
        name: _without_code(one)
        for name, one in fact.items()
        if not name.startswith(CODE)
    }


def check_components(setup: Setup, cache: FeatureCache, info: CacheInfo) -> None:
    """Compare the components of stage 1 with what this run names of them, and otherwise
    with the files that stage 1 used; those that are not here are passed over.

    Raises StateError for another model, configuration or file.
    """
    for name, model in named_models(setup.family, setup.models).items():
        recorded = info.models.get(name, model)
        if name in info.files and model != recorded:
            what = f"was filled with {name} of {recorded}, and this run names {model}"
            raise CacheError(cache.folder, what)
    given = find_given(setup.family, setup.models, info.files, setup.spec.components)
    for name, files in info.files.items():
        here = {place or Path(path).name: path for path, place, _ in files}
        if name in given.files:
            paths = files_in(given.files[name].paths)
            named = {place or path.name: str(path) for place, path in paths}
            if len(named) == len(here) and not named.keys() & here.keys():
                # All have other names, which do not count.
                named = dict(zip(here, named.values(), strict=True))
            for new in sorted(named.keys() - here.keys()):
                raise _changed(cache, named[new])
            here = named
        entries = {place or Path(path).name: entry for path, place, entry in files}
        changed = first_changed((here.get(key, ""), entries[key]) for key in entries)
        if changed is not None:
            raise _changed(cache, changed)
    check_configs(info, given)


def check_configs(info: CacheInfo, found: Found) -> None:
    """Refuse a denoiser whose configuration is not the one stage 1 used; raises
    StateError naming what differs.
    """
    for name, config in found.configs.items():
        if name not in info.configs:
            continue
        differing = sorted(differing_entries(info.configs[name], config))
        if differing:
            what = f"has another configuration than when the feature cache was filled: {', '.join(differing)}"
            raise StateError(name, what)


def _choose(
    setup: Setup, cache: FeatureCache, fitting: Sequence[StoredPlan]
) -> tuple[StoredPlan, PlanSamples]:
    """Return the newest plan of the dataset at hand, and its rows; without a dataset, of
    the only one that the cache has this plan for.
    """
    source = _source(setup, fitting)
    # As they are recorded.
    resolved = None if source is None else redacted(str(source.path.resolve()))
    recorded = [redacted(folder) for folder in dataset_folders(setup.config)]
    digest = None if source is None else source.digest()
    parts = NamedParts(setup.config)
    changed: str | Path | None = None
    newest: dict[str, StoredPlan] = {}
    for plan in sorted(fitting, key=lambda one: one.sequence):
        dataset = plan.info.dataset
        other = parts.first_changed(dataset)
        if other is None and source is not None and digest != dataset["sha256"]:
            other = source.path
        if other is None:
            named = f"{dataset['path']} with files in {', '.join(dataset['folders'])}"
            newest.pop(named, None)  # so that the newest of all is the last
            newest[named] = plan
        changed = changed or other

    def is_named(plan: StoredPlan) -> tuple[bool, bool]:
        dataset = plan.info.dataset
        return dataset["folders"] == recorded, dataset["path"] == resolved

    # First those that were filled from the very folders and metadata that are named.
    best = max(map(is_named, newest.values()), default=None)
    for is_best in (True, False):
        datasets = {}
        for place, plan in newest.items():
            if (is_named(plan) == best) == is_best:
                found = _first_changed(setup, plan)
                if found is None:
                    datasets[place] = plan, plan.samples()
                changed = changed or found
        # A dataset that moved has a plan for each place, all of the same values.
        if len({rows.digest for _, rows in datasets.values()}) == 1:
            return datasets.popitem()[1]
        if datasets:
            second = "validation_" if setup.is_validation else ""
            raise StateError(
                cache.folder,
                f"contains this plan for {len(datasets)} datasets: {'; '.join(datasets)}",
                f"name one with --{second}dataset_base_path and --{second}dataset_metadata_path",
            )
    raise _changed(cache, changed or cache.folder)


def _first_changed(setup: Setup, plan: StoredPlan) -> str | None:
    """Return the first file in the folders of the run that is not what the plan was made
    from; None if there is none, or if there are too many to look at.
    """
    if plan.info.dataset["rows"] > MOST_ROWS:
        logger.info(
            f"files of more than {MOST_ROWS:,} rows are not compared with those that stage 1 read"
        )
        return None
    for samples, folders in planned_parts(setup, plan):
        here = [folder for folder in folders if os.path.isdir(folder)]
        if here:
            changed = first_changed_source(plan, samples, here)
            if changed is not None:
                return changed
    return None


def planned_parts(setup: Setup, plan: StoredPlan) -> list[tuple[range, list[str]]]:
    """Return the datasets of a plan: the samples of each, and the folders in which this run
    names its files, none if it does not name the dataset.
    """
    folders = folders_of_parts(setup.config)
    counts = plan.info.rows_of_parts
    ends = [sys.maxsize]
    if len(counts) > 1:
        # Of a single dataset are all samples: a million of them need not be opened.
        rows = plan.samples().numbers["row"]
        ends = rows.searchsorted(list(accumulate(counts))).tolist()
    # Stage 2 need not name the dataset of --dataset_base_path, which is the first.
    named: list[list[str]] = [[]] * (len(counts) - len(folders)) + folders
    samples = map(range, [0, *ends], ends)
    return list(zip(samples, named, strict=False))


def _source(setup: Setup, fitting: Sequence[StoredPlan]) -> Source | None:
    """Return where the rows of the dataset are if they are here; stage 2 does without."""
    source = source_here(setup.config)
    if setup.config.dataset and source is not None:
        # Stage 2 need not name the dataset of --dataset_base_path.
        datasets = {len(plan.info.dataset.get("parts", (None,))) for plan in fitting}
        return source if len(source.parts or (None,)) in datasets else None
    if source is None or source.form == "table":
        return source
    # What is in a folder is its dataset only if stage 1 took it for that: a table may be
    # elsewhere.
    forms = {plan.info.dataset.get("form") for plan in fitting}
    is_named = setup.config.dataset_metadata_path is not None
    return source if is_named or source.form in forms else None


def _changed(cache: FeatureCache, path: str | Path) -> StateError:
    what = (
        f"is not what the feature cache {cache.folder} was filled from, or has changed"
    )
    return CacheError(path, what)


def _differences(
    wanted: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> str:
    """Show the entries in which the plan most like what this run wants of it differs."""
    found = [list(_differing(*pair)) for pair in zip(wanted, others, strict=True)]
    most_similar = min(found, key=len, default=["it contains no finished plan"])
    more = len(most_similar) - MOST_FACTS
    shown = most_similar[:MOST_FACTS] + ([f"and {more} more"] if more > 0 else [])
    return "; ".join(shown)


def _differing(
    own: Mapping[str, Any], other: Mapping[str, Any], within: str = ""
) -> Iterator[str]:
    """Yield the entries in which two plans differ; a record that one of them lacks is
    named alone.
    """
    for name in {**own, **other}:
        values = [other.get(name, "nothing"), own.get(name, "nothing")]
        are_records = [isinstance(one, dict) and not within for one in values]
        if all(are_records):
            yield from _differing(values[1], values[0], f"{name} ")
        elif values[0] != values[1]:
            cache, here = (
                "given" if is_record else one
                for is_record, one in zip(are_records, values, strict=True)
            )
            yield f"{within}{name}: cache {cache}, this run {here}"
