"""Given model files are found and recognized; what is missing or doubtful is named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import ModelConfig, StateError, UsageError
from dstrain.models.hub import model_base
from safetensors.torch import load_file, save_file

from tests.support.family import IDS, weights_of, write
from tests.support.runs import files, opened, same, train

pytestmark = pytest.mark.usefixtures("tiny")
ORIGINS = "model_id_with_origin_paths"


def test_paths_lists_of_paths_and_model_ids_train_the_same(here: Path) -> None:
    paths = weights_of(here / "model")
    nested = [paths["vae"], paths["dit"], paths["text_encoder"][0]]
    ids = ",".join(IDS.split(",")[1:])
    ways: dict[str, dict[str, Any]] = {
        "nested": {"model_paths": json.dumps(nested)},
        "ids": {"model_paths": None, ORIGINS: IDS},
        "mixed": {"model_paths": json.dumps([paths["dit"]]), ORIGINS: ids},
    }
    first, *others = (
        files(train(here, output_path=here / name, max_steps=2, **flags))
        for name, flags in ways.items()
    )
    assert all(same(first, other) for other in others)
    # Each path of a flat list is a set of its own.
    flat = json.dumps([*paths["dit"], paths["text_encoder"], paths["vae"][0]])
    with pytest.raises(StateError, match=r"model-\d-of-2\.safetensors: .* dit"):
        train(here, output_path=here / "flat", model_paths=flat)
    paths["dit"] = [str(here / "model/transformer/nothing.safetensors")]
    with pytest.raises(StateError, match=r"transformer/nothing\.safetensors: "):
        train(here, model_paths=json.dumps(list(paths.values())))


@pytest.mark.parametrize("tool", ["DSTRAIN", "DIFFSYNTH"])
def test_model_ids_lie_where_the_environment_says(
    tool: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model_base() == Path("models")
    shutil.move("models", "elsewhere")
    flags = {"model_paths": None, ORIGINS: IDS, "max_steps": 1}
    with pytest.raises(StateError) as caught:
        train(here, **flags)
    assert caught.value.where == "models/Tiny/Tiny/transformer/model*.safetensors"
    monkeypatch.setenv(f"{tool}_MODEL_BASE_PATH", str(here / "elsewhere"))
    train(here, **flags)


def test_files_that_are_no_component_are_named_with_what_is_in_them(
    model: Path,
) -> None:
    stranger = model / "stranger.safetensors"
    given = ModelConfig(stranger)
    save_file({"conv.weight": torch.zeros(1)}, stranger)
    words = r"stranger\.safetensors: .*"
    with pytest.raises(StateError, match=rf"{words}dit, text_encoder, vae; .* conv\."):
        opened(model, given)
    names = ("vae", "text_encoder")
    both = [load_file(weights_of(model)[name][0]) for name in names]
    save_file({**both[0], **both[1]}, stranger)
    with pytest.raises(StateError, match=rf"{words}text_encoder, vae "):
        opened(model, given)
    stranger.write_bytes(b"not a tensor")
    with pytest.raises(StateError, match=words):
        opened(model, given)


def test_two_sets_of_files_for_one_component_are_refused_naming_both(
    model: Path, tmp_path: Path
) -> None:
    write(tmp_path / "second", seed=1)
    (vae,) = weights_of(tmp_path / "second")["vae"]
    with pytest.raises(UsageError, match=r"vae: .*model/vae/.* and .*second/vae/"):
        opened(model, ModelConfig(vae))
    # The same files again are no second set.
    opened(model, ModelConfig(weights_of(model)["vae"]))
