"""A damaged configuration or tokenizer is named before anything is computed with it."""

import json
import shutil
from pathlib import Path

import pytest
from dstrain import Pipeline, StateError

from tests.support.toys import toy

pytestmark = pytest.mark.promise(
    "R5", "damaged small files of a model are named before use"
)
VARIANTS = {
    "qwen_image": "base",
    "flux": "dev",
    "flux2": "dev",
    "sdxl": "base",
    "wan": "i2v",
    "z_image": "omni",
}
DEPTHS = {"sdxl": ("unet", "layers_per_block"), "z_image": ("transformer", "n_layers")}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n"
DAMAGES = {"cut": b"", "empty": b"", "a list": b"[]", "null": b"null", "a pointer": LFS}


def opened(model: Path, variant: str) -> Pipeline:
    return Pipeline.from_pretrained(model, variant=variant)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("family", VARIANTS)
def test_it_is_named(family: str, damage: str, tmp_path: Path) -> None:
    model, variant = tmp_path / "model", VARIANTS[family]
    shutil.copytree(toy(family, variant), model)
    read = [
        path
        for path in sorted(model.rglob("*.json"))
        if path.name in ("config.json", "tokenizer.json", "tokenizer_config.json")
    ]
    assert len(read) > 4
    for path in read:
        whole = path.read_bytes()
        cut = whole[: len(whole) // 2]
        path.write_bytes(cut if damage == "cut" else DAMAGES[damage])
        with pytest.raises(StateError) as caught:
            opened(model, variant)
        assert caught.value.where == str(path)
        path.write_bytes(whole)
    opened(model, variant)


@pytest.mark.parametrize("family", VARIANTS)
def test_more_layers_than_weights_are_refused_before_they_are_built(
    family: str, tmp_path: Path
) -> None:
    model, variant = tmp_path / "model", VARIANTS[family]
    shutil.copytree(toy(family, variant), model)
    folder, entry = DEPTHS.get(family, ("transformer", "num_layers"))
    path = model / folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), entry: 10**9}))
    with pytest.raises(StateError, match=f" {entry} is 1000000000") as caught:
        opened(model, variant)
    assert caught.value.where == str(path)
