"""What a script's own loop trains is saved as `run` saves it, over nothing that is there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import (
    Pipeline,
    StateError,
    StepNumbers,
    TrainingModule,
    UsageError,
    WeightsLogger,
)
from safetensors import safe_open

from tests.support.runs import configs, files, opened, project, same, train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


def module_of(here: Path, **trained: Any) -> TrainingModule:
    module = TrainingModule(Pipeline.from_pretrained("tiny", configs(here / "model")))
    module.switch_to_training_mode(**trained)
    return module


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def numbers(step: int) -> StepNumbers:
    return StepNumbers(step, 5, 0, 1.0, 1.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize("lora_format", ("diffusers", "diffsynth"))
def test_a_file_has_the_names_that_a_run_gives_and_loads_in_a_pipeline(
    lora_format: Any, here: Path, tmp_path: Path
) -> None:
    module = module_of(here, lora_rank=2)
    with torch.no_grad():
        for one in module.trained_parameters:
            one.normal_()
    logger = WeightsLogger(str(tmp_path / "own"), lora_format=lora_format)
    logger.on_epoch_end(module, 0)
    (file,) = logger.weights
    train(here, output_path=tmp_path / "run", lora_format=lora_format, max_steps=1)
    (known,) = files(tmp_path / "run").values()
    assert list(files(tmp_path / "own")["epoch-0.safetensors"]) == list(known)
    pipe = opened(here / "model")
    plain = pipe(prompt="dog", num_inference_steps=1).tobytes()
    pipe.load_lora(str(file))
    assert pipe(prompt="dog", num_inference_steps=1).tobytes() != plain


def test_weights_in_full_are_saved_with_their_configuration(
    here: Path, tmp_path: Path
) -> None:
    module = module_of(here, trainable_models="dit,vae")
    WeightsLogger(tmp_path).save(module, "last")
    assert names(tmp_path) == ["last.dit.safetensors", "last.vae.safetensors"]
    with safe_open(tmp_path / "last.dit.safetensors", "pt") as file:
        assert "width" in file.metadata()["config"]
    train(
        here,
        output_path=tmp_path / "run",
        trainable_models="dit",
        resume_from_checkpoint=tmp_path / "last.dit.safetensors",
        max_steps=1,
    )
    assert same(
        sorted(files(tmp_path / "run")["step-1.safetensors"]),
        sorted(module.pipeline.components["dit"].state_dict()),
    )


def test_files_are_saved_by_steps_or_by_epochs(here: Path, tmp_path: Path) -> None:
    module = module_of(here)
    by_steps = WeightsLogger(tmp_path / "steps", save_steps=2)
    by_epochs = WeightsLogger(tmp_path / "epochs")
    for logger in (by_steps, by_epochs):
        for step in range(1, 6):
            logger.on_step_end(module, numbers(step))
        logger.on_epoch_end(module, 0)
        logger.on_training_end(module, 5)
    steps = [f"step-{step}.safetensors" for step in (2, 4, 5)]
    assert names(tmp_path / "steps") == steps
    assert names(tmp_path / "epochs") == ["epoch-0.safetensors"]
    with pytest.raises(UsageError, match="expected 1 or more"):
        WeightsLogger(tmp_path, save_steps=0)
    unknown: Any = "xx"
    with pytest.raises(UsageError, match=r"lora_format: expected diffusers, .*'xx'"):
        WeightsLogger(tmp_path, lora_format=unknown)


def test_weights_that_are_there_are_kept_unless_they_may_be_replaced(
    here: Path, tmp_path: Path
) -> None:
    (tmp_path / "epoch-0.safetensors").write_text("mine")
    with pytest.raises(
        StateError, match=r"contains epoch-0.safetensors, which was not"
    ):
        WeightsLogger(tmp_path)
    assert (tmp_path / "epoch-0.safetensors").read_text() == "mine"
    WeightsLogger(tmp_path, overwrite=True).on_epoch_end(module_of(here), 0)
    assert (tmp_path / "epoch-0.safetensors").stat().st_size > 4
