"""The plan files of a feature cache: which plan they were made for, and the rows stage
2 trains on.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dstrain.cache.store import FeatureCache
from dstrain.config.fields import split_commas
from dstrain.config.schema import options_affecting
from dstrain.data.metadata import SUFFIXES, refuse
from dstrain.errors import StateError
from dstrain.graph.inputs import Column
from dstrain.models.locate import Found
from dstrain.runs.setup import Setup
from dstrain.storage.hashing import sha256


@dataclass(frozen=True)
class CacheInfo:
    """What a plan of the feature cache records of the run that filled it."""

    metadata_path: str
    metadata_sha256: str
    rows: int
    """Rows of the metadata, those that were left out included."""
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
        """Read what `to_json` gave."""
        values = {"previews": (), **record}
        dataset = values.pop("data set")
        return cls(dataset["path"], dataset["sha256"], dataset["rows"], **values)

    def to_json(self) -> dict[str, Any]:
        """Return the record as it is stored; its words are part of the format."""
        record = asdict(self)
        dataset = {
            "path": record.pop("metadata_path"),
            "sha256": record.pop("metadata_sha256"),
            "rows": record.pop("rows"),
        }
        return {"data set": dataset, **record}


@dataclass(frozen=True)
class CachedPlan:
    """A plan of the feature cache: the rows that stage 2 trains on."""

    rows: Sequence[Mapping[str, Any]]
    presence: tuple[frozenset[str], ...]
    """The sets of inputs that samples have."""
    info: CacheInfo


def plan_identity(setup: Setup) -> dict[str, Any]:
    """Return what must be equal in both stages: everything that cached values depend
    on.
    """
    flags = _cache_flags(setup)
    video = [f"--{name}" for name in options_affecting("video")]
    sampling = {name: flags.pop(name) for name in video}
    return {
        "family": setup.spec.family,
        "variant": setup.spec.variant,
        "task": setup.task.name,
        "sides": list(setup.task.branches),
        "values stored": list(setup.plan(setup.all_inputs()).cached_values),
        **flags,
        "dtype": str(setup.dtype).removeprefix("torch."),
        **_preset(setup),
        **(sampling if setup.spec.reads_videos else {}),
        **{f"--{name}": setting.value for name, setting in setup.spec.settings.items()},
    }


def _cache_flags(setup: Setup) -> dict[str, Any]:
    """Return the options that affect the cache; ways to write the same are one value."""
    config = setup.config
    flags = {f"--{name}": getattr(config, name) for name in options_affecting("cache")}
    if config.height:
        flags["--max_pixels"] = None
    columns = split_commas(config.data_file_keys)
    flags["--data_file_keys"] = ",".join(columns) or None
    inputs = sorted(split_commas(config.extra_inputs))
    flags["--extra_inputs"] = ",".join(inputs) or None
    return flags


def _preset(setup: Setup) -> dict[str, Any]:
    """Return the LoRA merged into a component that stage 1 uses: what is stored depends
    on it.
    """
    preset = setup.preset
    if (
        preset is None
        or preset.component
        not in setup.plan(setup.all_inputs()).components["data_process"]
    ):
        return {}
    return {"--preset_lora_path": f"{preset.digest} in {preset.component}"}


def cache_info(
    setup: Setup,
    found: Found,
    components: Mapping[str, str],
    presence: Sequence[frozenset[str]],
    previews: Sequence[Mapping[str, Any]] = (),
) -> CacheInfo:
    """Describe the run that fills the cache: its dataset, components and versions."""
    table = setup.dataset.table
    return CacheInfo(
        metadata_path=str(table.path.resolve()),
        metadata_sha256=sha256(table.path),
        rows=len(table.rows),
        columns=list(table.columns),
        inputs=[sorted(inputs) for inputs in presence],
        components=dict(components),
        configs={name: dict(content) for name, content in found.configs.items()},
        versions=setup.versions,
        previews=list(previews),
    )


def open_plan(setup: Setup, store: FeatureCache) -> CachedPlan:
    """Find the plan that this run asks for; raises StateError that says in words what
    differs, and how to refill.
    """
    wanted = plan_identity(setup)
    plans = list(store.plans())
    fitting = [(path, record) for path, record in plans if record["identity"] == wanted]
    if not fitting:
        instead = "give the flags it was filled with, or " if plans else ""
        raise StateError(
            str(store.folder),
            "holds no plan for this run",
            _differences(wanted, [r for _, r in plans]),
            f"{instead}fill it: the same command with --task {setup.task.name}:data_process",
        )
    path, record = _choose(setup, store, fitting)
    rows = store.plan_rows(path)
    _refuse_incomplete(setup, store, rows)
    _refuse_unfit(setup, store, rows)
    info = CacheInfo.from_json(record["about"])
    return CachedPlan(rows, tuple(map(frozenset, info.inputs)), info)


def check_configs(info: CacheInfo, found: Found) -> None:
    """Refuse a denoiser whose configuration is not the one stage 1 used; raises
    StateError naming what differs.
    """
    for name, content in found.configs.items():
        want, have = info.configs.get(name), json.loads(json.dumps(dict(content)))
        keys = sorted(
            key
            for key in {*(want or {}), *have}
            if want is not None and want.get(key) != have.get(key)
        )
        differing = [
            key for key in keys if not key.startswith("_")
        ]  # _name_or_path and the like say nothing of it
        if differing:
            raise StateError(
                name,
                f"is not the one the feature cache was made with: {', '.join(differing)} differ",
            )


def _choose(
    setup: Setup, store: FeatureCache, fitting: list[tuple[Path, dict[str, Any]]]
) -> tuple[Path, dict[str, Any]]:
    """Among plans of one identity: those of the dataset at hand, else all if they are
    of one; of these the newest.
    """
    metadata = _metadata(setup)
    if metadata is not None:
        digest = sha256(metadata)
        same = [
            plan for plan in fitting if plan[1]["about"]["data set"]["sha256"] == digest
        ]
        if not same:
            what = f"is not what the feature cache {store.folder} was filled from, or has changed"
            raise StateError(
                str(metadata), what, f"run --task {setup.task.name}:data_process again"
            )
        place = str(metadata.resolve())
        fitting = [
            plan for plan in same if plan[1]["about"]["data set"]["path"] == place
        ] or same
    places = dict.fromkeys(record["about"]["data set"]["path"] for _, record in fitting)
    if len(places) > 1:
        raise StateError(
            str(store.folder),
            f"holds this plan for {len(places)} datasets: {', '.join(places)}",
            "name one with --dataset_metadata_path",
        )
    return max(fitting, key=lambda plan: int(plan[1]["sequence"]))


def _metadata(setup: Setup) -> Path | None:
    """Return the metadata of the dataset if it is here; stage 2 does without."""
    named, base = setup.config.dataset_metadata_path, setup.config.dataset_base_path
    if named is None and base is not None:
        named = next(
            (
                path
                for suffix in SUFFIXES
                if (path := base / f"metadata{suffix}").is_file()
            ),
            None,
        )
    return named if named is not None and named.is_file() else None


def _refuse_incomplete(
    setup: Setup, store: FeatureCache, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Raise StateError if the store lacks values of the plan: shards may have been
    deleted, or not copied.
    """
    lacking = [
        row["row"]
        for row in rows
        if any("at" in v and v["at"] not in store for v in row["values"].values())
    ]
    if lacking:
        what = f"lacks values of {len(lacking)} of {len(rows)} rows, the first is row {lacking[0]}"
        raise StateError(
            str(store.folder), what, f"run --task {setup.task.name}:data_process again"
        )


def _refuse_unfit(
    setup: Setup, store: FeatureCache, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Raise UsageError for values that this machine cannot use, such as the noise of a
    device it lacks.
    """
    sources = setup.spec.inputs.items()
    checks = {
        name: source.check
        for name, source in sources
        if isinstance(source, Column) and source.check
    }
    faults = [
        f"row {row['row']}: {name}: {fault}"
        for row in rows
        for name, check in checks.items()
        if "value" in (form := row["values"].get(name, {}))
        and (fault := check(form["value"]))
    ]
    refuse(store.folder, "value", faults)


def _differences(
    wanted: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
) -> str:
    """How the plan most like the wanted one differs, in one line."""

    def differing(record: Mapping[str, Any]) -> list[str]:
        have = record["identity"]
        both = (
            (key, have.get(key, "nothing"), wanted.get(key, "nothing"))
            for key in {**wanted, **have}
        )
        return [
            f"{key}: cache {there}, this run {here}"
            for key, there, here in both
            if there != here
        ]

    nearest = min(
        map(differing, records), key=len, default=["it holds no finished plan at all"]
    )
    return "; ".join(nearest)
