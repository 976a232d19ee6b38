"""What would end stage 2 at its start ends the command before stage 1 computes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from dstrain import StateError, SystemFault, UsageError
from dstrain.distributed import ProcessGroup, Sharding
from dstrain.errors import MissingFiles
from dstrain.runs import Setup
from dstrain.runs.resolve import of_stage, resolve
from dstrain.runs.stage_1.before_stage_2 import check_output, check_training

from tests.support.family import weights_of
from tests.support.runs import config, project, train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


def stage_2(here: Path, **changes: Any) -> Setup:
    given = {"feature_cache": here / "cache", **changes}
    return of_stage(resolve(config(here, **given)), "train")


def alone() -> ProcessGroup:
    return ProcessGroup(Accelerator(cpu=True))


def test_a_folder_that_is_not_there_yet_is_not_made(here: Path, tmp_path: Path) -> None:
    check_output(stage_2(here, output_path=tmp_path / "a/b/out"), alone())
    assert not list(tmp_path.iterdir())


def test_a_folder_with_a_run_is_refused(here: Path, tmp_path: Path) -> None:
    train(here, output_path=tmp_path / "out", max_steps=1)
    with pytest.raises(StateError, match="already contains a run"):
        check_output(stage_2(here, output_path=tmp_path / "out"), alone())
    for way in ({"resume": "auto"}, {"overwrite": True}):
        check_output(stage_2(here, output_path=tmp_path / "out", **way), alone())


def test_a_place_that_cannot_be_written_is_refused(here: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemFault, match="file is no folder that can"):
        check_output(stage_2(here, output_path=tmp_path / "file/out"), alone())


def all_inputs(setup: Setup) -> list[frozenset[str]]:
    return [setup.all_inputs()]


def test_what_is_trained_fits_its_files_and_no_weight_is_read(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dstrain.models.weight_files._reader", None)
    setup = stage_2(here)
    check_training(setup, all_inputs(setup))


def test_files_that_are_not_there_are_named(here: Path) -> None:
    paths = dict(weights_of(here / "model"))
    paths["dit"] = ["nowhere.safetensors"]
    setup = stage_2(here, model_paths=json.dumps(list(paths.values())))
    with pytest.raises(MissingFiles, match=r"nowhere\.safetensors: does not exist"):
        check_training(setup, all_inputs(setup))


def test_layers_that_the_network_has_not_are_refused(here: Path) -> None:
    setup = stage_2(here, lora_target_modules="to_x")
    with pytest.raises(UsageError, match="to_x"):
        check_training(setup, all_inputs(setup))


def test_what_cannot_be_sharded_is_refused(here: Path) -> None:
    setup = stage_2(here, trainable_models="text_encoder")
    check_training(setup, all_inputs(setup))
    sharded = replace(setup, sharding=Sharding())
    with pytest.raises(UsageError, match="cannot shard text_encoder"):
        check_training(sharded, all_inputs(sharded))
