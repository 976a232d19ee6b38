"""Training that is killed (kill -9) at any file-system event, and again, ends bit for
bit as if it had not been.
"""

import random
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from dstrain.cli.main import main

from tests.support.crashes import again, events, everything, killed_at
from tests.support.runs import warm_project

pytestmark = [
    pytest.mark.promise(
        "R2", "training killed at any moment ends bit for bit as if it had not been"
    ),
    pytest.mark.usefixtures("tiny"),
]

COSINE = {"lr_scheduler": "cosine", "lr_warmup_steps": 2}
RUNS: dict[str, dict[str, Any]] = {
    "LoRA": {"num_epochs": 2, "batch_size": 2},
    "LoRA, accumulation, cosine": {"num_epochs": 2, "gradient_accumulation_steps": 2, "save_steps": 2, **COSINE},
    "full": {"max_steps": 5, "save_steps": 1, "trainable_models": "dit"},
    "full, accumulation, linear": {
        "max_steps": 6, "save_steps": 2, "gradient_accumulation_steps": 3, "trainable_models": "dit",
        "lr_scheduler": "linear", "dataset_repeat": 3,
    },
    "a part of the denoiser": {"max_steps": 4, "save_steps": 3, "trainable_models": "dit.blocks.1"},
    "two components in full": {"max_steps": 4, "save_steps": 2, "trainable_models": "dit,text_encoder"},
    "LoRA and full": {"max_steps": 6, "save_steps": 3, "trainable_models": "text_encoder", "lora_base_model": "dit"},
    "keeping one checkpoint": {"max_steps": 5, "save_steps": 1, "keep_checkpoints": 1},
    "keeping two, in full": {"max_steps": 6, "save_steps": 1, "keep_checkpoints": 2, "trainable_models": "dit"},
    "checkpointing, uniform timesteps": {
        "max_steps": 5, "save_steps": 2, "use_gradient_checkpointing": True, "timestep_sampling": "uniform",
    },
}  # fmt: skip
"""Flags of a run; all have dropout in the denoiser."""
NAMES = tuple(RUNS)
TRIALS = tuple(
    (NAMES[(place + seed) % len(NAMES)], seed)
    for seed in range(5)
    for place in range(len(NAMES))
)
"""Turned by one from seed to seed, so that every tenth is another run."""


@pytest.fixture(scope="module")
def here(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose denoiser has dropout."""
    return warm_project(tmp_path_factory.mktemp("dropping"), dropout=0.2)


@pytest.fixture(scope="module")
def whole(
    here: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[int, dict[str, Any]]]:
    """Name of a run -> its file-system events, and all that it leaves, uninterrupted."""

    @cache
    def make(name: str) -> tuple[int, dict[str, Any]]:
        out = tmp_path_factory.mktemp("whole") / "out"
        return events(partial(again, here, out, RUNS[name]), out), everything(out)

    return make


@pytest.mark.parametrize(
    ("name", "seed"), TRIALS, ids=[f"{name}-{seed}" for name, seed in TRIALS]
)
def test_a_killed_run_ends_as_one_that_was_not(
    name: str,
    seed: int,
    here: Path,
    tmp_path: Path,
    whole: Any,
    counted: Callable[[str, int], None],
) -> None:
    total, wanted = whole(name)
    chance = random.Random(f"{name} {seed}")
    out = tmp_path / "out"
    body = partial(again, here, out, RUNS[name])
    kills = [
        killed_at(chance.randrange(total), body, out, torn=chance.random() < 0.5)
        for _ in range(chance.choice((1, 2, 3, 3)))
    ]
    events(body, out)
    assert everything(out) == wanted, f"{sum(kills)} kills"
    assert not list(out.rglob(".tmp-*"))
    counted("kills", sum(kills))
    shutil.rmtree(out)


BOTH_STAGES = 40
"""Trials of a command that runs both stages."""


@pytest.fixture(scope="module")
def both_stages(
    here: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, int, dict[str, Any]]:
    """Of a command that runs both stages: the file-system events of both and of stage 2
    alone, and all that it leaves, uninterrupted.
    """
    folder = tmp_path_factory.mktemp("both")
    total = events(partial(in_both_stages, here, folder), folder)
    wanted = everything(folder / "out")
    shutil.rmtree(folder / "out")
    return total, events(partial(in_both_stages, here, folder), folder), wanted


def in_both_stages(here: Path, folder: Path) -> None:
    """Run the command, whatever the folder holds."""
    flags = {"feature_cache": folder / "cache", "num_epochs": 2, "save_steps": 4}
    again(here, folder / "out", flags)


@pytest.mark.parametrize("seed", range(BOTH_STAGES))
def test_a_command_of_both_stages_is_killed_in_either_and_repeated(
    seed: int,
    here: Path,
    tmp_path: Path,
    both_stages: tuple[int, int, dict[str, Any]],
    counted: Callable[[str, int], None],
) -> None:
    total, of_stage_2, wanted = both_stages
    chance = random.Random(seed)
    body = partial(in_both_stages, here, tmp_path)
    # Half of the first kills come before the output folder is there.
    first = total - of_stage_2 if seed % 2 else total
    kills = killed_at(chance.randrange(first), body, tmp_path, chance.random() < 0.5)
    assert kills
    counted("in stage 1", not (tmp_path / "out").exists())
    for _ in range(chance.choice((0, 1, 2))):
        event, torn = chance.randrange(total), chance.random() < 0.5
        kills += killed_at(event, body, tmp_path, torn)
    in_both_stages(here, tmp_path)
    assert everything(tmp_path / "out") == wanted, f"{kills} kills"
    assert main(["cache", "verify", str(tmp_path / "cache")]) == 0
    assert not list(tmp_path.rglob(".tmp-*"))
    counted("kills", kills)
