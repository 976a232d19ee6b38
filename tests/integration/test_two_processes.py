"""Two processes train as one with the same global batch, in every family and whatever
is trained, at toy sizes.

Nothing is found by then that a step does not use: `--find_unused_parameters` is given
nowhere.
"""

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from dstrain.cli.main import main
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
TRAINED = ("LoRA", "dit", "text encoder")
EVERYDAY = tuple(zip(FAMILIES, TRAINED, strict=True))
"""The ordinary suite trains another thing in each family."""
CASES = [
    pytest.param(*case, marks=() if case in EVERYDAY else pytest.mark.all_variants)
    for case in product(FAMILIES, TRAINED)
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "trained"), CASES)
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
