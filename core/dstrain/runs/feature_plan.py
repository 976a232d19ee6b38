"""The plan files of a feature cache: which run they were made for, and the rows that
stage 2 trains on.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dstrain.cache.store import FeatureCache
from dstrain.config.fields import split_commas
from dstrain.config.options import TrainConfig, options_affecting
from dstrain.data.dataset import find_metadata
from dstrain.errors import StateError, UsageError
from dstrain.models.component_files import Found
from dstrain.models.configs import differing_entries
from dstrain.runs.setup import Setup
from dstrain.storage.hashing import sha256

StoredPlan = tuple[Path, dict[str, Any]]
"""A plan file and its record."""


@dataclass(frozen=True)
class CacheInfo:
    """The record that a plan of the feature cache keeps of the run that filled it."""

    dataset: Mapping[str, Any]
    """`path` and `sha256` of the metadata, and its number of `rows`, skipped
    ones included."""
    columns: Sequence[str]
    inputs: Sequence[Sequence[str]]
    """The sets of inputs that samples have."""
    components: Mapping[str, str]
    """Component -> digest of its files and configuration."""
    configs: Mapping[str, Mapping[str, Any]]
    """Component -> configuration."""
    versions: Mapping[str, str]
    previews: Sequence[Mapping[str, Any]] = ()
    """One line for each preview; see `preview_line`."""

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "CacheInfo":
        """Read what `to_json` returned."""
        fields = dict(record)
        return cls(fields.pop("data set"), **fields)

    def to_json(self) -> dict[str, Any]:
        """Return the record as it is stored; its words are part of the format."""
        record = asdict(self)
        return {"data set": record.pop("dataset"), **record}


def plan_identity(setup: Setup) -> dict[str, Any]:
    """Return what must be equal in both stages: everything that cached values depend
    on.
    """
    config = setup.config
    spec = setup.spec
    plan = setup.plan(setup.all_inputs())
    flags = {f"--{name}": getattr(config, name) for name in options_affecting("cache")}
    # Several ways to write the same are one value.
    if config.height:
        flags["--max_pixels"] = None
    data_file_keys = split_commas(config.data_file_keys)
    flags["--data_file_keys"] = ",".join(data_file_keys) or None
    extra_inputs = sorted(split_commas(config.extra_inputs))
    flags["--extra_inputs"] = ",".join(extra_inputs) or None
    if not spec.reads_videos:
        for name in options_affecting("video"):
            del flags[f"--{name}"]
    preset = setup.preset
    if preset is not None and preset.component in plan.components["data_process"]:
        flags["--preset_lora_path"] = f"{preset.digest} in {preset.component}"
    constants = {f"--{name}": one.value for name, one in spec.constants.items()}
    return {
        "family": spec.family,
        "variant": spec.variant,
        "task": setup.task.name,
        "sides": list(setup.task.branches),
        "values stored": list(plan.cached_values),
        **flags,
        "dtype": str(setup.dtype).removeprefix("torch."),
        **constants,
    }


def open_plan(
    setup: Setup, cache: FeatureCache
) -> tuple[Sequence[Mapping[str, Any]], CacheInfo]:
    """Return the rows of the plan that this run asks for, and what it records.

    Raises StateError that says in words what differs, and how to refill.
    """
    identity = plan_identity(setup)
    plans = list(cache.plans())
    fitting = [(path, plan) for path, plan in plans if plan["identity"] == identity]
    if not fitting:
        instead = "use the flags it was filled with, or " if plans else ""
        raise StateError(
            cache.folder,
            "contains no plan for this run",
            _differences(identity, [plan["identity"] for _, plan in plans]),
            f"{instead}fill it by running the same command with --task {setup.task.name}:data_process",
        )
    path, plan = _choose(setup, cache, fitting)
    rows = cache.plan_rows(path)
    lacking = []
    for row in rows:
        addresses = [value["at"] for value in row["values"].values() if "at" in value]
        if not all(address in cache for address in addresses):
            lacking.append(row["row"])
    if lacking:
        # Shards may have been deleted, or not copied.
        what = f"lacks values of {len(lacking)} of {len(rows)} rows; the first is row {lacking[0]}"
        raise StateError(cache.folder, what, _refill(setup))
    return rows, CacheInfo.from_json(plan["about"])


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
    setup: Setup,
    cache: FeatureCache,
    fitting: Sequence[StoredPlan],
) -> StoredPlan:
    """Return the newest plan of the dataset at hand; without a dataset, of the only one
    that the cache has this plan for.
    """
    metadata = _metadata(setup.config)
    by_path: dict[str, list[StoredPlan]] = {}
    digest = None if metadata is None else sha256(metadata)
    for path, plan in fitting:
        dataset = plan["about"]["data set"]
        if digest is None or dataset["sha256"] == digest:
            by_path.setdefault(dataset["path"], []).append((path, plan))
    if metadata is not None:
        if not by_path:
            what = f"is not what the feature cache {cache.folder} was filled from, or has changed"
            raise StateError(metadata, what, _refill(setup))
        resolved = str(metadata.resolve())
        if resolved in by_path:
            by_path = {resolved: by_path[resolved]}
    if len(by_path) > 1:
        raise StateError(
            cache.folder,
            f"contains this plan for {len(by_path)} datasets: {', '.join(by_path)}",
            "name one with --dataset_metadata_path",
        )
    (plans,) = by_path.values()
    return max(plans, key=lambda plan: int(plan[1]["sequence"]))


def _metadata(config: TrainConfig) -> Path | None:
    """Return the metadata of the dataset if it is here; stage 2 does without."""
    path = config.dataset_metadata_path
    if path is None and config.dataset_base_path is not None:
        with suppress(UsageError):
            path = find_metadata(config.dataset_base_path)
    return path if path is not None and path.is_file() else None


def _refill(setup: Setup) -> str:
    return f"run --task {setup.task.name}:data_process again"


def _differences(wanted: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """Say in one line how the plan most like the wanted one differs."""
    found = []
    for other in others:
        differing = []
        for key in {**wanted, **other}:
            cached = other.get(key, "nothing")
            own = wanted.get(key, "nothing")
            if cached != own:
                differing.append(f"{key}: cache {cached}, this run {own}")
        found.append(differing)
    if not found:
        return "it contains no finished plan"
    most_similar = min(found, key=len)
    return "; ".join(most_similar)
