"""--model_id stands for the files that the long options name, and for no other."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import ModelConfig, StateError, TrainConfig, UsageError, run
from dstrain.errors import MissingFiles
from dstrain.models.naming import model_configs, named_files
from safetensors.torch import load_file, save_file

from tests.support.family import IDS, MODEL, weights_of, write
from tests.support.hub_server import TINY, Hub
from tests.support.runs import config, files, outcome, same, train

pytestmark = pytest.mark.usefixtures("tiny")


def configs(**named: Any) -> tuple[ModelConfig, ...]:
    return model_configs(TrainConfig(model="tiny", **named), MODEL)


@pytest.mark.parametrize("revision", ["", "@v1.0"])
@pytest.mark.parametrize("hub", ["modelscope", "huggingface"])
def test_a_published_id_is_the_files_of_the_long_option(
    revision: str, hub: str
) -> None:
    long = IDS.replace("Tiny/Tiny:", f"Tiny/Tiny{revision}:")
    named = configs(model_id=f"Tiny/Tiny{revision}", hub=hub)
    assert named == configs(model_id_with_origin_paths=long, hub=hub)
    assert len(named) == 3


def test_files_of_another_model_do_not_have_the_revision() -> None:
    files = {"dit": "transformer/*", "vae": "Tiny/Tiny:vae/*"}
    family = replace(MODEL, model_files={"Tiny/Second": files})
    dit, vae = named_files(
        TrainConfig(model="tiny", model_id="Tiny/Second@v2"), family, None
    )
    assert (dit.model_id, dit.revision) == ("Tiny/Second", "v2")
    assert (vae.model_id, vae.revision) == ("Tiny/Tiny", "")


def test_an_id_that_is_not_listed_is_expected_in_the_folders_of_diffusers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "dstrain"):
        named = configs(model_id="Tiny/Tinny")
    assert [one.pattern for one in named] == [
        f"{place}/*.safetensors" for place in ("transformer", "text_encoder", "vae")
    ]
    assert "does not list Tiny/Tinny" in caplog.text
    assert "did you mean 'Tiny/Tiny'" in caplog.text
    caplog.clear()
    configs(model_id="Tiny/Tiny")
    assert not caplog.text


@pytest.mark.parametrize(
    ("flag", "value", "model"),
    [
        ("model_id", "Tiny/Animated", "Animated"),
        ("model_id", "Tiny/Animated@v2", "Animated"),
        (
            "model_id_with_origin_paths",
            f"{IDS},Tiny/Animated:model*.safetensors",
            "Animated",
        ),
        ("model_id_with_origin_paths", f"{IDS},Tiny/Tiny:extra/face.bin", "Faces"),
        ("extra_inputs", "face_image", "Faces"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_by_name(
    flag: str,
    value: str,
    model: str,
    here: Path,
    server: Hub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {
        "Animated": ("Tiny/Animated",),
        "Faces": ("Tiny/Tiny:extra/*", "face_*"),
    }
    family = replace(MODEL, unsupported_models=known)
    assert family.knows("Tiny/Animated")
    monkeypatch.setattr("dstrain.runs.resolve.load_family", lambda *_: family)
    given = {flag: value} if flag != "extra_inputs" else {flag: value, "model_id": TINY}
    with pytest.raises(UsageError, match=f"--{flag}: {model} is not supported yet"):
        run(config(here, model_paths=None, **given, dry_run=True))
    assert server.requests == []


def test_a_folder_is_the_files_of_the_long_option(here: Path) -> None:
    paths = json.dumps(list(weights_of(Path("model")).values()))
    assert configs(model_id="./model") == configs(model_paths=paths)


def test_the_four_ways_train_the_same_and_share_a_cache(here: Path) -> None:
    long = train(here, output_path=here / "long", max_steps=2)
    write(here / "flat")
    for name, paths in weights_of(here / "flat").items():
        weights = {key: one for path in paths for key, one in load_file(path).items()}
        settings = (here / f"flat/{Path(paths[0]).parent.name}/config.json").read_text()
        header = {"family": "tiny", "component": name, "config": settings}
        save_file(weights, here / f"flat/{name}.safetensors", header)
        shutil.rmtree(Path(paths[0]).parent)
    encoders = json.dumps(
        [weights_of(here / "model")[one] for one in ("text_encoder", "vae")]
    )
    ways: dict[str, dict[str, Any]] = {
        "id": {"model_id": "Tiny/Tiny"},
        "folder": {"model_id": "model"},
        "flat": {"model_id": str(here / "flat")},
        "file": {"model_id": "flat/dit.safetensors", "model_paths": encoders},
    }
    cache = {"feature_cache": here / "cache", "model_paths": None}
    run(config(here, task="sft:data_process", **cache, **ways["id"]))
    plans = sorted((here / "cache").rglob("*"))
    for name, flags in ways.items():
        flags = {"model_paths": None, **flags, "max_steps": 2}
        whole = train(here, output_path=here / f"{name}-whole", **flags)
        assert same(files(whole), files(long)), name
        if name == "flat":
            continue  # its files have other bytes, and so other keys
        stage_2 = {**flags, "task": "sft:train", "feature_cache": here / "cache"}
        split = train(here, output_path=here / f"{name}-split", **stage_2)
        assert same(outcome(split)["files"], files(long)), name
        run(config(here, **{**stage_2, "task": "sft:data_process"}))
    # The same plan and the same values, whatever the files are named by.
    assert sorted((here / "cache").rglob("*")) == plans


def test_one_file_lacks_the_others_and_says_which(here: Path) -> None:
    save_file(
        {
            key: one
            for path in weights_of(here / "model")["dit"]
            for key, one in load_file(path).items()
        },
        here / "dit.safetensors",
    )
    with pytest.raises(
        StateError, match="text_encoder, vae: no model files for them"
    ) as caught:
        train(here, model_paths=None, model_id="dit.safetensors", max_steps=1)
    assert "name a whole model with --model_id" in caught.value.help_lines[0]


def test_only_the_files_that_a_stage_needs_are_downloaded(
    server: Hub, hub: str, tmp_path: Path
) -> None:
    flags = {
        "model_paths": None,
        "model_id": TINY,
        "hub": hub,
        "feature_cache": tmp_path / "cache",
    }
    run(config(tmp_path, task="sft:data_process", **flags))
    assert not [path for path in server.fetched if "transformer/model" in path]
    server.forget()
    train(tmp_path, task="sft:train", max_steps=1, **flags)
    assert {path for path in server.fetched if path.endswith(".safetensors")} == {
        f"transformer/model-{i}-of-2.safetensors" for i in (1, 2)
    }


def test_a_revision_is_downloaded(server: Hub, hub: str, tmp_path: Path) -> None:
    write(tmp_path / "other", seed=5)
    server.add(TINY, tmp_path / "other", "v2")
    flags = {"model_paths": None, "hub": hub, "max_steps": 1}
    second = train(
        tmp_path, output_path=tmp_path / "v2", model_id=f"{TINY}@v2", **flags
    )
    first = train(
        tmp_path,
        output_path=tmp_path / "v1",
        model_id=f"{TINY}@main" if hub == "huggingface" else f"{TINY}@master",
        **flags,
    )
    assert not same(files(first), files(second))
    long = IDS.replace("Tiny/Tiny:", "Tiny/Tiny@v2:")
    again = train(
        tmp_path, output_path=tmp_path / "v3", model_id_with_origin_paths=long, **flags
    )
    assert same(files(again), files(second))


def test_planning_asks_no_hub(server: Hub, tmp_path: Path) -> None:
    run(config(tmp_path, model_paths=None, model_id=TINY, dry_run=True))
    assert server.requests == []


def test_a_mistyped_id_is_no_model_of_the_hub(
    server: Hub, hub: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "dstrain"),
        pytest.raises(StateError, match="Tiny/Tinny"),
    ):
        train(tmp_path, model_paths=None, model_id="Tiny/Tinny", hub=hub, max_steps=1)
    assert "did you mean 'Tiny/Tiny'" in caplog.text


def test_what_does_not_exist_is_refused_in_a_dry_run_too(here: Path) -> None:
    with pytest.raises(MissingFiles, match="nowhere: does not exist"):
        run(config(here, model_paths=None, model_id="./nowhere", dry_run=True))
    (here / "Tiny/Tiny").mkdir(parents=True)
    with pytest.raises(UsageError, match="a published model and the path of a folder"):
        run(config(here, model_paths=None, model_id="Tiny/Tiny", dry_run=True))
