"""The files and configurations that a run needs are found, and no others are opened; what
is missing is named with its place.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import ModelConfig, StateError, run
from dstrain.models import find
from safetensors.torch import load_file, save_file

from tests.support.family import COMPONENTS, IDS, MODEL, weights_of
from tests.support.runs import (
    config,
    configs,
    files,
    same,
    train,
)

pytestmark = pytest.mark.usefixtures("tiny")


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
