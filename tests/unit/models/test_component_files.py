"""Model files are found, recognized and opened only where needed; what is missing is
named with its place.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.errors import StateError, UsageError
from dstrain.models.component_files import ModelConfig, find
from dstrain.models.hub import model_base
from dstrain.runs.runner import run
from safetensors.torch import load_file, save_file

from tests.support.family import COMPONENTS, FOLDERS, MODEL, weights_of, write
from tests.support.runs import (
    config,
    configs,
    files,
    opened,
    project_by_id,
    same,
    train,
)

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return project_by_id(tmp_path, monkeypatch)


IDS = ",".join(f"Tiny/Tiny:{folder}/model*.safetensors" for folder in FOLDERS.values())


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


def test_a_component_nobody_gave_is_asked_for(model: Path) -> None:
    with pytest.raises(
        StateError, match="vae: no model files for it on the command line"
    ):
        find(MODEL, configs(model)[:2], ["dit", "vae"])


def test_a_configuration_comes_from_beside_the_header_the_model_id_or_the_shapes(
    here: Path,
) -> None:
    weights = here / "model/transformer"
    content = json.loads((weights / "config.json").read_text())
    by_path = [ModelConfig(path=weights_of(here / "model")["dit"])]
    assert find(MODEL, by_path, ["dit"]).configs["dit"] == content
    (weights / "config.json").unlink()
    assert find(MODEL, by_path, ["dit"]).configs["dit"] == {"width": 8, "depth": 2}
    one = {
        name: value
        for path in weights_of(here / "model")["dit"]
        for name, value in load_file(path).items()
    }
    twice = {name: torch.cat([value, value]) for name, value in one.items()}
    save_file(twice, here / "twice.safetensors")
    with pytest.raises(StateError) as caught:
        find(MODEL, [ModelConfig(path=str(here / "twice.safetensors"))], ["dit"])
    for way in (
        f"{here}/config.json",
        "the shapes do not determine it",
        r"model id (none) is not known",
        "Tiny/Tiny",
    ):
        assert way in str(caught.value)
    by_id = [ModelConfig(None, "Tiny/Tiny", "transformer/model*.safetensors")]
    assert find(MODEL, by_id, ["dit"]).configs["dit"] == content
    (here / "models/Tiny/Tiny/transformer/config.json").unlink()
    assert find(MODEL, by_id, ["dit"]).configs["dit"] == {"width": 8, "depth": 2}
    save_file(
        one,
        here / "alone.safetensors",
        {"config": json.dumps({"width": 8, "depth": 2, "dropout": 0.5})},
    )
    alone = find(MODEL, [ModelConfig(path=str(here / "alone.safetensors"))], ["dit"])
    assert alone.configs["dit"]["dropout"] == 0.5


def test_a_configuration_alone_needs_no_weights(here: Path) -> None:
    shutil.rmtree(here / "models/Tiny/Tiny/transformer")
    by_id = [
        ModelConfig(None, "Tiny/Tiny", "transformer/model*"),
        ModelConfig(None, "Tiny/Tiny", "vae/model*"),
    ]
    found = find(MODEL, by_id, ["vae"], config_only=["dit"])
    assert set(found.files) == {"vae"}
    assert found.configs["dit"] == {"width": 8, "depth": 2}


def test_a_component_may_infer_its_configuration_from_shapes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def infer(shapes: Any) -> dict[str, int] | None:
        return (
            {"width": shapes["embed.weight"][1]} if "embed.weight" in shapes else None
        )

    parts = tuple(
        replace(part, infer=infer) if part.name == "text_encoder" else part
        for part in COMPONENTS
    )
    monkeypatch.setattr("tests.support.family.COMPONENTS", parts)
    (model / "text_encoder/config.json").unlink()
    assert find(MODEL, configs(model), ["text_encoder"]).configs["text_encoder"] == {
        "width": 8
    }


def test_the_tokenizer_is_found_beside_by_id_by_the_default_id_or_by_its_flag(
    here: Path,
) -> None:
    default = here / "models/Tiny/Tiny/tokenizer"
    for name, place in (
        ("beside", here / "model/tokenizer"),
        ("other id", here / "models/Other/One/tokenizer"),
    ):
        shutil.copytree(default, place, dirs_exist_ok=True)
        assert place.is_dir(), name
    shutil.copytree("model/text_encoder", "models/Other/One/text_encoder")

    def tokenizer(*given: ModelConfig) -> Path:
        found = find(MODEL, given, ["text_encoder", "tokenizer"])
        return found.files["tokenizer"].paths[0].resolve()

    by_path = ModelConfig(path=weights_of(here / "model")["text_encoder"])
    by_id = ModelConfig(None, "Other/One", "text_encoder/model*.safetensors")
    assert tokenizer(by_path) == here / "model/tokenizer"
    assert tokenizer(by_id) == here / "models/Other/One/tokenizer"
    alone = find(
        MODEL,
        [ModelConfig(None, "Other/One", "text_encoder/model*.safetensors")],
        ["tokenizer"],
    )
    assert (
        alone.files["tokenizer"].paths[0].resolve()
        == here / "models/Other/One/tokenizer"
    )  # whose files are not read
    flag = ModelConfig(path=str(here / "anything"), component="tokenizer")
    shutil.copytree(default, "anything")
    assert tokenizer(by_path, flag) == here / "anything"
    shutil.rmtree("model/tokenizer")
    shutil.rmtree("models/Other/One/tokenizer")
    assert tokenizer(by_path) == tokenizer(by_id) == default
    shutil.rmtree(default)
    with pytest.raises(
        StateError,
        match=r"tokenizer: not found in .*model/tokenizer.*Tiny/Tiny/tokenizer",
    ) as caught:
        tokenizer(by_path)
    assert "--tokenizer_path" in str(caught.value)


def test_the_tokenizers_flag_reaches_the_run(here: Path) -> None:
    shutil.move("model/tokenizer", "words")
    (here / "words/vocabulary.json").write_text(json.dumps({"offset": 7}))
    shutil.rmtree("models")
    with pytest.raises(StateError, match="tokenizer"):
        train(here, max_steps=1)
    one = files(
        train(
            here,
            max_steps=3,
            output_path=here / "one",
            family_options={"tokenizer_path": "words"},
        )
    )
    (here / "words/vocabulary.json").write_text(json.dumps({"offset": 8}))
    other = files(
        train(
            here,
            max_steps=3,
            output_path=here / "other",
            family_options={"tokenizer_path": "words"},
        )
    )
    assert not same(one, other)


@pytest.mark.parametrize("by_id", [True, False])
@pytest.mark.parametrize("trained", ["dit", "text_encoder"])
def test_a_stage_never_opens_the_files_it_does_not_need(
    trained: str, by_id: bool, here: Path
) -> None:
    flags: dict[str, Any] = {
        "feature_cache": here / "cache",
        "trainable_models": trained,
        "max_steps": 2,
    }
    if by_id:
        flags |= {"model_paths": None, "model_id_with_origin_paths": IDS}
    else:
        flags |= {"model_paths": json.dumps([*weights_of(here / "model").values()])}
    place = here / ("models/Tiny/Tiny" if by_id else "model")
    whole = files(train(here, output_path=here / "whole", **flags))
    needed = {
        "sft:data_process": {"vae"},
        "sft:train": {"transformer", "text_encoder", "tokenizer"},
    }
    if trained == "dit":
        needed = {
            "sft:data_process": {"vae", "text_encoder", "tokenizer"},
            "sft:train": {"transformer"},
        }
    shutil.move(place, "kept")
    if not by_id:
        shutil.rmtree("models")
    for stage, parts in needed.items():
        for part in parts:
            shutil.copytree(Path("kept") / part, place / part)
        run(config(here, task=stage, **flags))
        shutil.rmtree(place)
        shutil.rmtree("data", ignore_errors=True)
    assert same(whole, files(here / "out"))
