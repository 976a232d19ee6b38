"""Compare what two trees left of a case, and name each difference."""

import base64
import csv
import hashlib
import json
import re
import signal
import struct
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import Tensor

VOLATILE = re.compile(
    # Times, memory, and which process it was.
    "samples_per_second|data_wait_seconds|memory_gib|process|started"
    # The libraries are the same, and each release of the project raises its own.
    r"|versions|version\..*"
    # Digests of files that are compared themselves.
    r"|sha256|dstrain\.sha256"
)
"""Columns of tables, and entries of records and headers, that are left out."""
UNREAD = re.compile(
    r".*\.(log|lock|html|tar)|\.digests\.json|\.decoded_files\.npy|trackers\.json"
)
"""Files that only need to be there: their words are not promised, or they have times or
random numbers.
"""
UNNAMED = re.compile(r".*tfevents.*")
"""Files with times in their names."""
STORE = "store.json"
"""A folder with this file is a feature cache. Its values are compared, however they are
spread over shards; its other files say where on this machine they came from.
"""
ROW = struct.Struct("<20sqqi16s")
"""A row of the table in a shard's header: key, place, length, layout, digest."""
VIDEO = 4.0
"""How far the pixels of two videos may be apart in the mean, of 255. x264 reads memory that
nothing wrote: it encoded equal frames of 96 x 64 pixels so that they were 2.2 apart.
"""
HUNG = -signal.SIGALRM
"""The exit code of a command that did not end: it is named even if it never did."""
PRINTING = ("graph", "models")
"""Commands whose text is compared, beside dry runs."""
Entries = Mapping[str, Any]


def differences(
    base: Path, own: Path, commands: Sequence[Sequence[str]], shows_errors: bool = True
) -> Iterator[str]:
    """Yield a line for each difference between what a case left in two folders, and for
    each command that failed in both, unless the case shows errors.
    """
    codes = [json.loads((one / "codes.json").read_text("utf-8")) for one in (base, own)]
    for number, words in enumerate(commands):
        # What commands of a case have in common stands first.
        name = f"command {number + 1}: {' '.join(words)[-80:]}"
        before, now = (one[number] for one in codes)
        should_work = not shows_errors or words[0] == "python"
        if before != now or now == HUNG or (now and should_work):
            yield f"{name}: exit code {now}, was {before}"
        texts = [
            plain((one / f"printed/{number}.out").read_text("utf-8"), one)
            for one in (base, own)
        ]
        if "--help" in words:
            yield from compared(name, *map(options, texts))
        elif words[0] in PRINTING or "--dry_run" in words:
            yield from compared(name, *(Counter(one.splitlines()) for one in texts))
    before, now = (contents(one / "files") for one in (base, own))
    yield from compared("files", dict.fromkeys(before), dict.fromkeys(now))
    for path in sorted(before.keys() & now.keys()):
        yield from compared(path, before[path], now[path])


def contents(folder: Path) -> dict[str, Entries]:
    """Return what each file holds, by its path; a feature cache counts as one."""
    found: dict[str, Entries] = {}
    stores = {path.parent for path in folder.rglob(STORE)}
    for store in stores:
        values = cached(store)
        found[f"{store.relative_to(folder)} by key"] = values
        # Where keys differ, this says whether values do.
        found[f"{store.relative_to(folder)}"] = Counter(map(digest, values.values()))
    for path in sorted(folder.rglob("*")):
        is_cached = bool(stores & set(path.parents))
        if path.is_file() and not is_cached and not UNNAMED.fullmatch(path.name):
            name = str(path.relative_to(folder))
            try:
                found[name] = entries(path, folder.parent)
            except (OSError, ValueError, SafetensorError, av.FFmpegError):
                # It is no such file, though it is named as one.
                found[name] = {"bytes": hashlib.sha256(path.read_bytes()).hexdigest()}
    return found


def entries(path: Path, case: Path) -> Entries:
    """Return what a file holds: its tensors, columns, entries, pixels or lines, by name."""
    kind = path.suffix
    if UNREAD.fullmatch(path.name) or not path.stat().st_size:
        return {}
    if kind == ".safetensors":
        with safe_open(path, "pt") as file:
            header = {
                key: parsed(text) for key, text in (file.metadata() or {}).items()
            }
            names = file.keys()
            return flat(header) | {name: file.get_tensor(name) for name in names}
    if kind in (".png", ".jpg"):
        with Image.open(path) as image:
            pixels = torch.from_numpy(np.array(image))
            return flat(dict(image.info)) | {image.mode: pixels}
    if kind == ".mp4":
        with av.open(str(path)) as file:
            rate = file.streams.video[0].average_rate
            frames = [one.to_ndarray(format="rgb24") for one in file.decode(video=0)]
        return {f"{rate} frames a second": torch.from_numpy(np.stack(frames))}
    text = plain(path.read_text("utf-8"), case)
    if kind == ".csv":
        return columns(list(csv.DictReader(text.splitlines())))
    if kind == ".jsonl":
        return columns([json.loads(line) for line in text.splitlines()])
    if kind == ".json":
        return flat(json.loads(text))
    return flat(tomllib.loads(text)) if kind == ".toml" else Counter(text.splitlines())


