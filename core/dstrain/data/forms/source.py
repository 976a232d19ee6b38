"""Find which form a dataset has, and what identifies its content."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from dstrain.console import shell_word
from dstrain.data.forms.columnar import ARROW, PARQUET
from dstrain.data.forms.left_out import left_out, tables_below
from dstrain.data.forms.listing import folder_digest, has_media, list_media
from dstrain.data.forms.metadata import SUFFIXES
from dstrain.errors import UsageError, first_few, nearest
from dstrain.storage import hash_json, read_limited, sha256
from dstrain.storage.user_cache import ModelDigests

Form = Literal["table", "folder", "parquet", "arrow", "several"]
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


@dataclass(frozen=True)
class Source:
    """Where the rows of a dataset are, and in which form."""

    form: Form
    path: Path
    """The file of the table; the folder, where it is not one file."""
    base: Path
    """The folder in which the files are that rows name."""
    files: tuple[Path, ...] = ()
    """Those of parquet and arrow, in the order of their rows."""
    left_out: tuple[str, ...] = ()
    """Splits beside that of the files, which are not read."""
    roots: tuple[Path, ...] = ()
    """Folders beside `base` that links in a folder may lead to."""
    parts: tuple["Source", ...] = ()
    """Those of several datasets; `path` and `base` are of the first one."""

    @property
    def has_embedded(self) -> bool:
        """Return whether files may be embedded in the table."""
        is_one = self.form in ("parquet", "arrow")
        return is_one or any(part.has_embedded for part in self.parts)

    @property
    def in_words(self) -> str:
        """Return the form in words."""
        if self.form == "table":
            return self.path.name
        if self.form == "folder":
            return "folder with captions"
        if self.form == "several":
            return f"{len(self.parts)} datasets"
        if self.path.is_file():
            return f"{self.form} file"
        return f"{len(self.files)} {self.form} file{'s' * (len(self.files) > 1)}"

    def digest(self) -> str:
        """Return the digest of the rows: of all that they are read from, but for the files
        that they name. It is that of the folder's content, wherever the folder is.

        Raises DstrainError for what cannot be read, and OSError.
        """
        if self.form == "table":
            return sha256(self.path)
        if self.form == "folder":
            return folder_digest(self.path, self.roots)
        if self.form == "several":
            return hash_json("datasets", [part.digest() for part in self.parts])
        digests = ModelDigests()
        found = [[file.name, digests.of(file)] for file in self.files]
        digests.save()
        return found[0][1] if self.path.is_file() else hash_json(self.form, found)


def metadata_files(base: Path) -> list[Path]:
    """Return the metadata files in a folder."""
    paths = [base / f"metadata{suffix}" for suffix in SUFFIXES]
    return [path for path in paths if path.is_file()]


def find_source(
    base: Path,
    metadata: Path | None = None,
    option: str = "--dataset",
    roots: tuple[Path, ...] = (),
) -> Source:
    """Find the rows of a dataset: in the metadata file that is named, else in a folder's
    own metadata, what `datasets` saved there, its parquet files, or its images and videos.

    Raises UsageError for a folder in which none of these is, or of one several.

    Args:
        base: The folder.
        metadata: Its metadata, where it is named.
        option: How the options begin that name these.
        roots: Other folders that may hold files.
    """
    if metadata is not None:
        if metadata.suffix in (PARQUET, ARROW):
            form: Form = "parquet" if metadata.suffix == PARQUET else "arrow"
            return Source(form, metadata, base, (metadata,))
        return Source("table", metadata, base)
    if not base.is_dir():
        raise _no_folder(base, f"{option}_base_path", f"{option}_metadata_path")
    advice = f"name one with {option}_metadata_path"
    tables = metadata_files(base)
    if len(tables) > 1:
        names = " and ".join(path.name for path in tables)
        raise UsageError(base, f"has {names}", advice)
    if tables:
        return Source("table", tables[0], base)
    found = _saved(base, option) or _parquet(base, advice)
    if found is not None:
        return found
    has_captions = has_media(base)
    if not has_captions or any(not medium.captions for medium in list_media(base)):
        _refuse_tables_below(base, option)
    if has_captions:
        return Source("folder", base, base, roots=roots)
    tables_in_words = f"metadata{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
    raise UsageError(
        base,
        f"has no images or videos, no {tables_in_words}, and no {PARQUET} files",
        *left_out(base, is_image=False),
        "put images into it, each with its caption in a text file: dog.jpg and dog.txt",
        f"or name a table with {option}_metadata_path",
    )


def _no_folder(base: Path, base_flag: str, metadata_flag: str) -> UsageError:
    """Return the error of a path that is no folder, with what would be right."""
    if not os.path.lexists(base):
        try:
            siblings = [path.name for path in base.parent.iterdir() if path.is_dir()]
        except OSError:
            siblings = []
        hint = nearest(base.name, siblings)
        return UsageError(base_flag, f"{base} does not exist{hint}")
    what = f"{base} is a file; give its folder"
    if base.suffix.lower() in SUFFIXES:
        folder, table = shell_word(str(base.parent)), shell_word(str(base))
        what += f", or {base_flag} {folder} {metadata_flag} {table}"
    return UsageError(base_flag, what if base.is_file() else f"{base} is not a folder")


def _refuse_tables_below(base: Path, option: str) -> None:
    """Refuse a folder that has its tables in folders below it, as splits have them: their
    captions would be taken for missing.
    """
    tables = tables_below(base)
    if not tables:
        return
    first = base / tables[0]
    kind = "parquet" if first.suffix == PARQUET else "metadata"
    place = f"{option}_base_path {shell_word(str(first.parent))}"
    if kind == "metadata" and not has_media(first.parent):
        place = f"{option}_base_path {shell_word(str(base))} "
        place += f"{option}_metadata_path {shell_word(str(first))}"
    advice = [f"give {place}"]
    if len(tables) > 1:
        advice.append("one is read; several are several [[dataset]] of a --config file")
    found = first_few(map(str, tables))
    raise UsageError(base, f"there is {kind} in {found}, which is not read", *advice)


def _saved(base: Path, option: str) -> Source | None:
    """Return the source of a folder that `save_to_disk` of `datasets` wrote."""
    if (base / SPLITS_FILE).is_file():
        names = _names(base / SPLITS_FILE, _json(base / SPLITS_FILE).get("splits"))
        splits = [name for name in names if (base / name / STATE_FILE).is_file()]
        example = shell_word(str(base / _best_split(splits)))
        split = _chosen_split(base, splits, f"give {option}_base_path {example}")
        saved = _saved(base / split, option)
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


def _parquet(base: Path, advice: str) -> Source | None:
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
