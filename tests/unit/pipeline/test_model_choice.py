"""A script names a model by one word, by its files, or by both."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import (
    GenerateConfig,
    ModelConfig,
    Pipeline,
    TrainConfig,
    UsageError,
    generate,
    run,
)
from dstrain.errors import MissingFiles
from safetensors.torch import load_file, save_file

from tests.support.family import weights_of, write
from tests.support.runs import configs, project_by_id, same

pytestmark = pytest.mark.usefixtures("tiny")


def weights(pipe: Pipeline) -> dict[str, Any]:
    return {
        name: dict(one.state_dict())
        for name, one in pipe.components.items()
        if isinstance(one, torch.nn.Module)
    }


def test_a_model_in_one_word_is_that_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = project_by_id(tmp_path, monkeypatch)
    listed = Pipeline.from_pretrained("tiny", configs(here / "model"))
    for word in ("Tiny/Tiny", str(here / "model"), here / "model"):
        pipe = Pipeline.from_pretrained(word)
        assert pipe.family.name == "tiny"
        assert same(weights(pipe), weights(listed))
    by_files = Pipeline.from_pretrained(model_configs=configs(here / "model"))
    assert same(weights(by_files), weights(listed))


def test_a_configuration_gets_the_family_that_its_model_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = project_by_id(tmp_path, monkeypatch)
    own = {"dataset_base_path": here / "data", "output_path": here / "out"}
    result = run(TrainConfig(model_id="Tiny/Tiny", lora_rank=2, max_steps=1, **own))
    assert result.step == 1
    folder = {"model_id": here / "model", "dry_run": True, "overwrite": True}
    assert run(TrainConfig(**folder, **own)).folder == here / "out"
    with pytest.raises(UsageError, match="--model_id: expected text, got 3"):
        run(TrainConfig(**{**folder, "model_id": 3}, **own))
    image = here / "dog.png"
    generate(GenerateConfig(run=here / "out", prompt="dog", output=image))
    assert image.is_file()
    with pytest.raises(UsageError, match="--model: is required"):
        run(TrainConfig(toy=True, **own))


def test_files_replace_those_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = project_by_id(tmp_path, monkeypatch)
    (own,) = weights_of(here / "model")["vae"]
    changed = {name: weight + 1 for name, weight in load_file(own).items()}
    place = tmp_path / "vae"
    place.mkdir()
    save_file(changed, place / "own.safetensors")
    (place / "config.json").write_bytes(Path(own).with_name("config.json").read_bytes())
    config = ModelConfig([place / "own.safetensors"])
    found = weights(Pipeline.from_pretrained("Tiny/Tiny", [config]))
    assert same(dict(sorted(found["vae"].items())), dict(sorted(changed.items())))
    plain = weights(Pipeline.from_pretrained("Tiny/Tiny"))
    assert same(found["dit"], plain["dit"])


def test_a_tokenizer_may_be_given_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = project_by_id(tmp_path, monkeypatch)
    tokenizer = ModelConfig(model_id="Tiny/Tiny", origin_file_pattern="tokenizer/")
    pipe = Pipeline.from_pretrained(
        "tiny", configs(here / "model"), tokenizer_config=tokenizer
    )
    assert pipe.files["tokenizer"].paths == (Path("models/Tiny/Tiny/tokenizer"),)
    folder: Any = "tokenizer"
    with pytest.raises(UsageError, match=r"tokenizer_config: .*\n.*ModelConfig\('tok"):
        Pipeline.from_pretrained("Tiny/Tiny", tokenizer_config=folder)
    with pytest.raises(UsageError, match="processor_config: tiny has no component"):
        Pipeline.from_pretrained("Tiny/Tiny", processor_config=replace(tokenizer))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "no model is given"),
        (("tiny",), "'tiny' is a family, and no files of a model are given"),
        ((3,), "expected the name of a model, got 3"),
        (("tiny", ModelConfig("a")), "expected a list of ModelConfig"),
        (("tiny", ["a.safetensors"]), "expected ModelConfig, got 'a.safetensors'"),
        (("Tiny/Tinny",), "did you mean 'Tiny/Tiny'"),
        ((Path("nowhere/tiny"),), "nowhere/tiny"),
        (("tiny", [ModelConfig()]), "model_configs: .* names no files"),
        (("tiny", [ModelConfig("a", component="vaee")]), "no component 'vaee'.*'vae'"),
    ],
)
def test_what_names_no_model_is_refused(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Pipeline.from_pretrained(*given)


def test_an_unlisted_model_is_said_to_be_named_as_a_script_does() -> None:
    with pytest.raises(UsageError, match="no installed family lists") as caught:
        Pipeline.from_pretrained("Nobody/Nothing-1")
    (advice,) = caught.value.help_lines
    assert "; name the family instead, with its files as model_configs, for" in advice
    assert "--model" not in advice


def test_what_replaces_no_file_is_said_without_a_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = project_by_id(tmp_path, monkeypatch)
    with pytest.raises(MissingFiles, match="beside model it must be here"):
        Pipeline.from_pretrained(here / "model", [ModelConfig("nowhere")])


def test_a_model_config_takes_a_file_or_a_list_by_position(tmp_path: Path) -> None:
    write(tmp_path)
    (file,) = weights_of(tmp_path)["vae"]
    for one in (ModelConfig(file), ModelConfig(Path(file)), ModelConfig([file])):
        assert one.files().paths == (Path(file),)
        assert replace(one) == one
    number: Any = 3
    with pytest.raises(UsageError, match=r"ModelConfig: path: expected a file .*got 3"):
        ModelConfig(number)
