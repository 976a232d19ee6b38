"""Two processes that shard what is trained among them train as one process that has
all of it, and save the same; what one number of processes saved, another resumes.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.runs.checkpoints.state import load_state
from safetensors.torch import load_file
from torch import Tensor

from tests.support.family import weights_of
from tests.support.launchers import FSDP_2, launched
from tests.support.processes import commands, in_processes, words
from tests.support.runs import files, log, same, warm_project

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm_project(tmp_path_factory.mktemp("project"))


TRAINED: dict[str, dict[str, Any]] = {
    "LoRA": {
        "lora_rank": 2, "lora_target_modules": "to_q,to_out", "validation_split": 0.4, "validation_steps": 1,
    },
    "LoRA on bf16": {"lora_rank": 2, "mixed_precision": "bf16"},
    "LoRA on fp8": {"lora_rank": 2, "mixed_precision": "bf16", "fp8_models": "dit"},
    "LoRA on nf4": {"lora_rank": 2, "quant_options": "dit:bitsandbytes_nf4"},
    "in full": {"trainable_models": "dit", "ema_decay": 0.5},
    "schedule-free": {"trainable_models": "dit.blocks.1", "optimizer": "schedulefree"},
    "lion": {"trainable_models": "dit", "optimizer": "lion", "learning_rate": 1e-3},
}  # fmt: skip
FULL: Mapping[str, Any] = {**FSDP_2, "mixed_precision": "no"}
FILES: Mapping[str, Mapping[str, Any]] = {
    "hybrid": {
        **FULL,
        "fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": "HYBRID_SHARD"},
    },
    **{
        f"ZeRO-{stage}": {
            "distributed_type": "DEEPSPEED", "num_processes": 2, "mixed_precision": "no",
            "deepspeed_config": {"zero_stage": stage},
        }
        for stage in (2, 3)
    },
}  # fmt: skip
"""Files of other kinds of sharding -> their settings."""


def flags(here: Path, output: Path, processes: int, **changes: Any) -> list[str]:
    return words(
        {
            "model": "tiny", "dataset_base_path": here / "data", "output_path": output, "learning_rate": 1e-2,
            "model_paths": json.dumps(list(weights_of(here / "model").values())),
            "gradient_accumulation_steps": 4 // processes, "save_steps": 1, "max_steps": 3, "keep_checkpoints": 3,
            **changes,
        }
    )  # fmt: skip


Trained = Callable[[str], Path]


@pytest.fixture(scope="module")
def trained(here: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a function from a kind to a run of one process, one of two that shard, the
    same resumed from its second state, and a copy to resume; of another kind of sharding,
    one of two.
    """
    folder = tmp_path_factory.mktemp("trained")

    def launch(*runs: tuple[Mapping[str, Any], list[str]]) -> None:
        ended = in_processes(2, launched(*runs), folder)
        assert ended.codes == (0, 0), ended.said

    @cache
    def of_kind(name: str) -> Path:
        place = folder / name
        if name in FILES:
            kind = TRAINED["in full"]
            launch((FILES[name], flags(here, place / "two", 2, **kind)))
            return place
        kind = TRAINED[name]
        assert commands(flags(here, place / "one", 1, **kind))(0) == 0
        launch((FULL, flags(here, place / "two", 2, **kind)))
        resumed = []
        for start in ("one", "two"):
            on = place / f"{start} goes on"
            shutil.copytree(place / start, on)
            shutil.rmtree(on / "states/step-3")
            resumed.append((FULL, [*flags(here, on, 2, **kind), "--resume"]))
        launch(*resumed)
        return place

    return of_kind


@pytest.mark.parametrize("name", TRAINED)
def test_two_processes_train_as_one(trained: Trained, name: str) -> None:
    one, two = trained(name) / "one", trained(name) / "two"
    assert len(log(one)) == 3
    for a, b in zip(log(one), log(two), strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    assert_close(files(two), files(one))


def test_the_validation_loss_is_that_of_one_process(trained: Trained) -> None:
    one, two = (
        [
            [float(number) for number in line.split(",")]
            for line in (trained("LoRA") / folder / "logs/validation.csv")
            .read_text()
            .splitlines()[1:]
        ]
        for folder in ("one", "two")
    )
    assert [row[0] for row in one] == [0, 1, 2, 3]
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_sharding_trains_the_same(trained: Trained, name: str) -> None:
    one, other = trained("in full") / "one", trained(name) / "two"
    for a, b in zip(log(one), log(other), strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    assert_close(files(other), files(one))


def test_the_log_says_what_is_divided(trained: Trained) -> None:
    said = {
        name: (trained(name) / "two/logs/dstrain.log").read_text()
        for name in ("in full", *FILES)
    }
    assert "sharding: dit sharded over all processes, 2 processes" in said["in full"]
    assert "sharding: dit sharded over the processes of each machine" in said["hybrid"]
    assert "weights whole from the first forward pass" in said["ZeRO-2"]
    assert "weights whole" not in said["ZeRO-3"]


@pytest.mark.parametrize("name", TRAINED)
def test_a_state_does_not_say_how_many_processes_saved_it(
    trained: Trained, name: str
) -> None:
    for step in (1, 3):
        one = trained(name) / f"one/states/step-{step}"
        two = trained(name) / f"two/states/step-{step}"
        for file in ("trainable.safetensors", "optimizer.safetensors"):
            assert header(one / file) == header(two / file)
            assert_close({file: load_file(two / file)}, {file: load_file(one / file)})
        assert json.loads((one / "state.json").read_text()) == json.loads(
            (two / "state.json").read_text()
        )


@pytest.mark.parametrize("name", TRAINED)
def test_what_two_saved_two_resume_bit_for_bit(trained: Trained, name: str) -> None:
    two, on = trained(name) / "two", trained(name) / "two goes on"
    assert log(on) == log(two)
    assert same(files(on), files(two))
    state = "states/step-3"
    assert same(vars(load_state(on / state)), vars(load_state(two / state)))


@pytest.mark.parametrize("name", TRAINED)
def test_what_one_process_saved_two_resume(trained: Trained, name: str) -> None:
    one, on = trained(name) / "one", trained(name) / "one goes on"
    for a, b in zip(log(one), log(on), strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    assert_close(files(on), files(one))


@pytest.mark.parametrize("name", TRAINED)
def test_what_two_processes_saved_one_resumes(
    here: Path, trained: Trained, tmp_path: Path, name: str
) -> None:
    two, on = trained(name) / "two", tmp_path / "on"
    shutil.copytree(two, on)
    shutil.rmtree(on / "states/step-3")
    assert commands([*flags(here, on, 1, **TRAINED[name]), "--resume"])(0) == 0
    for a, b in zip(log(two), log(on), strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    assert_close(files(on), files(two))


def assert_close(
    made: dict[str, dict[str, Tensor]], wanted: dict[str, dict[str, Tensor]]
) -> None:
    assert made.keys() == wanted.keys()
    for file, tensors in wanted.items():
        assert made[file].keys() == tensors.keys()
        for key, tensor in tensors.items():
            torch.testing.assert_close(made[file][key], tensor, rtol=1e-4, atol=1e-5)


def header(path: Path) -> bytes:
    """The names, dtypes, shapes and places of a file's tensors."""
    content = path.read_bytes()
    return content[: 8 + int.from_bytes(content[:8], "little")]
