"""What runs of version 0.1.0 left is used by those of today: states, LoRA files, weights and
configurations of each family, made in `tests/made_by_0.1` by `dstrain --config` FAMILY/run.toml
(whole, and ended by SIGTERM after a step) and FAMILY/full.toml.

Toys are made anew: equal seeds give equal weights.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.cli.main import main
from imageio.v3 import imread
from safetensors.torch import load_file

from tests.support import ROOT

MADE = ROOT / "tests/made_by_0.1"
LAST = "step-8.safetensors"
UNCHANGED = ("--learning_rate", "1e-12", "--max_steps", "1", "--save_steps", "1")
"""A run whose only step leaves what it starts from as it is."""
SMALL = ("--height", "32", "--width", "48", "--num_inference_steps", "2", "--seed", "1")
pytestmark = pytest.mark.parametrize("family", ("flux", "qwen_image", "wan"))


@pytest.fixture(autouse=True)
def here(empty: Path) -> None:
    """Work in a folder with the files, as they were made."""
    shutil.copytree(MADE, empty, dirs_exist_ok=True)


def run(*words: Any) -> None:
    assert main([str(word) for word in words]) == 0, words


def tensors(*places: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(Path(*places))
    return found


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Compare within a tenth of the least learning rate: products are rounded otherwise on
    another processor than that of the older run, and a step of Adam is about that rate.
    """
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-5)


def test_a_stopped_run_resumes_and_a_configuration_repeats_it(family: str) -> None:
    stopped = f"{family}/stopped"
    assert not Path(stopped, LAST).exists()
    run("--config", f"{family}/run.toml", "--output_path", stopped, "--resume")
    resumed = tensors(stopped, LAST)
    run("--config", f"{family}/config.json", "--output_path", "again")
    again = tensors("again", LAST)
    assert_close(resumed, tensors(family, "lora.safetensors"))
    assert_close(again, resumed)


def test_a_lora_file_is_the_start_of_a_run(family: str) -> None:
    file = f"{family}/lora.safetensors"
    run(
        *("--config", f"{family}/run.toml", "--output_path", "out", *UNCHANGED),
        *("--lora_checkpoint", file),
    )
    assert_close(tensors("out/step-1.safetensors"), tensors(file))


def test_a_lora_file_changes_what_is_generated(family: str) -> None:
    suffix = "mp4" if family == "wan" else "png"
    frames = ("--num_frames", "5") if family == "wan" else ()
    command = ("generate", "--model", family, "--toy", "--prompt", "dog 1", *SMALL)
    lora = ("--lora", f"{family}/lora.safetensors:100")
    run(*command, *frames, "--output", f"without.{suffix}")
    run(*command, *frames, "--output", f"with.{suffix}", *lora)
    plugin = "pyav" if family == "wan" else "pillow"
    without, with_lora = (
        imread(f"{name}.{suffix}", plugin=plugin) for name in ("without", "with")
    )
    assert (without != with_lora).any()


def test_weights_are_the_start_of_a_run(family: str) -> None:
    file = f"{family}/weights.safetensors"
    run(
        *("--config", f"{family}/full.toml", "--output_path", "out", *UNCHANGED),
        *("--resume_from_checkpoint", file),
    )
    assert_close(tensors("out/step-1.safetensors"), tensors(file))
