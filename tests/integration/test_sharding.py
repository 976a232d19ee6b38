"""Two processes that shard what is trained among them train as one process that has
all of it, and save the same; what one number of processes saved, another resumes.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.runs.checkpoints.state import load_state
from safetensors.torch import load_file
from torch import Tensor

from tests.support.everyday import cases
from tests.support.family import weights_of
from tests.support.launchers import FSDP_2, launched
from tests.support.processes import commands, in_processes, words
from tests.support.runs import files, log, same

pytestmark = pytest.mark.usefixtures("tiny")


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
SETTINGS: Mapping[str, Mapping[str, Any]] = {
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
FILES = (("hybrid", False), ("ZeRO-2", True), ("ZeRO-3", False))
"""Each with whether weights stay whole between passes."""


def flags(here: Path, output: Path, processes: int, **changes: Any) -> list[str]:
    return words(
        {
            "model": "tiny", "dataset_base_path": here / "data", "output_path": output, "learning_rate": 1e-2,
            "model_paths": json.dumps(list(weights_of(here / "model").values())),
            "gradient_accumulation_steps": 4 // processes, "save_steps": 1, "max_steps": 3, "keep_checkpoints": 3,
            **changes,
        }
    )  # fmt: skip


def launch(folder: Path, *runs: tuple[Mapping[str, Any], list[str]]) -> None:
    """Run commands, each with the settings of its launcher, in two processes."""
    ended = in_processes(2, launched(*runs), folder)
    assert ended.codes == (0, 0), ended.said


def validation(run: Path) -> list[list[float]]:
    """The step and the loss of each validation, if there are any."""
    file = run / "logs/validation.csv"
    lines = file.read_text().splitlines()[1:] if file.exists() else []
    return [[float(number) for number in line.split(",")] for line in lines]


@pytest.mark.parametrize("name", cases(TRAINED, lambda name: name == "in full"))
def test_two_processes_train_save_and_resume_as_one(
    here: Path, tmp_path: Path, name: str
) -> None:
    """What two processes saved, two resume bit for bit; one and two resume each other's
    runs as their own.
    """
    kind = TRAINED[name]
    one, two = tmp_path / "one", tmp_path / "two"
    assert commands(flags(here, one, 1, **kind))(0) == 0
    launch(tmp_path, (FULL, flags(here, two, 2, **kind)))
    assert len(log(one)) == 3
    assert_as(two, one)
    assert [step for step, *_ in validation(one)] == (
        [0, 1, 2, 3] if "validation_steps" in kind else []
    )
    for a, b in zip(validation(one), validation(two), strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    said = (two / "logs/dstrain.log").read_text()
    assert "sharded over all processes, 2 processes" in said
    for step in (1, 3):
        check_state(two / f"states/step-{step}", one / f"states/step-{step}")

    resumed = {}
    for start, processes in ((one, 2), (two, 2), (two, 1)):
        on = tmp_path / f"{start.name} goes on in {processes}"
        shutil.copytree(start, on)
        shutil.rmtree(on / "states/step-3")
        resumed[on] = [*flags(here, on, processes, **kind), "--resume"]
    (one_on, two_on, alone_on) = resumed
    launch(tmp_path, (FULL, resumed[one_on]), (FULL, resumed[two_on]))
    assert commands(resumed[alone_on])(0) == 0
    assert_as(one_on, one)
    assert_as(alone_on, two)
    assert log(two_on) == log(two)
    assert same(files(two_on), files(two))
    states = (vars(load_state(run / "states/step-3")) for run in (two_on, two))
    assert same(*states)


@pytest.mark.parametrize(("name", "is_whole"), cases(FILES, lambda row: False))
def test_every_kind_of_sharding_trains_the_same(
    here: Path, tmp_path: Path, name: str, is_whole: bool
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    kind = TRAINED["in full"]
    assert commands(flags(here, one, 1, **kind))(0) == 0
    launch(tmp_path, (SETTINGS[name], flags(here, other, 2, **kind)))
    assert_as(other, one)
    said = (other / "logs/dstrain.log").read_text()
    over = "sharded over the processes of each machine"
    assert (over in said) == (name == "hybrid")
    assert ("weights whole from the first forward pass" in said) == is_whole


def assert_as(made: Path, wanted: Path) -> None:
    """Two runs have the same losses and weights, but for rounding."""
    for a, b in zip(log(made), log(wanted), strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    assert_close(files(made), files(wanted))


def check_state(two: Path, one: Path) -> None:
    """A state does not say how many processes saved it."""
    for file in ("trainable.safetensors", "optimizer.safetensors"):
        assert header(one / file) == header(two / file)
        assert_close({file: load_file(two / file)}, {file: load_file(one / file)})
    states = (json.loads((run / "state.json").read_text()) for run in (one, two))
    assert len({json.dumps(state, sort_keys=True) for state in states}) == 1


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
