"""Conversions of the keys of a dataset: sizes, frames, captions, pairs of images."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrain.console import number_of
from dstrain.data.forms.captions import SUFFIXES as CAPTIONS, read_caption
from dstrain.data.forms.listing import MEDIA
from dstrain.storage.files import read_limited

from dstrain_tools.importing.context import Context, as_list, truth
from dstrain_tools.importing.entries import Result

OF_VIDEOS = ("wan",)
"""The families whose variants read videos."""
CONTROLS = MappingProxyType(
    {
        "qwen_image": "edit_image",
        "flux": "kontext_images",
        "wan": "control_video",
    }
)
"""Family -> the column of what an image or video is made from."""
CROPS = 4
"""Places at which images are cropped, in place of any."""


def reads_videos(context: Context) -> bool:
    """Return whether the model is one of videos."""
    return context.model.family.name in OF_VIDEOS


def _in_buckets(context: Context) -> bool:
    """Return whether images of several sizes are sorted into buckets."""
    if context.source.tool == "ai-toolkit":
        return True
    return context.is_on("enable_bucket")


def width_and_height(option: str, value: Any, context: Context) -> Result:
    """Give the area of buckets, or one size."""
    text = str(value).split(",") if isinstance(value, str) else as_list(value)
    sides = [int(one) for one in text]
    width, height = sides[0], sides[-1]
    if not _in_buckets(context):
        return Result({"height": height, "width": width})
    side = round(math.sqrt(width * height))
    note = "" if width == height else f"the area of {width} x {height} pixels"
    return Result({option: str(side)}, note)


def with_resolution(option: str, value: Any, context: Context) -> Result:
    """Leave it to the size whether there are buckets."""
    if truth(value):
        return Result(note="the option resolution makes buckets")
    return Result(note="the options height and width make one size")


def sides(option: str, value: Any, context: Context) -> Result:
    """Give the sides of the squares whose areas buckets have."""
    return Result({option: ",".join(str(one) for one in as_list(value))})


def in_buckets(option: str, value: Any, context: Context) -> Result:
    """Carry a number of buckets over, where there are any."""
    if not _in_buckets(context):
        return Result(note="acts only where there are buckets")
    return Result({option: value})


def not_in_buckets(option: str, value: Any, context: Context) -> Result:
    """Scale small images up unless that is switched off."""
    if not _in_buckets(context) or truth(value):
        return Result(note="small images are not scaled up by default")
    return Result({option: True})


def frames(option: str, value: Any, context: Context) -> Result:
    """Count the frames of clips."""
    if not _has_videos(context):
        return Result(note="acts on videos alone")
    numbers = [int(one) for one in as_list(value)]
    if len(numbers) == 1:
        return Result({option: numbers[0]})
    note = "a video gives clips of the greatest number that it is long enough for, not of each"
    return Result({option: ",".join(str(one) for one in numbers)}, note)


def _has_videos(context: Context) -> bool:
    if context.source.tool == "ai-toolkit":
        return reads_videos(context)
    return bool(context.value("video_directory") or context.value("video_jsonl_file"))


def most_frames(option: str, value: Any, context: Context) -> Result:
    """Count the frames of whole videos."""
    if context.value("frame_extraction") != "full":
        return Result(note="acts with frame_extraction full alone")
    number = (int(value) - 1) // 4 * 4 + 1
    return Result({option: number}, "a shorter video gives all of its frames")


def frame_extraction(option: str, value: Any, context: Context) -> Result:
    """Say which clips a video gives."""
    name = str(value)
    if name == "uniform":
        samples = context.value("frame_sample", 1)
        return Result({option: name, "frame_samples": samples})
    if name in ("head", "chunk"):
        return Result({option: name})
    if name == "full":
        return Result(
            {option: "head"}, "a video gives as many frames as num_frames allows"
        )
    return Result(
        {option: "chunk"},
        f"{name} has no counterpart; clips follow each other without overlap",
    )


def frame_sample(option: str, value: Any, context: Context) -> Result:
    """Count evenly spaced clips."""
    if context.value("frame_extraction") != "uniform":
        return Result(note="acts with frame_extraction uniform alone")
    return Result({option: value})


def source_rate(option: str, value: Any, context: Context) -> Result:
    """Resample videos, or take their frames as they are."""
    if not _has_videos(context):
        return Result(note="acts on videos alone")
    if value:
        return Result(
            note="the frame rate is read from each file, and resampled to the model's"
        )
    return Result({option: False})


def first_frame(option: str, value: Any, context: Context) -> Result:
    """Read the first frame of videos, where the model can do without."""
    if not truth(value):
        return Result(note="is off")
    if context.model.variant == "ti2v-5b":
        return Result({option: "input_image"})
    return Result(note="variants with a first frame read it by themselves")


def with_space_after(option: str, value: Any, context: Context) -> Result:
    """Put a blank between prefix and caption, as sd-scripts does."""
    return Result({option: f"{value} "}) if value else Result(note="is empty")


def with_space_before(option: str, value: Any, context: Context) -> Result:
    """Put a blank between caption and suffix, as sd-scripts does."""
    return Result({option: f" {value}"}) if value else Result(note="is empty")


def kept_tags(option: str, value: Any, context: Context) -> Result:
    """Count the tags that stay, where tags are shuffled."""
    shuffles = context.is_on("shuffle_caption") or context.is_on("shuffle_tokens")
    if not shuffles or not int(value):
        return Result(note="acts where tags are shuffled")
    return Result({option: value})


def random_crops(option: str, value: Any, context: Context) -> Result:
    """Crop at several places, in place of any."""
    if not truth(value):
        return Result(note="is off")
    return Result(
        {option: CROPS}, f"{CROPS} places, evenly spaced, whose latents can be cached"
    )


def regularization(option: str, value: Any, context: Context) -> Result:
    """Weigh the loss of images that keep what the model knew."""
    if not truth(value):
        return Result(note="is off")
    return Result({option: float(context.value("prior_loss_weight", 1.0))})


def prior_weight(option: str, value: Any, context: Context) -> Result:
    """Leave the weight to the dataset that it is for."""
    return Result(note="is the loss_weight of datasets for regularization")


def class_folders(option: str, value: Any, context: Context) -> Result:
    """Name a folder of images, with the weight of its loss."""
    if not value:
        return Result(note="is empty")
    found: dict[str, Any] = {option: value}
    if context.key == "reg_data_dir":
        found["loss_weight"] = float(context.value("prior_loss_weight", 1.0))
    note = ""
    if not Path(str(value)).is_dir():
        note = "is not here: folders such as 10_dog in it are one dataset, drawn once"
    return Result(found, note)


def mask_weight(option: str, value: Any, context: Context) -> Result:
    """Weigh what a mask leaves out, where there are masks."""
    if not context.is_on("alpha_mask"):
        return Result(note="acts only with masks")
    return Result({option: value})


def weight_of_network(option: str, value: Any, context: Context) -> Result:
    """Do not weigh the LoRA by dataset."""
    if float(value) == 1:
        return Result(note="is the default")
    return Result(
        lost="the loss of a dataset has a weight, loss_weight; its LoRA has none"
    )


def jsonl(option: str, value: Any, context: Context) -> Result:
    """Read the table that is there, or one with the columns that dstrain reads."""
    path = Path(str(value))
    kind = "video" if context.key.startswith("video") else "image"
    control = CONTROLS[context.model.family.name]
    if path.is_file():
        rows = list(_rows(path, kind, control))
        return _written(option, rows, path.parent, context)
    columns = [f"{kind}={kind}_path", "prompt=caption"]
    found = {
        option: str(path),
        "dataset_base_path": str(path.parent),
        "column": columns,
    }
    note = "is not here: its paths must be relative to its folder"
    return Result(found, note)


def _rows(path: Path, kind: str, control: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table of musubi-tuner, with our columns and absolute paths."""
    for line in read_limited(path).decode("utf-8-sig").splitlines():
        if not line.strip():
            continue
        row = json.loads(line)
        controls = [
            row[name] for name in sorted(row) if name.startswith("control_path")
        ]
        found: dict[str, Any] = {
            kind: os.path.abspath(row[f"{kind}_path"]),
            "prompt": row.get("caption", ""),
        }
        if controls:
            found[control] = [os.path.abspath(one) for one in controls]
        yield found


def control_folder(option: str, value: Any, context: Context) -> Result:
    """Write a table of pairs: each image with those of its name in another folder."""
    if not value:
        return Result(note="is empty")
    folder = context.value("image_directory") or context.value("video_directory")
    folder = Path(str(folder or context.value("folder_path", "")))
    controls = [Path(str(one)) for one in as_list(value)]
    column = CONTROLS[context.model.family.name]
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
    return Result(result.options, f"{result.note}, {what}")


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
    return [path for path in sorted(folder.iterdir()) if path.suffix.lower() in MEDIA]


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
    return Result(found, f"the rows are written to {path.name}")
