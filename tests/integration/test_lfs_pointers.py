"""A repository that was cloned without Git LFS has pointers in the place of its files."""

from pathlib import Path
from typing import Any

import pytest
from dstrain import DstrainError

from tests.support.noise_images import noise_image
from tests.support.runs import project, train

pytestmark = pytest.mark.usefixtures("tiny")
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n"
READ: dict[str, dict[str, Any]] = {
    "data/1.png": {},
    "data/metadata.json": {},
    "model/vae/config.json": {},
    "model/vae/model-1-of-1.safetensors": {},
    "lora.safetensors": {"lora_checkpoint": "lora.safetensors"},
    "weights.pth": {"resume_from_checkpoint": "weights.pth"},
    "photos/a.txt": {"dataset_base_path": Path("photos")},
    "rows.csv": {"dataset_metadata_path": Path("rows.csv")},
}
"""A file, and what has a run read it."""


@pytest.mark.parametrize("name", READ)
def test_a_pointer_is_named_as_one_wherever_a_file_is_read(
    name: str, empty: Path
) -> None:
    project(empty)
    Path("photos").mkdir()
    noise_image(16, 16).save("photos/a.png")
    Path(name).write_text(POINTER)
    with pytest.raises(DstrainError, match="Git LFS") as caught:
        train(empty, max_steps=1, **READ[name])
    assert Path(name).name in str(caught.value)
