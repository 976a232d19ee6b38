"""Files of the long options take the place of those of --model_id, and never silently of
others.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import ModelConfig, StateError, TrainConfig, UsageError
from dstrain.errors import MissingFiles
from dstrain.models.naming import model_configs, without_replaced
from dstrain.models.naming.folders import Part
from safetensors.torch import load_file, save_file

from tests.support.family import COMPONENTS, MODEL, weights_of, write
from tests.support.runs import files, same, train

pytestmark = pytest.mark.usefixtures("tiny")


def configs(**named: Any) -> list[ModelConfig]:
    return list(model_configs(TrainConfig(model="tiny", **named), MODEL, offline=True))


@pytest.fixture
def tuned(here: Path) -> dict[str, list[str]]:
    """Component -> files of other weights than the model's, in folders that tell nothing."""
    write(here / "second", seed=7)
    found = {}
    for name, paths in weights_of(here / "second").items():
        place = here / f"tuned-{name}"
        shutil.copytree(Path(paths[0]).parent, place)
        found[name] = sorted(map(str, place.glob("*.safetensors")))
    return found


@pytest.mark.parametrize("model_id", ["Tiny/Tiny", "model"])
def test_a_tuned_denoiser_replaces_that_of_the_model(
    model_id: str, here: Path, tuned: dict[str, list[str]]
) -> None:
    both = {"model_id": model_id, "model_paths": json.dumps([tuned["dit"]])}
    dit, *others = configs(**both)
    assert list(dit.path or ()) == tuned["dit"]
    assert others == configs(model_id=model_id)[1:]
    long = json.dumps([tuned["dit"], *list(weights_of(here / "model").values())[1:]])
    ways: dict[str, dict[str, Any]] = {"short": both, "long": {"model_paths": long}}
    made = [
        files(train(here, output_path=here / name, max_steps=2, **flags))
        for name, flags in ways.items()
    ]
    assert same(made[0], made[1])
    plain = train(here, output_path=here / "plain", max_steps=2)
    assert not same(made[0], files(plain))


def test_published_files_replace_by_their_place_alone(here: Path) -> None:
    shutil.rmtree("models")
    other = "Tiny/Second:vae/model*.safetensors"
    found = configs(model_id="Tiny/Tiny", model_id_with_origin_paths=other)
    assert [one.model_id for one in found] == ["Tiny/Tiny", "Tiny/Tiny", "Tiny/Second"]
    with pytest.raises(
        UsageError, match=r"some\.safetensors does not tell by its place"
    ):
        configs(
            model_id="Tiny/Tiny",
            model_id_with_origin_paths="Tiny/Second:some.safetensors",
        )


def test_a_file_that_is_not_here_could_replace_any_and_is_refused(here: Path) -> None:
    with pytest.raises(
        MissingFiles, match=r"typo\.safetensors: does not exist"
    ) as caught:
        configs(model_id="Tiny/Tiny", model_paths='["typo.safetensors"]')
    assert "which component it replaces" in caught.value.help_lines[0]


def test_what_is_no_component_is_refused(here: Path) -> None:
    stranger = {
        "conv.weight": load_file(weights_of(here / "model")["vae"][0]).popitem()[1]
    }
    save_file(stranger, here / "stranger.safetensors")
    with pytest.raises(StateError, match="matches none of"):
        configs(model_id="Tiny/Tiny", model_paths='["stranger.safetensors"]')
    with pytest.raises(StateError, match="matches none of"):
        train(here, model_paths=None, model_id="stranger.safetensors")


def test_a_folder_with_several_files_for_one_component_needs_the_right_one_named(
    here: Path,
) -> None:
    folder = here / "model/vae"
    shutil.copy(folder / "model-1-of-1.safetensors", folder / "second.safetensors")
    with pytest.raises(UsageError, match="several files that can be vae"):
        configs(model_id="model")
    right = [str(folder / "second.safetensors")]
    found = configs(model_id="model", model_paths=json.dumps([right]))
    assert [list(one.path or ()) for one in found if "vae" in str(one.path)] == [right]


def two_experts(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """Give the family a second expert; returns the parts of a model with both."""
    second = replace(COMPONENTS[0], name="dit2", folder="transformer_2")
    monkeypatch.setattr("tests.support.family.COMPONENTS", (*COMPONENTS, second))
    return [Part(ModelConfig(f"of-{name}"), (name,)) for name in ("dit", "dit2", "vae")]


def test_one_of_two_experts_must_be_told_apart(
    here: Path, tuned: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = two_experts(monkeypatch)
    one = ModelConfig(tuned["dit"])
    with pytest.raises(UsageError, match="can be dit or dit2, so that it is open"):
        without_replaced(parts, [one], MODEL)
    # Both are taken in their order, and a model with one expert leaves no doubt.
    shutil.copytree("tuned-dit", "again")
    again = ModelConfig([path.replace("tuned-dit", "again") for path in tuned["dit"]])
    assert without_replaced(parts, [one, again], MODEL) == [parts[2].config]
    assert without_replaced([parts[0], parts[2]], [one], MODEL) == [parts[2].config]
    # So does a folder's name.
    shutil.move("tuned-dit", "transformer_2")
    placed = ModelConfig(
        [path.replace("tuned-dit", "transformer_2") for path in tuned["dit"]]
    )
    kept = without_replaced(parts, [placed], MODEL)
    assert kept == [parts[0].config, parts[2].config]
