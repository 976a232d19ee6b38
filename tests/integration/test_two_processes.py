"""Two processes train as one with the same global batch, in every family and whatever
is trained, at toy sizes, with copies of what is trained and with shards of it.

Nothing is found by then that a step does not use: `--find_unused_parameters` is given
nowhere.
"""

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import TrainConfig
from dstrain.cli.main import main
from dstrain.registry import load_family
from dstrain.runs.resolve import resolve
from dstrain.testing.rows import usual_size, write_rows

from tests.support import everyday
from tests.support.launchers import FSDP_2, launched
from tests.support.processes import commands, in_processes, words
from tests.support.runs import files, log, same

FAMILIES = {
    "qwen_image": "text_encoder",
    "flux": "text_encoder_1",
    "wan": "text_encoder",
    "z_image": "text_encoder",
    "flux2": "text_encoder",
    "sdxl": "text_encoder",
}
"""Family -> one of its text encoders."""
TRAINED: dict[str, dict[str, Any]] = {
    "LoRA": {"lora_rank": 4},
    "denoiser": {"trainable_models": "{denoiser}"},
    "text encoder": {"trainable_models": "{text_encoder}"},
    "LoRA on fp8 in RAM": {
        "lora_rank": 4, "fp8_models": "{denoiser}", "blocks_to_swap": 1, "offload_models": "{text_encoder}",
    },
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "layers that are skipped": {"trainable_models": "text_encoder", "clip_skip": 3}
}
"""What one family has alone."""
EVERYDAY = tuple(zip(FAMILIES, (*TRAINED,)[:3], strict=False))
"""The ordinary suite trains another thing in each of the first families."""
CASES = everyday.cases(
    [*product(FAMILIES, TRAINED), *product(["sdxl"], OWN)], EVERYDAY.__contains__
)
SHARDED: dict[str, dict[str, Any]] = {
    "LoRA": {"lora_rank": 4, "use_gradient_checkpointing": True},
    "in full": {"trainable_models": "{denoiser}"},
    "in full on bf16": {
        "trainable_models": "{denoiser}", "learning_rate": 1e-4, "use_gradient_checkpointing": True,
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
    ("z_image", "controlnet-union", "controlnet"),
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


def named(options: dict[str, Any], family: str) -> dict[str, Any]:
    """Return options with the components of a family in them."""
    names = {
        "denoiser": load_family(family).default_trainable,
        "text_encoder": FAMILIES[family],
    }
    return {
        name: value.format(**names) if isinstance(value, str) else value
        for name, value in options.items()
    }


def check_two_as_one(given: dict[str, Any], folder: Path, sharded: bool) -> None:
    """Train by one process and by two, with copies of what is trained or with shards of it,
    and compare.
    """
    one, two = folder / "one", folder / "two"
    # Here, so that the two forks need not import what they use.
    alone = {**given, "gradient_accumulation_steps": 2, "output_path": one}
    assert main(words(alone)) == 0
    launch({**given, "output_path": two}, folder, sharded)
    steps = log(one)
    # DDP notices at the second step what the first has not reached.
    assert len(steps) >= 2
    is_fp32 = given["mixed_precision"] == "no"
    for a, b in zip(steps, log(two), strict=True):
        # In bf16 a sum over blocks depends on its order, and what follows on the sum: on
        # some processors by 1.2e-3, within the spacing of bf16's numbers.
        bound = 1e-4 if is_fp32 or a["step"] == 1 else 2**-8
        assert a == pytest.approx(b, rel=bound)
    assert files(two).keys() == files(one).keys()
    for name, wanted in files(one).items():
        made = files(two)[name]
        assert made.keys() == wanted.keys()
        for key, tensor in wanted.items() if is_fp32 else ():
            torch.testing.assert_close(made[key], tensor, rtol=1e-4, atol=1e-4)


def launch(given: dict[str, Any], folder: Path, sharded: bool) -> None:
    settings = {**FSDP_2, "mixed_precision": given["mixed_precision"]}
    line = words(given)
    started = launched((settings, line)) if sharded else commands(line)
    ended = in_processes(2, started, folder)
    assert ended.codes == (0, 0), ended.said


@pytest.mark.parametrize(("family", "trained"), CASES)
def test_two_processes_train_as_one(family: str, trained: str, tmp_path: Path) -> None:
    given = {**flags(family, tmp_path), **named((TRAINED | OWN)[trained], family)}
    check_two_as_one(given, tmp_path, sharded=False)


@pytest.mark.parametrize(("family", "trained"), SHARDED_CASES)
def test_two_processes_that_shard_train_as_one_and_resume(
    family: str, trained: str, tmp_path: Path
) -> None:
    own = named(SHARDED[trained], family)
    given = {**flags(family, tmp_path), "save_steps": 3, **own}
    check_two_as_one(given, tmp_path, sharded=True)
    two, on = tmp_path / "two", tmp_path / "on"
    last = len(log(two))
    assert last > given["save_steps"]
    said = (two / "logs/dstrain.log").read_text()
    denoiser = load_family(family).default_trainable
    assert f"sharding: {denoiser} sharded over all processes, 2 processes" in said
    shutil.copytree(two, on)
    shutil.rmtree(on / f"states/step-{last}")
    launch({**given, "output_path": on, "resume": True}, tmp_path, sharded=True)
    assert log(on) == log(two)
    assert same(files(on), files(two))


@pytest.mark.drawn
@pytest.mark.parametrize(("family", "variant", "adapter"), ADAPTERS)
@pytest.mark.parametrize("sharded", [False, True], ids=["copies", "sharded"])
def test_adapters_beside_a_denoiser_train_on_two_processes_as_on_one(
    family: str, variant: str, adapter: str, sharded: bool, tmp_path: Path
) -> None:
    """They act inside the denoiser's blocks, which are recomputed."""
    given = {
        **flags(family, tmp_path, variant), "trainable_models": adapter, "use_gradient_checkpointing": True,
        "max_steps": 3,
    }  # fmt: skip
    check_two_as_one(given, tmp_path, sharded)
