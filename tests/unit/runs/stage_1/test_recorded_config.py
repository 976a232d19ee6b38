"""The flags that a plan records make the same run of stage 1."""

import json
from pathlib import Path
from typing import Any

import pytest
from dstrain import TrainConfig
from dstrain.errors import CacheError
from dstrain.runs.stage_1.recorded_config import config_of, recorded_flags

GIVEN: dict[str, Any] = {
    "model": "tiny",
    "task": "sft:data_process",
    "dataset_base_path": Path("/data"),
    "dataset_root": (Path("/a"), Path("/b")),
    "feature_cache": Path("/cache"),
    "max_pixels": 4096,
    "learning_rate": 1e-2,
    "preview_prompt": ("a dog", "a cat"),
    "family_options": {"tokenizer_path": "/tokenizer"},
    "disabled_plugins": ("other",),
}


def again(recorded: dict[str, Any], **places: Any) -> TrainConfig:
    record = {"about": {"config": recorded}}
    return config_of(record, Path("plan"), Path("/cache"), **places)


def test_what_is_recorded_is_the_same_configuration() -> None:
    config = TrainConfig(**GIVEN)
    assert again(recorded_flags(config)) == config


def test_what_a_recipe_sets_is_recorded_as_if_it_were_typed() -> None:
    recorded = recorded_flags(TrainConfig(**GIVEN, recipe="tiny-style-24gb"))
    assert recorded == recorded_flags(TrainConfig(**GIVEN))


def test_only_what_is_not_a_default_and_no_place_of_output_is_recorded() -> None:
    config = TrainConfig(**GIVEN, output_path=Path("out"), overwrite=True, dry_run=True)
    recorded = recorded_flags(config)
    left_out = {"feature_cache", "family_options", "disabled_plugins"}
    assert recorded.keys() == (GIVEN.keys() - left_out) | {"p", "tokenizer_path"}


def test_folders_of_the_dataset_are_recorded_as_absolute_paths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded = recorded_flags(TrainConfig(model="tiny", dataset_base_path=Path("data")))
    assert recorded["dataset_base_path"] == str(tmp_path / "data")


def test_places_replace_recorded_ones() -> None:
    recorded = recorded_flags(TrainConfig(**GIVEN))
    there = again(recorded, dataset_base_path=Path("/there"), model_paths="[]")
    assert there.dataset_base_path == Path("/there")
    assert there.model_paths == "[]"


@pytest.mark.parametrize(
    "recorded", [{}, {"model": "tiny", "dataset_root": 3}, {"task": "sft"}]
)
def test_flags_that_are_not_recorded_or_unusable_are_named(
    recorded: dict[str, Any],
) -> None:
    with pytest.raises(CacheError, match=r"plan: (does not record|records) "):
        again(recorded)


def test_a_secret_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cr3t-s3cr3t")
    config = TrainConfig(model="tiny", model_paths='["/s3cr3t-s3cr3t/x"]')
    assert "s3cr3t" not in str(recorded_flags(config))


@pytest.mark.usefixtures("tiny")
def test_paths_of_models_are_recorded_as_absolute_paths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(
        model="tiny",
        model_paths='["vae", ["../a", "/b"]]',
        model_id_with_origin_paths="Tiny/Tiny:vae/*",
        offload_models="vae,dit",
        preset_lora_path=Path("lora"),
        family_options={"tokenizer_path": "tokenizer"},
    )
    recorded = recorded_flags(config)
    here, above = str(tmp_path), str(tmp_path.parent)
    assert json.loads(recorded["model_paths"]) == [f"{here}/vae", [f"{above}/a", "/b"]]
    assert recorded["offload_models"] == f"{here}/vae,dit"
    assert recorded["preset_lora_path"] == f"{here}/lora"
    assert recorded["tokenizer_path"] == f"{here}/tokenizer"
    assert recorded["model_id_with_origin_paths"] == "Tiny/Tiny:vae/*"


@pytest.mark.usefixtures("tiny")
def test_a_model_named_in_one_word_is_recorded_so_that_it_means_the_same_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my/model").mkdir(parents=True)
    for given, recorded in (
        ("my/model", str(tmp_path / "my/model")),
        ("Tiny/Tiny@v1", "Tiny/Tiny@v1"),
    ):
        config = TrainConfig(model="tiny", model_id=given)
        assert recorded_flags(config)["model_id"] == recorded


def test_a_model_given_in_place_of_the_recorded_one_is_the_whole_model() -> None:
    recorded = {"model": "tiny", "model_paths": '["a"]', "model_id": "Tiny/Tiny"}
    record = {"about": {"config": recorded}}
    moved = config_of(record, Path("plan"), Path("cache"), model_id="elsewhere")
    assert (moved.model_id, moved.model_paths) == ("elsewhere", None)
    replaced = config_of(record, Path("plan"), Path("cache"), model_paths='["b"]')
    assert (replaced.model_id, replaced.model_paths) == ("Tiny/Tiny", '["b"]')


def test_an_option_of_a_family_that_is_no_path_stays() -> None:
    config = TrainConfig(model="tiny", family_options={"edit_pixels": "9"})
    assert recorded_flags(config)["edit_pixels"] == "9"


@pytest.mark.parametrize(
    "wrong", [{"model": 3}, {"max_pixels": "many"}, {"hub": "x"}, {"max_pixels": -1}]
)
def test_a_flag_of_another_kind_is_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(CacheError, match=f"cannot be used: --{name}: expected"):
        again({"model": "tiny", **wrong})


def test_a_command_of_both_stages_records_what_stage_1_alone_does() -> None:
    both = TrainConfig(**{**GIVEN, "task": "sft"})
    assert recorded_flags(both) == recorded_flags(TrainConfig(**GIVEN))
