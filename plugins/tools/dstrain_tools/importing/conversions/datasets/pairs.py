"""Conversions of what pairs images with those they are made from: as a table of ours."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.data import CAPTIONS, list_media, read_caption
from dstrain.plugin import read_limited
from dstrain.plugin.commands import number_of

from dstrain_tools.importing.context import Context, as_list
from dstrain_tools.importing.conversions.datasets.frames import reads_videos
from dstrain_tools.importing.entries import NoCounterpart, Result

CONTROLS = MappingProxyType(
    {
        "qwen_image": "edit_image",
        "flux": "kontext_images",
        "flux2": "edit_image",
        "wan": "control_video",
    }
)
"""Family -> the column of what an image or video is made from, as the specs of its variants
have it, which import torch.
"""


def jsonl(option: str, value: Any, context: Context) -> Result:
    """Read the table that is there, or one with the columns that dstrain reads."""
    path = Path(str(value))
    kind = "video" if context.key.startswith("video") else "image"
    if path.is_file():
        rows = list(_rows(path, kind, context))
        return _written(option, rows, path.parent, context)
    columns = [f"{kind}={kind}_path", "prompt=caption"]
    found = {
        option: str(path),
        "dataset_base_path": str(path.parent),
        "column": columns,
    }
    note = "is not here: its paths must be relative to its folder"
    return Result(found, note)


def control_folder(option: str, value: Any, context: Context) -> Result:
    """Write a table of pairs: each image with those of its name in another folder."""
    if not value:
        return Result(note="is empty")
    folder = context.value("image_directory") or context.value("video_directory")
    folder = Path(str(folder or context.value("folder_path", "")))
    controls = [Path(str(one)) for one in as_list(value)]
    column = _control_column(context)
    missing = [one for one in (folder, *controls) if not one.is_dir()]
    if missing:
        what = f"{missing[0]} is not here, so its files cannot be paired"
        return Result(lost=f"{what}: write a table with the column {column}")
    kind = "video" if reads_videos(context) else "image"
    rows = list(_pairs(folder, controls, kind, column, context))
    result = _written(option, rows, folder, context)
    alone = len(_media(folder)) - len(rows)
    if not alone or result.lost:
        return result
    verb = "has" if alone == 1 else "have"
    what = f"without {number_of(alone, 'file')} of {folder} that {verb} no pair"
    return replace(result, note=f"{result.note}, {what}")


def _control_column(context: Context) -> str:
    """Return the column of what an image or video is made from."""
    name = context.model.family.name
    if name not in CONTROLS:
        raise NoCounterpart(f"family {name} has no column for pairs")
    return CONTROLS[name]


def _rows(path: Path, kind: str, context: Context) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table of musubi-tuner, with our columns and absolute paths.

    Raises ValueError, with the number of the line, for one that is no such row.
    """
    text = read_limited(path).decode("utf-8-sig")
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            what = f"line {number} is not JSON: {error.msg} at column {error.colno}"
            raise ValueError(what) from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is not a table of keys")
        if f"{kind}_path" not in row:
            raise ValueError(f"line {number} has no {kind}_path")
        paths = {
            name: value
            for name, value in row.items()
            if name == f"{kind}_path" or name.startswith("control_path")
        }
        for name, value in paths.items():
            if not isinstance(value, str):
                raise ValueError(f"line {number}: {name} is not text")
        found: dict[str, Any] = {
            kind: os.path.abspath(paths.pop(f"{kind}_path")),
            "prompt": row.get("caption", ""),
        }
        if paths:
            controls = [os.path.abspath(paths[name]) for name in sorted(paths)]
            found[_control_column(context)] = controls
        yield found


def control_folders(option: str, value: Any, context: Context) -> Result:
    """Write a table of several images for each, whose folders have keys of their own."""
    given = {
        key: entry.value
        for key, entry in sorted(context.own.items())
        if key.startswith("control_path") and entry.value
    }
    if not value or context.key not in given:
        return Result(note="is empty")
    first, *_ = given
    if context.key != first:
        return Result(note=f"is read with {first}")
    folders = [one for folder in given.values() for one in as_list(folder)]
    return control_folder(option, folders, context)


def _pairs(
    folder: Path, controls: Sequence[Path], kind: str, column: str, context: Context
) -> Iterator[dict[str, Any]]:
    """Yield a row for each file of a folder that has its like in the others."""
    by_name: dict[str, list[Path]] = {}
    for control in controls:
        for path in _media(control):
            by_name.setdefault(path.stem, []).append(path)
    for path in _media(folder):
        found = by_name.get(path.stem, [])
        # Several images to edit are numbered: photo_0.png, photo_1.png.
        numbered = [
            one
            for stem, paths in sorted(by_name.items())
            for one in paths
            if stem.rpartition("_")[0] == path.stem
            and stem.rpartition("_")[2].isdigit()
        ]
        files = [str(one.absolute()) for one in found or numbered]
        if files:
            yield {
                kind: str(path.absolute()),
                "prompt": _caption(path, context),
                column: files,
            }


def _media(folder: Path) -> list[Path]:
    """Return the images and videos in a folder."""
    return [folder / one.name for one in list_media(folder) if "/" not in one.name]


def _caption(path: Path, context: Context) -> str:
    """Return the text beside an image, or the caption of those without."""
    for ending in CAPTIONS:
        file = path.with_suffix(ending)
        if file.is_file() and (found := read_caption(file)):
            return found
    return str(context.value("default_caption", ""))


def _written(
    option: str, rows: Sequence[Mapping[str, Any]], folder: Path, context: Context
) -> Result:
    """Return the options of a table that is written beside the output."""
    if not rows:
        return Result(lost=f"{folder} has no row for it")
    if context.output is None:
        return Result(
            lost="its table is written beside --output FILE, which is not given"
        )
    name = f"{context.output.stem}-dataset-{context.number}.jsonl"
    path = context.output.with_name(name)
    single = context.model.variant in ("edit", "fun-control", "fun-control-ref")
    columns = set(CONTROLS.values())
    texts = []
    folders = {folder.absolute()}
    for row in rows:
        shown: dict[str, Any] = {}
        for key, value in row.items():
            is_control = key in columns
            shown[key] = value[0] if is_control and single else value
            files = value if is_control else [value] if key != "prompt" else []
            folders |= {Path(one).parent for one in files}
        texts.append(json.dumps(shown, ensure_ascii=False))
    context.tables[path] = "\n".join(texts) + "\n"
    roots = [str(one) for one in sorted(folders) if one != folder.absolute()]
    found: dict[str, Any] = {option: str(path), "dataset_base_path": str(folder)}
    if roots:
        found["dataset_root"] = roots
    note = f"the rows are written to {path.name}"
    return Result(found, note, gives_way=("dataset_base_path",))
