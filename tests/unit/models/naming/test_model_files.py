"""--model_id stands for the files that the long options name, and for no other."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import ModelConfig, StateError, TrainConfig, UsageError, run
from dstrain.errors import MissingFiles
from dstrain.models.naming import model_configs, parts_of, without_replaced
from safetensors.torch import load_file, save_file

from tests.support.family import COMPONENTS, IDS, MODEL, weights_of, write
from tests.support.hub_server import TINY, Hub
from tests.support.runs import config, files, outcome, same, train

pytestmark = pytest.mark.usefixtures("tiny")
ORIGINS = "model_id_with_origin_paths"


def configs(offline: bool = True, **named: Any) -> list[ModelConfig]:
    return list(model_configs(TrainConfig(model="tiny", **named), MODEL, offline))


def joined(paths: list[str]) -> dict[str, Any]:
    """The weights of all shards."""
    return {key: one for path in paths for key, one in load_file(path).items()}


@pytest.mark.parametrize("revision", ["", "@v1.0"])
@pytest.mark.parametrize("hub", ["modelscope", "huggingface"])
def test_a_published_id_is_files_of_the_long_option(revision: str, hub: Any) -> None:
    long = IDS.replace("Tiny/Tiny:", f"Tiny/Tiny{revision}:")
    named = configs(False, hub=hub, model_id=f"Tiny/Tiny{revision}")
    assert named == configs(False, hub=hub, **{ORIGINS: long})
    assert [one.hub for one in named] == [hub] * 3


@pytest.mark.parametrize(
    "value", ["/gone/model:1/words", "Tiny/Tiny:words/,Tiny/Other:words/", "gone:words"]
)
def test_what_is_not_one_folder_of_a_published_model_is_a_path(value: str) -> None:
    """With a flag for a component."""
    (given,) = configs(family_options={"tokenizer_path": value})
    with pytest.raises(MissingFiles) as caught:
        given.files()
    assert caught.value.where == value


UNSUPPORTED = replace(
    MODEL,
    name="unsupporting",
    unsupported_models={
        "Animated": ("Tiny/Animated",),
        "Faces": ("Tiny/Tiny:extra/*", "face_*"),
    },
)


@pytest.mark.parametrize(
    ("flag", "value", "model"),
    [
        ("model_id", "Tiny/Animated", "Animated"),
        ("model_id", "Tiny/Animated@v2", "Animated"),
        (ORIGINS, f"{IDS},Tiny/Animated:model*.safetensors", "Animated"),
        (ORIGINS, f"{IDS},Tiny/Tiny:extra/face.bin", "Faces"),
        ("extra_inputs", "face_image", "Faces"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_by_name(
    flag: str,
    value: str,
    model: str,
    server: Hub,
    tmp_path: Path,
    fake_plugin: Callable[..., Path],
) -> None:
    fake_plugin("plugin-un", {"unsupporting": f"{__name__}:UNSUPPORTED"}, {})
    assert UNSUPPORTED.knows("Tiny/Animated")
    given = {"model": "unsupporting", "model_paths": None, flag: value}
    if flag == "extra_inputs":
        given["model_id"] = TINY
    with pytest.raises(UsageError, match=f"--{flag}: {model} "):
        run(config(tmp_path, **given, dry_run=True))
    assert server.requests == []


def test_the_four_ways_train_the_same_and_share_a_cache(here: Path) -> None:
    paths = json.dumps(list(weights_of(Path("model")).values()))
    assert configs(model_id="./model") == configs(model_paths=paths)
    long = files(train(here, output_path=here / "long", max_steps=2))
    write(here / "flat")
    for name, shards in weights_of(here / "flat").items():
        folder = Path(shards[0]).parent
        settings = (folder / "config.json").read_text()
        header = {"family": "tiny", "component": name, "config": settings}
        save_file(joined(shards), here / f"flat/{name}.safetensors", header)
        shutil.rmtree(folder)
    encoders = [weights_of(here / "model")[one] for one in ("text_encoder", "vae")]
    ways: dict[str, dict[str, Any]] = {
        "id": {"model_id": "Tiny/Tiny"},
        "folder": {"model_id": "model"},
        "flat": {"model_id": str(here / "flat")},
        "file": {
            "model_id": "flat/dit.safetensors",
            "model_paths": json.dumps(encoders),
        },
    }
    cache = {"feature_cache": here / "cache", "model_paths": None}
    run(config(here, task="sft:data_process", **cache, **ways["id"]))
    plans = sorted((here / "cache").rglob("*"))
    for name, flags in ways.items():
        flags = {"model_paths": None, **flags, "max_steps": 2}
        whole = train(here, output_path=here / f"{name}-whole", **flags)
        assert same(files(whole), long), name
        if name == "flat":
            continue  # its files have other bytes, and so other keys
        stage_2 = {**flags, "task": "sft:train", "feature_cache": here / "cache"}
        split = train(here, output_path=here / f"{name}-split", **stage_2)
        assert same(outcome(split)["files"], long), name
        run(config(here, **{**stage_2, "task": "sft:data_process"}))
    # The same plan and the same values, whatever the files are named by.
    assert sorted((here / "cache").rglob("*")) == plans


def test_what_does_not_exist_is_refused_in_a_dry_run_too(here: Path) -> None:
    with pytest.raises(MissingFiles, match="nowhere: "):
        run(config(here, model_paths=None, model_id="./nowhere", dry_run=True))
    (here / "Tiny/Tiny").mkdir(parents=True)
    with pytest.raises(UsageError, match="--model_id: Tiny/Tiny "):
        run(config(here, model_paths=None, model_id="Tiny/Tiny", dry_run=True))


@pytest.fixture
def tuned(here: Path) -> list[str]:
    """Files of another denoiser than the model's, in a folder that tells nothing."""
    write(here / "second", seed=7)
    shutil.copytree("second/transformer", "tuned")
    return sorted(map(str, (here / "tuned").glob("*.safetensors")))


