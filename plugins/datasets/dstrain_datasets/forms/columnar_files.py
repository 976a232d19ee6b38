"""Find the files of rows in a folder: what `save_to_disk` of `datasets` wrote, and parquet
files as hubs have them.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from dstrain.plugin import Source, UsageError, first_few, read_limited, shell_word

PARQUET, ARROW = ".parquet", ".arrow"
SPLITS_FILE, STATE_FILE = "dataset_dict.json", "state.json"
"""What `save_to_disk` of `datasets` writes beside splits, and beside the files of one."""
TRAIN = "train"
SPLITS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("train", "training"), TRAIN),
        **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
        **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    }
)
"""Words in the name of a parquet file that say of which split it is, as on Hugging Face."""


SHARD = re.compile(
    r"(?P<start>.*-)(?P<number>\d{2,6})-of-(?P<count>\d{2,6})(?P<rest>\.parquet)"
)
"""The name of one of several files of a table."""
MAX_SHARDS = 100_000


def find_saved(base: Path, option: str) -> Source | None:
    """Return the source of a folder that `save_to_disk` of `datasets` wrote."""
    if (base / SPLITS_FILE).is_file():
        names = _names(base / SPLITS_FILE, _json(base / SPLITS_FILE).get("splits"))
        splits = [name for name in names if (base / name / STATE_FILE).is_file()]
        example = shell_word(str(base / _best_split(splits)))
        split = _chosen_split(base, splits, f"give {option}_base_path {example}")
        saved = find_saved(base / split, option)
        left_out = tuple(name for name in splits if name != split)
        return None if saved is None else replace(saved, left_out=left_out)
    if not (base / STATE_FILE).is_file():
        return None
    state = _json(base / STATE_FILE)
    if state.get("_indices_data_files"):
        what = "has rows in another order, or only some, by indices, which are not read"
        raise UsageError(base, what, "call ds.flatten_indices() before saving it")
    files = state.get("_data_files")
    if not isinstance(files, list):
        return None
    found = [one.get("filename") if isinstance(one, dict) else one for one in files]
    names = _names(base / STATE_FILE, found)
    if not names:
        what = "names no files of rows"
        advice = (
            "save the dataset again: save_to_disk did not finish, or it has no rows"
        )
        raise UsageError(base / STATE_FILE, what, advice)
    return Source("arrow", base, base, tuple(base / name for name in names))


def find_parquet(base: Path, advice: str) -> Source | None:
    """Return the source of the parquet files in a folder, or in its folder `data`, where
    hubs have them.
    """
    for folder in (base, base / "data"):
        by_split: dict[str, list[Path]] = {}
        for path in sorted(folder.glob(f"*{PARQUET}")):
            if not path.name.startswith("."):
                by_split.setdefault(_split_of(path), []).append(path)
        if by_split:
            split = _chosen_split(folder, list(by_split), advice)
            left_out = tuple(name or "others" for name in by_split if name != split)
            _check_shards(folder, by_split[split])
            return Source("parquet", folder, base, tuple(by_split[split]), left_out)
    return None


def _check_shards(folder: Path, files: list[Path]) -> None:
    """Raise UsageError where the names of files say that there are more of them."""
    names = {path.name for path in files}
    series = set()
    for name in names:
        found = SHARD.fullmatch(name)
        if found is not None and int(found["count"]) <= MAX_SHARDS:
            width = len(found["number"])
            series.add((found["start"], width, found["count"], found["rest"]))
    expected = [
        f"{start}{number:0{width}}-of-{count}{rest}"
        for start, width, count, rest in sorted(series)
        for number in range(int(count))
    ]
    missing = [name for name in expected if name not in names]
    if missing:
        many = f"{len(missing)} of {len(expected)} files"
        what = f"lacks {many} that the names of the others count: {first_few(missing)}"
        raise UsageError(folder, what, "put them there, or rename the files that are")


def _split_of(path: Path) -> str:
    """Return the split that the name of a file says, '' for none."""
    words = re.split(r"[^a-z]+", path.stem.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), "")


def _chosen_split(base: Path, splits: list[str], advice: str) -> str:
    """Return the only split, else the one for training; raise UsageError without it."""
    if len(splits) == 1:
        return splits[0]
    if TRAIN in splits:
        return TRAIN
    named = first_few(name or "others" for name in splits) or "none"
    raise UsageError(base, f"has no split named {TRAIN}; splits: {named}", advice)


def _best_split(splits: list[str]) -> str:
    """Return the split that stands in advice; 'SPLIT' if there are none."""
    ranked = sorted(splits, key=lambda name: SPLITS.get(name) != "validation")
    return ranked[0] if ranked else "SPLIT"


def _json(path: Path) -> dict[str, object]:
    """Return an object of a small file of json; raises UsageError."""
    try:
        content = json.loads(read_limited(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(path, f"is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(path, "is not a JSON object")
    return content


def _names(path: Path, values: object) -> list[str]:
    """Return the names in a file of what is in its folder; raise UsageError for one that
    leads out of it.
    """
    names = []
    for value in values if isinstance(values, list) else ():
        leads_out = isinstance(value, str) and any(
            sep in value for sep in ("/", os.sep)
        )
        if not isinstance(value, str) or leads_out or value in ("", ".", ".."):
            what = f"{value!r} is not the name of anything in this folder"
            raise UsageError(path, what)
        names.append(value)
    return names
