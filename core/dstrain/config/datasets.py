"""Several datasets in one run: what each has of its own beside the options of the run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dstrain.config.fields import Flag, check_value
from dstrain.config.options import TrainConfig
from dstrain.config.plugin_options import flags
from dstrain.errors import UsageError, nearest

BASE = "dataset_base_path"
METADATA = "dataset_metadata_path"
FORM = "dataset_form"
REPEATS = "repeats"
LOSS_WEIGHT = "loss_weight"
OF_DATASETS = (
    Flag(REPEATS, int, "data", "", 1, minimum=1, maximum=10**6),
    Flag(LOSS_WEIGHT, float, "data", "", 1.0, minimum=0.0, maximum=10**6),
)
"""What a dataset alone has."""
MASK_COLUMN = "mask_column"
ALPHA_MASK = "alpha_mask"
EXAMPLE = (
    'a dataset is a JSON object, \'{"dataset_base_path": "photos", "repeats": 2}\', '
    "or a table [[dataset]] in a file of --config"
)


@dataclass(frozen=True)
class DatasetOptions:
    """One of the datasets of a run."""

    config: TrainConfig
    """The options of the run with those of this dataset in their place."""
    repeats: int = 1
    """How often an epoch draws each of its samples, beside --dataset_repeat."""
    loss_weight: float = 1.0
    """What the losses of its samples are multiplied by."""
    name: str = ""
    """Its name in messages, as --dataset 2; '' for that of --dataset_base_path."""
    own: frozenset[str] = frozenset()
    """The names of the options that it has of its own."""

    @property
    def has_own_masks(self) -> bool:
        """Return whether it asks for masks itself, and not the run for all datasets."""
        names_column = MASK_COLUMN in self.own and self.config.mask_column is not None
        return names_column or (ALPHA_MASK in self.own and self.config.alpha_mask)


def datasets_of(config: TrainConfig, first: int = 1) -> tuple[DatasetOptions, ...]:
    """Return the datasets of a run: that of --dataset_base_path, then each --dataset.
    Raises UsageError that names the dataset, the first by this number, and the option.
    """
    alone = replace(config, dataset=())
    entries = [
        _parsed(text, number) for number, text in enumerate(config.dataset, first)
    ]
    found = []
    if config.dataset_base_path is not None or not entries:
        found.append(DatasetOptions(alone))
    known = _flags()
    for number, entry in enumerate(entries, first):
        place = f"--dataset {number}"
        own = {
            name: _value(known[name], value, f"{place}: {name}")
            for name, value in entry.items()
        }
        if own.get(BASE) is None:
            what = f"is required: the folder of the dataset; {EXAMPLE}"
            raise UsageError(f"{place}: {BASE}", what)
        repeats, weight = (own.pop(one.name, one.default) for one in OF_DATASETS)
        changes = {METADATA: None, FORM: None, **_without_other_masks(own), **own}
        one = replace(alone, **changes)
        found.append(DatasetOptions(one, repeats, weight, place, frozenset(own)))
    return tuple(found)


def _without_other_masks(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return what turns off the run's kind of masks where a dataset has the other kind."""
    if own.get(MASK_COLUMN) is not None:
        return {ALPHA_MASK: False}
    return {MASK_COLUMN: None} if own.get(ALPHA_MASK) else {}


def dataset_flags() -> dict[str, Flag]:
    """Return the options that a dataset may have of its own, by name."""
    return {flag.name: flag for flag in flags(TrainConfig) if "dataset" in flag.affects}


def _flags() -> dict[str, Flag]:
    return {**dataset_flags(), **{one.name: one for one in OF_DATASETS}}


def with_places(text: str, base: Path | None, metadata: Path | None) -> str:
    """Return the JSON of a dataset with these places in it."""
    entry = _parsed(text, 1)
    for name, place in ((BASE, base), (METADATA, metadata)):
        if place is not None and entry.get(name) != str(place):
            entry[name] = str(place)
    return json.dumps(entry, ensure_ascii=False)


def repeated_base_paths(words: Sequence[str]) -> list[str]:
    """Return the words of a command in which each --dataset_base_path after the first
    one is a --dataset of its own.
    """
    found: list[str] = []
    count = 0
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name.replace("-", "_") != f"__{BASE}":
            found.append(word)
            continue
        count += 1
        if count == 1:
            found.append(word)
            continue
        path = value if equals else next(rest, "")
        found += ["--dataset", json.dumps({BASE: path}, ensure_ascii=False)]
    return found


def _parsed(text: str, number: int) -> dict[str, Any]:
    where = f"--dataset {number}"
    try:
        entry = json.loads(text, object_pairs_hook=partial(_unique, where))
    except (ValueError, RecursionError) as error:
        raise UsageError(where, f"is not JSON: {error}", EXAMPLE) from error
    if not isinstance(entry, dict):
        raise UsageError(where, "is not an object", EXAMPLE)
    known = [*_flags()]
    for name in entry:
        if name not in known:
            what = f"has no option {name!r} of its own{nearest(name, known)}"
            raise UsageError(where, what, f"a dataset has: {', '.join(known)}")
    return entry


def _unique(where: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; raises UsageError for an option that is given twice."""
    found: dict[str, Any] = {}
    for written, value in pairs:
        name = written.replace("-", "_")
        if name in found:
            what = f"is given twice, as {found[name]!r} and {value!r}; give it once"
            raise UsageError(f"{where}: {name}", what)
        found[name] = value
    return found


def _value(flag: Flag, value: Any, where: str) -> Any:
    """Return the value of an option, which may be written as text, as in --config."""
    if flag.many and isinstance(value, list):
        return tuple(_converted(flag, one, where) for one in value)
    found = _converted(flag, value, where)
    try:
        check_value(flag, (found,) if flag.many else found)
    except UsageError as error:
        raise UsageError(where, error.what) from error
    return (found,) if flag.many else found


def _converted(flag: Flag, value: Any, where: str) -> Any:
    kind = flag.kind
    if kind is bool and value in ("true", "false"):
        return value == "true"
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and flag.is_several(value):
        return value
    is_number = kind in (int, float)
    if isinstance(value, str) and (is_number or kind is Path):
        try:
            if value:
                return kind(value)
        except ValueError:
            pass
        raise UsageError(where, f"{value!r} is not a valid {kind.__name__.lower()}")
    return value
