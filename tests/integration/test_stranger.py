"""A stranger's family: made by `dstrain plugins new` from core's wheel, installed
beside it, trained and tested.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from tests.support import ROOT
from tools.golden.trees import make_environment

FAMILY = "stranger_model"
FLAGS = (
    *("--model", FAMILY, "--toy", "--dataset_base_path", "data"),
    *("--max_steps", "2", "--lora_rank", "4"),
)
COMMANDS = (
    ("models",),
    (*FLAGS, "--output_path", "whole"),
    (*FLAGS, "--task", "sft:data_process", "--feature_cache", "cache"),
    (*FLAGS, "--task", "sft:train", "--feature_cache", "cache", "--output_path", "split"),
    ("generate", "--model", FAMILY, "--toy", "--lora", "split/step-2.safetensors", "--prompt", "a dog",
     "--height", "32", "--width", "48", "--num_inference_steps", "2", "--output", "x.png"),
)  # fmt: skip
"""What a user of the family types; run by one process, which imports torch once."""


def run(*command: str | Path, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_and_install(python: Path, package: Path, folder: Path) -> None:
    """Build a package's wheel and install it, alone, for this interpreter."""
    made = folder / "dist" / package.name
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir")
    run(*build, made, package, cwd=folder)
    (wheel,) = made.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q")
    run(*pip, "--no-deps", "--no-index", wheel, cwd=folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stranger's folder: an environment with core from its wheel and no family, and a
    family made and installed.
    """
    folder = tmp_path_factory.mktemp("home")
    python = make_environment(folder / "env")
    build_and_install(python, ROOT / "core", folder)
    run(folder / "env/bin/dstrain", "plugins", "new", FAMILY, cwd=folder)
    build_and_install(python, folder / FAMILY, folder)
    return folder


def test_the_family_is_found_trained_in_one_piece_and_in_stages_and_generates(
    home: Path,
) -> None:
    (home / "data").mkdir()
    for i in range(3):
        noise = np.random.default_rng(i).integers(0, 256, (16, 16, 3), np.uint8)
        Image.fromarray(noise).save(home / f"data/{i}.png")
    (home / "data/metadata.csv").write_text(
        "image,prompt\n0.png,a dog\n1.png,a cat that sleeps\n2.png,\n"
    )
    script = f"import sys; from dstrain.cli.main import main; sys.exit(max(main(words) for words in {COMMANDS!r}))"
    listed = run(home / "env/bin/python", "-c", script, cwd=home).splitlines()[1]
    assert listed.split() == [FAMILY, "plugin-stranger-model", "0.1.0", "base"]
    whole, split = (
        load_file(home / way / "step-2.safetensors") for way in ("whole", "split")
    )
    assert whole.keys() == split.keys()
    assert all(bool((whole[name] == split[name]).all()) for name in whole)
    with Image.open(home / "x.png") as made:
        assert made.size == (48, 32)


@pytest.mark.drawn  # the whole contract, which tests of the kit have of such a family
def test_its_own_tests_pass_where_it_is_installed(home: Path) -> None:
    printed = run(
        home / "env/bin/python",
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        home / FAMILY,
        cwd=home,
    )
    assert " passed" in printed
    assert f"conformance of {FAMILY} base: " in printed


def test_nothing_of_it_comes_from_this_project_or_names_the_template(
    home: Path,
) -> None:
    code = f"import dstrain, dstrain_{FAMILY} as family; print(dstrain.__file__, family.__file__)"
    places = run(home / "env/bin/python", "-c", code, cwd=home).split()
    assert all(place.startswith(str(home / "env")) for place in places)
    found = json.loads(run(home / "env/bin/dstrain", "plugins", "--json", cwd=home))
    assert [(one["name"], one["variants"], one["state"]) for one in found] == [
        (FAMILY, ["base"], "ready")
    ]
    for path in (home / FAMILY).rglob("*"):
        assert "my_model" not in path.name
        assert not path.is_file() or "my_model" not in path.read_text()
