"""Two processes train as one with the same global batch, in every family and whatever
is trained, at toy sizes, with copies of what is trained and with shards of it.

Nothing is found by then that a step does not use: `--find_unused_parameters` is given
nowhere.
"""

import math
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import TrainConfig
from dstrain.cli.main import main
from dstrain.runs.resolve import resolve
from dstrain.testing.rows import usual_size, write_rows
from safetensors.torch import load_file

from tests.support import everyday
from tests.support.launchers import FSDP_2, launched
from tests.support.processes import commands, in_processes, words
from tests.support.runs import files, log, same

FAMILIES = {
    "qwen_image": "text_encoder",
    "flux": "text_encoder_1",
    "wan": "text_encoder",
}
"""Family -> one of its text encoders."""
LORA: dict[str, Any] = {"lora_rank": 4}
TRAINED = ("LoRA", "dit", "text encoder", "LoRA on fp8 in RAM")
EVERYDAY = tuple(zip(FAMILIES, TRAINED, strict=False))
"""The ordinary suite trains another thing in each family."""
CASES = everyday.cases(product(FAMILIES, TRAINED), EVERYDAY.__contains__)


SHARDED: dict[str, dict[str, Any]] = {
    "LoRA": {"lora_rank": 4, "learning_rate": 1e-3, "use_gradient_checkpointing": True},
    "in full": {"trainable_models": "dit", "learning_rate": 1e-3},
    "in full on bf16": {
        "trainable_models": "dit", "learning_rate": 1e-4, "use_gradient_checkpointing": True,
        "mixed_precision": "bf16",
    },
}  # fmt: skip
EVERYDAY_SHARDED = ("qwen_image", "in full on bf16")
"""Checkpointing and bf16, neither of which test_sharding has for a network in full."""
SHARDED_CASES = everyday.cases(product(FAMILIES, SHARDED), EVERYDAY_SHARDED.__eq__)


ADAPTERS = [
    ("qwen_image", "blockwise-controlnet", "blockwise_controlnet"),
    ("flux", "controlnet", "controlnet"),
    ("flux", "ip-adapter", "ipadapter"),
    ("wan", "vace", "vace"),
    ("wan", "speedcontrol", "motion_controller"),
]
"""Family, variant, and the component that is trained beside the denoiser."""


def flags(family: str, folder: Path, variant: str | None = None) -> dict[str, Any]:
    """Two epochs of the toy model, on data written to a folder."""
    spec = resolve(TrainConfig(model=family, variant=variant, toy=True)).spec
    size = usual_size(spec)
    return {
        "model": family, "variant": variant, "toy": True, "num_epochs": 2,
        "dataset_base_path": write_rows(spec, folder / "data"),
        "learning_rate": 1e-3, "height": size.height, "width": size.width, "mixed_precision": "no",
        "num_frames": size.frames if "video" in str(spec.inputs) else None, "batch_size": 1,
    }  # fmt: skip


@pytest.mark.parametrize(("family", "trained"), CASES)
def test_two_processes_train_as_one(family: str, trained: str, tmp_path: Path) -> None:
    kind = {
        "LoRA": LORA, "dit": {"trainable_models": "dit"}, "text encoder": {"trainable_models": FAMILIES[family]},
        "LoRA on fp8 in RAM": {
            **LORA, "fp8_models": "dit", "blocks_to_swap": 1, "offload_models": FAMILIES[family],
        },
    }[trained]  # fmt: skip
    two = {**flags(family, tmp_path), **kind, "output_path": tmp_path / "two"}
    one = {**two, "gradient_accumulation_steps": 2, "output_path": tmp_path / "one"}
    # Here, so that the two forks need not import what they use.
    assert main(words(one)) == 0
    ended = in_processes(2, commands(words(two)), tmp_path)
    assert ended.codes == (0, 0), ended.said
    steps = log(tmp_path / "one")
    assert len(steps) >= 2 * math.ceil(
        3 / 2
    )  # DDP notices at the second step what the first has not reached
    for a, b in zip(steps, log(tmp_path / "two"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    ((made, wanted),) = [
        (load_file(path), load_file(tmp_path / "one" / path.name))
        for path in (tmp_path / "two").glob("epoch-1*")
    ]
    assert made.keys() == wanted.keys()
    assert max((made[key] - wanted[key]).abs().max().item() for key in made) <= 1e-4


@pytest.mark.parametrize(("family", "trained"), SHARDED_CASES)
def test_two_processes_that_shard_train_as_one_and_resume(
    family: str, trained: str, tmp_path: Path
) -> None:
    kind = SHARDED[trained]
    common = {**flags(family, tmp_path), "save_steps": 3, **kind}
    one, two, on = tmp_path / "one", tmp_path / "two", tmp_path / "on"
    alone = {**common, "gradient_accumulation_steps": 2, "output_path": one}
    assert main(words(alone)) == 0
    settings = {**FSDP_2, "mixed_precision": common["mixed_precision"]}
    line = words({**common, "output_path": two})
    ended = in_processes(2, launched((settings, line)), tmp_path)
    assert ended.codes == (0, 0), ended.said
    said = (two / "logs/dstrain.log").read_text()
    assert "sharding: dit sharded over all processes, 2 processes" in said
    is_fp32 = common["mixed_precision"] == "no"
    assert len(log(one)) == 4
    for a, b in zip(log(one), log(two), strict=True):
        # In bf16 a sum over blocks depends on its order, and what follows on the sum.
        bound = 1e-5 if is_fp32 else 1e-4 if a["step"] == 1 else 1e-3
        assert a == pytest.approx(b, rel=bound)
    assert files(two).keys() == files(one).keys()
    for name, wanted in files(one).items():
        made = files(two)[name]
        assert made.keys() == wanted.keys()
        for key, tensor in wanted.items() if is_fp32 else ():
            torch.testing.assert_close(made[key], tensor, rtol=1e-4, atol=1e-5)

    shutil.copytree(two, on)
    shutil.rmtree(on / "states/step-4")
    line = words({**common, "output_path": on, "resume": True})
    ended = in_processes(2, launched((settings, line)), tmp_path)
    assert ended.codes == (0, 0), ended.said
    assert log(on) == log(two)
    assert same(files(on), files(two))


@pytest.mark.drawn
@pytest.mark.parametrize(("family", "variant", "adapter"), ADAPTERS)
@pytest.mark.parametrize("sharded", [False, True], ids=["copies", "sharded"])
def test_adapters_beside_a_denoiser_train_on_two_processes_as_on_one(
    family: str, variant: str, adapter: str, sharded: bool, tmp_path: Path
) -> None:
    """They act inside the denoiser's blocks, which are recomputed."""
    common = {
        **flags(family, tmp_path, variant), "trainable_models": adapter, "use_gradient_checkpointing": True,
        "max_steps": 3,
    }  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    alone = {**common, "gradient_accumulation_steps": 2, "output_path": one}
    assert main(words(alone)) == 0
    line = words({**common, "output_path": two})
    settings = {**FSDP_2, "mixed_precision": "no"}
    started = launched((settings, line)) if sharded else commands(line)
    ended = in_processes(2, started, tmp_path)
    assert ended.codes == (0, 0), ended.said
    for a, b in zip(log(one), log(two), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    for name, wanted in files(one).items():
        made = files(two)[name]
        assert made.keys() == wanted.keys()
        for key, tensor in wanted.items():
            torch.testing.assert_close(made[key], tensor, rtol=1e-4, atol=1e-5)