@pytest.mark.parametrize("model_id", ["Tiny/Tiny", "model"])
def test_a_tuned_denoiser_replaces_that_of_the_model(
    model_id: str, here: Path, tuned: list[str]
) -> None:
    both = {"model_id": model_id, "model_paths": json.dumps([tuned])}
    dit, *others = configs(**both)
    assert list(dit.path or ()) == tuned
    assert others == configs(model_id=model_id)[1:]
    long = json.dumps([tuned, *list(weights_of(here / "model").values())[1:]])
    ways = {"short": both, "long": {"model_paths": long}, "plain": {}}
    short, whole, plain = (
        files(train(here, output_path=here / name, max_steps=2, **flags))
        for name, flags in ways.items()
    )
    assert same(short, whole)
    assert not same(short, plain)


def test_published_files_replace_by_their_place_alone(here: Path) -> None:
    shutil.rmtree("models")
    given: dict[str, Any] = {"model_id": "Tiny/Tiny"}
    found = configs(**given, **{ORIGINS: "Tiny/Second:vae/model*.safetensors"})
    assert [one.model_id for one in found] == ["Tiny/Tiny", "Tiny/Tiny", "Tiny/Second"]
    with pytest.raises(UsageError, match=rf"--{ORIGINS}: \S+:some\.safetensors"):
        configs(**given, **{ORIGINS: "Tiny/Second:some.safetensors"})


def test_a_file_that_is_not_here_or_is_no_component_is_refused(here: Path) -> None:
    with pytest.raises(MissingFiles, match=r"typo\.safetensors: "):
        configs(model_id="Tiny/Tiny", model_paths='["typo.safetensors"]')
    (vae,) = weights_of(here / "model")["vae"]
    stranger = {"conv.weight": load_file(vae).popitem()[1]}
    save_file(stranger, here / "stranger.safetensors")
    with pytest.raises(StateError, match=r"stranger\.safetensors: "):
        configs(model_id="Tiny/Tiny", model_paths='["stranger.safetensors"]')
    with pytest.raises(StateError, match=r"stranger\.safetensors: "):
        train(here, model_paths=None, model_id="stranger.safetensors")


def test_of_several_files_for_a_component_one_is_named(here: Path) -> None:
    second = here / "model/vae/second.safetensors"
    shutil.copy(here / "model/vae/model-1-of-1.safetensors", second)
    with pytest.raises(UsageError, match=r"--model_id: .* vae: "):
        configs(model_id="model")
    right = json.dumps([[str(second)]])
    found = configs(model_id="model", model_paths=right)
    names = [list(one.path or ()) for one in found if "vae" in str(one.path)]
    assert names == [[str(second)]]


TWO = (*COMPONENTS, replace(COMPONENTS[0], name="dit2", folder="transformer_2"))
OF_TWO = replace(MODEL, components=f"{__name__}:TWO")


def test_one_of_two_experts_must_be_told_apart(here: Path, tuned: list[str]) -> None:
    def moved(place: str) -> ModelConfig:
        return ModelConfig([one.replace("/tuned/", f"/{place}/") for one in tuned])

    shutil.copytree("model/transformer", "model/transformer_2")
    dit, dit2, _, vae = parts = sorted(
        parts_of("model", OF_TWO, None), key=lambda part: part.components
    )
    parts = [dit, dit2, vae]
    one = moved("tuned")
    with pytest.raises(UsageError, match=r"--model_id: .* dit or dit2"):
        without_replaced(parts, [one], OF_TWO)
    # A model with one expert leaves no doubt.
    assert without_replaced([dit, vae], [one], OF_TWO) == [vae.config]
    # So does a folder's name.
    shutil.move("tuned", "transformer_2")
    kept = without_replaced(parts, [moved("transformer_2")], OF_TWO)
    assert kept == [dit.config, vae.config]
