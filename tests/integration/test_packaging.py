"""The wheels install into an empty environment, alone or together, and the command
finds the families and the further commands.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import ROOT, everyday
from tests.support.toys import dataset
from tools.golden.trees import make_environment

FAMILIES = ("flux", "flux2", "qwen_image", "sdxl", "wan", "z_image")
PACKAGES = ("core", *(f"plugins/{one}" for one in (*FAMILIES, "tools")))


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


Installer = Callable[..., Path]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installer:
    """(name, plugins) -> an environment of its own with the wheels of core and of
    these plugins.
    """
    folder = tmp_path_factory.mktemp("packaging")
    for package in PACKAGES:
        build = (sys.executable, "-m", "build", "--wheel", "--no-isolation")
        run(*build, "--outdir", folder / "dist", ROOT / package)

    def install(name: str, *chosen: str) -> Path:
        python = make_environment(folder / name)
        wheels = ("core", *(f"plugin-{family.replace('_', '-')}" for family in chosen))
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q")
        pip += ("--no-deps", "--no-index")
        run(*pip, "--find-links", folder / "dist", *wheels)
        return folder / name

    return install


@pytest.fixture(scope="module")
def environment(installed: Installer) -> Path:
    """An environment that has the wheels of core and of every plugin."""
    return installed("env", *FAMILIES, "tools")


def families(environment: Path, folder: Path) -> dict[str, str]:
    """Families as the command of an environment lists them, with their state."""
    found = json.loads(
        run(environment / "bin/dstrain", "plugins", "--json", cwd=folder)
    )
    return {one["name"]: one["state"] for one in found}


def test_the_command_finds_the_families_of_the_wheels(
    environment: Path, tmp_path: Path
) -> None:
    assert families(environment, tmp_path) == dict.fromkeys(
        (*FAMILIES, "tools"), "ready"
    )


def test_the_wheel_of_tools_brings_its_commands_and_their_tables(
    environment: Path, tmp_path: Path
) -> None:
    script = (
        "python wan_train_network.py --task t2v-1.3B --network_module networks.lora_wan"
    )
    (tmp_path / "train.sh").write_text(script)
    printed = run(environment / "bin/dstrain", "import", "train.sh", cwd=tmp_path)
    assert 'model_id = "Wan-AI/Wan2.1-T2V-1.3B"' in printed


@pytest.mark.parametrize(
    "family", everyday.cases(FAMILIES, lambda name: name == "qwen_image")
)
def test_a_family_installed_alone_plans_its_run(
    family: str, installed: Installer, tmp_path: Path
) -> None:
    alone = installed(family, family)
    assert families(alone, tmp_path) == {family: "ready"}
    planned = run(alone / "bin/dstrain", "graph", "--model", family, cwd=tmp_path)
    assert planned.startswith(f"{family} ")
    assert "loss" in planned


def test_core_and_a_family_train_resume_and_generate(
    installed: Installer, tmp_path: Path
) -> None:
    dstrain = installed("alone", "qwen_image") / "bin/dstrain"
    train = (dstrain, "--model", "qwen_image", "--toy", "--lora_rank", "2")
    train += ("--dataset_base_path", dataset("qwen_image", "base"))
    train += ("--resolution", "32", "--max_steps")
    cache = ("--feature_cache", "cache", "--output_path", "split")
    run(*train, "4", "--output_path", "unsplit", cwd=tmp_path)
    run(*train, "2", "--task", "sft:data_process", *cache, cwd=tmp_path)
    run(*train, "2", "--task", "sft:train", *cache, cwd=tmp_path)
    run(*train, "4", "--task", "sft:train", *cache, "--resume", cwd=tmp_path)
    unsplit, split = (
        load_file(tmp_path / folder / "step-4.safetensors")
        for folder in ("unsplit", "split")
    )
    torch.testing.assert_close(split, unsplit, rtol=0, atol=0)
    generate = (dstrain, "generate", "--run", "split", "--prompt", "dog", "--output")
    small = ("--height", "32", "--width", "32", "--num_inference_steps", "1")
    run(*generate, "dog.png", *small, cwd=tmp_path)
    assert (tmp_path / "dog.png").exists()


def test_the_installed_packages_are_those_of_the_wheels(
    environment: Path, tmp_path: Path
) -> None:
    code = "import dstrain, dstrain_qwen_image as family; print(dstrain.__file__, family.__file__)"
    places = run(environment / "bin/python", "-c", code, cwd=tmp_path).split()
    assert all(place.startswith(str(environment)) for place in places)


def test_the_module_runs_as_the_command_does(environment: Path, tmp_path: Path) -> None:
    arguments = ("graph", "--model", "qwen_image")
    by_module = run(
        environment / "bin/python", "-m", "dstrain", *arguments, cwd=tmp_path
    )
    assert by_module == run(environment / "bin/dstrain", *arguments, cwd=tmp_path)
    assert "encode_prompt" in by_module
