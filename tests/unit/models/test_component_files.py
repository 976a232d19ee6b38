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
from tests.support.runs import (
    files,
    opened,
    same,
    train,
)

pytestmark = pytest.mark.usefixtures("tiny")


def test_paths_lists_of_paths_and_model_ids_train_the_same(here: Path) -> None:
    paths = weights_of(here / "model")
    flat = json.dumps([*paths["dit"], paths["text_encoder"], paths["vae"][0]])
    nested = json.dumps([paths["vae"], paths["dit"], paths["text_encoder"][0]])
    mixed = json.dumps([paths["dit"]])
    ids = ",".join(IDS.split(",")[1:])
    ways: dict[str, dict[str, Any]] = {
        "nested": {"model_paths": nested},
        "ids": {"model_paths": None, "model_id_with_origin_paths": IDS},
        "mixed": {"model_paths": mixed, "model_id_with_origin_paths": ids},
    }
    made = [
        files(train(here, output_path=here / name, max_steps=2, **flags))
        for name, flags in ways.items()
    ]
    assert same(made[0], made[1])
    assert same(made[0], made[2])
    with pytest.raises(
        StateError, match="matches none of dit"
    ):  # each path of a flat list is a set of its own
        train(here, output_path=here / "flat", model_paths=flat)


@pytest.mark.parametrize(
    "variable", ["DSTRAIN_MODEL_BASE_PATH", "DIFFSYNTH_MODEL_BASE_PATH"]
)
def test_model_ids_lie_where_the_environment_says(
    variable: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model_base() == Path("models")
    shutil.move("models", "elsewhere")
    flags = {"model_paths": None, "model_id_with_origin_paths": IDS, "max_steps": 1}
    with pytest.raises(
        StateError,
        match=r"models/Tiny/Tiny/transformer/model\*\.safetensors: not all of its files are",
    ):
        train(here, **flags)
    monkeypatch.setenv(variable, str(here / "elsewhere"))
    train(here, **flags)


def test_a_path_that_does_not_exist_is_named(here: Path) -> None:
    paths = [*weights_of(here / "model").values()]
    paths[0] = [str(here / "model/transformer/nothing.safetensors")]
    with pytest.raises(
        StateError, match=r"transformer/nothing\.safetensors: does not exist"
    ):
        train(here, model_paths=json.dumps(paths))


def test_files_that_are_no_component_are_named_with_what_is_in_them(
    model: Path,
) -> None:
    stranger = model / "stranger.safetensors"
    save_file({"conv.weight": torch.zeros(1)}, stranger)
    with pytest.raises(
        StateError,
        match=r"stranger\.safetensors: matches none of dit, text_encoder, vae; .* conv.weight",
    ):
        opened(model, ModelConfig(path=str(stranger)))
    both = {
        **load_file(weights_of(model)["vae"][0]),
        **load_file(weights_of(model)["text_encoder"][0]),
    }
    save_file(both, stranger)
    with pytest.raises(StateError, match="matches text_encoder, vae equally well"):
        opened(model, ModelConfig(path=str(stranger)))
    stranger.write_bytes(b"not a tensor")
    with pytest.raises(StateError, match=r"stranger\.safetensors"):
        opened(model, ModelConfig(path=str(stranger)))


def test_two_sets_of_files_for_one_component_are_refused_naming_both(
    model: Path, tmp_path: Path
) -> None:
    write(tmp_path / "second", seed=1)
    (vae,) = weights_of(tmp_path / "second")["vae"]
    with pytest.raises(
        UsageError,
        match=r"two sets of files match vae: .*model/vae/.* and .*second/vae/",
    ):
        opened(model, ModelConfig(path=vae))
    opened(
        model, ModelConfig(path=weights_of(model)["vae"])
    )  # the same files again are no second set
