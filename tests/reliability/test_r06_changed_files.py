"""A file that is there is compared with the one that stage 1 read, and one that is gone is
passed over.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.family import weights_of
from tests.support.runs import same
from tests.support.stage_project import Project

pytestmark = pytest.mark.promise(
    "R6", "between the stages: recomputed, refused by name, or the same"
)


def rewrite(path: Path) -> None:
    """Change one byte of a file, and keep its size and time."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    """Put another file of equal size in the place of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    path.write_bytes(content)
    os.utime(path, (1, 1))


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b" ")


def touched(path: Path) -> None:
    os.utime(path, (1, 1))


def copied(path: Path) -> None:
    path.rename(path.with_suffix(".old"))
    shutil.copy(path.with_suffix(".old"), path)
    path.with_suffix(".old").unlink()


def gone(path: Path) -> None:
    path.unlink()


FILES = (
    "data/0.png",
    "model/vae/model-1-of-1.safetensors",
    "model/text_encoder/model-1-of-1.safetensors",
    "model/tokenizer/vocabulary.json",
)
CHANGES = (
    (rewrite, True),
    (replaced, True),
    (longer, True),
    (touched, False),
    (copied, False),
    (gone, False),
)
"""What is done to a file, and whether stage 2 refuses it."""


@pytest.mark.parametrize("names_encoders", [True, False], ids=("named", "recorded"))
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("case", CHANGES, ids=lambda case: case[0].__name__)
def test_a_file_that_is_there_is_compared(
    case: tuple[Callable[[Path], None], bool],
    file: str,
    names_encoders: bool,
    filled: Project,
) -> None:
    want = filled.stage_2()
    change, refuses = case
    weights = weights_of(filled.folder / "model")
    named = list(weights.values()) if names_encoders else [weights["dit"]]
    flags = {"model_paths": json.dumps(named)}
    change(filled.folder / file)
    if refuses:
        words = filled.refusal(**flags)
        assert f"{filled.folder / file}: is not what the feature cache" in words
        assert "--task sft:data_process" in words
    else:
        assert same(filled.stage_2(**flags), want)
