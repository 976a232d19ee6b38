"""Two processes train as one with the same global batch, in every family and whatever
is trained, at toy sizes.

Nothing is found by then that a step does not use: `--find_unused_parameters` is given
nowhere.
"""

import math
from pathlib import Path
from typing import Any

import pytest
from dstrain.config.options.train import TrainConfig
from dstrain.runs.resolve import resolve
from dstrain.testing.rows import usual_size, write_rows
from safetensors.torch import load_file

from tests.support.processes import commands, in_processes, words
from tests.support.runs import log

FAMILIES = {
    "qwen_image": "text_encoder",
    "flux": "text_encoder_1",
    "wan": "text_encoder",
}
"""Family -> one of its text encoders."""
LORA: dict[str, Any] = {"lora_rank": 4}


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["LoRA", "dit", "text encoder"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_train_as_one(family: str, trained: str, tmp_path: Path) -> None:
    spec = resolve(TrainConfig(model=family, toy=True)).spec
    size = usual_size(spec)
    kind = {
        "LoRA": LORA, "dit": {"trainable_models": "dit"}, "text encoder": {"trainable_models": FAMILIES[family]}
    }[trained]  # fmt: skip
    common = {
        "model": family, "toy": True, "dataset_base_path": write_rows(spec, tmp_path / "data"), "num_epochs": 2,
        "learning_rate": 1e-3, "height": size.height, "width": size.width, "mixed_precision": "no",
        "num_frames": size.frames if "video" in str(spec.inputs) else None, **kind,
    }  # fmt: skip
    one = {
        **common,
        "batch_size": 1,
        "gradient_accumulation_steps": 2,
        "output_path": tmp_path / "one",
    }
    two = {**common, "batch_size": 1, "output_path": tmp_path / "two"}
    for processes, flags in ((1, one), (2, two)):
        ended = in_processes(processes, commands(words(flags)), tmp_path)
        assert ended.codes == (0,) * processes, ended.said
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