def cached(store: Path) -> dict[str, Tensor]:
    """Return the tensors of all shards of a feature cache, by key and name."""
    found = {}
    for path in store.glob("shards/*.safetensors"):
        with safe_open(path, "pt") as shard:
            header = shard.metadata()
            layouts = json.loads(header["dstrain"])["layouts"]
            rows = ROW.iter_unpack(base64.b64decode(header["dstrain.values"]))
            for number, (key, _, _, layout, _) in enumerate(rows):
                for name, *_ in json.loads(layouts[layout])["tensors"]:
                    found[f"{key.hex()}{name}"] = shard.get_tensor(f"{number}{name}")
    return found


def columns(rows: Sequence[Entries]) -> Entries:
    """Return the columns of a table."""
    names = dict.fromkeys(name for row in rows for name in row)
    return flat({name: [row.get(name) for row in rows] for name in names})


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return the leaves of nested records by dotted names, less volatile ones."""
    if isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        value = {str(number): one for number, one in enumerate(value)}
    if not isinstance(value, dict):
        return {name: value}
    found = {}
    for key, one in value.items():
        if not VOLATILE.fullmatch(key):
            found |= flat(one, f"{name}.{key}".lstrip("."))
    return found


def parsed(text: str) -> Any:
    """Return what an entry of a header says: many are JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def plain(text: str, case: Path) -> str:
    """Return a text without the places of the case and of temporary files."""
    text = text.replace(str(case), "CASE")
    return re.sub(r"/tmp/tmp\w+|dstrain-toy-\w+", "TEMPORARY", text)


def options(page: str) -> Entries:
    """Return the options of a help page, with their types, and their defaults."""
    found = {}
    for part in re.split(r"\n  (?=-)", page)[1:]:
        option, _, words = part.split("\n\n")[0].replace("\n", " ").partition("  ")
        default = re.search(r"\[default: ([^]]*)\]", " ".join(words.split()))
        found[option] = default and default[1]
    return found


def compared(place: str, before: Entries, now: Entries) -> Iterator[str]:
    """Yield lines that name what is missing, what is new, what has another form, and the
    numbers that are farthest from what they were.
    """
    for word, less, more in (("missing", now, before), ("new", before, now)):
        names = [name for name in more if name not in less]
        if names:
            yield f"{place}: {listed(names)}: {word}"
    far: dict[str, float] = {}
    for name in before.keys() & now.keys():
        one, other = before[name], now[name]
        if not same(one, other):
            distances = apart(one, other)
            if distances is None:
                yield f"{place}: {name}: {shown(other)}, was {shown(one)}"
            elif not place.endswith(".mp4") or distances.mean().item() > VIDEO:
                far[name] = distances.max().item()
    if far:
        names = sorted(far, key=lambda name: (-far[name], name))
        yield f"{place}: {listed(names)}: differ by up to {far[names[0]]:.3g}"


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, tensors to the last bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return digest(one) == digest(other)
    return type(one) is type(other) and bool(one == other)


def digest(tensor: Tensor) -> str:
    """Return dtype and shape of a tensor, and a digest of its bytes."""
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    hashed = hashlib.sha256(content).hexdigest()[:16]
    return f"{tensor.dtype} {list(tensor.shape)} {hashed}"


def apart(one: Any, other: Any) -> Tensor | None:
    """Return how far numbers are apart; None if these are none, or of another form."""
    try:
        pair = [
            value if isinstance(value, Tensor) else torch.tensor(np.array(value, float))
            for value in (one, other)
        ]
    except (TypeError, ValueError):
        return None
    if pair[0].dtype != pair[1].dtype or pair[0].shape != pair[1].shape:
        return None
    return (pair[0].double() - pair[1].double()).abs()


def shown(value: Any) -> str:
    """Return a value in few words."""
    return digest(value) if isinstance(value, Tensor) else repr(value)[:60]


def listed(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")
