"""The commands run where a platform lacks modules and signals that Linux has."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.support import ROOT

ABSENT = ("fcntl", "grp", "pwd", "resource", "termios")
SIGNALS = (
    "SIGALRM",
    "SIGCHLD",
    "SIGHUP",
    "SIGKILL",
    "SIGPIPE",
    "SIGQUIT",
    "SIGUSR1",
    "SIGUSR2",
)
"""What the module `signal` lacks on Windows."""
COMMAND = f"""
import builtins, signal, sys, types

found = builtins.__import__
bare = types.ModuleType("signal")
vars(bare).update({{k: v for k, v in vars(signal).items() if k not in {SIGNALS}}})

def absent(name, globals=None, *arguments, **keywords):
    # Other libraries ask for the platform's name before they use these.
    importer = (globals or {{}}).get("__name__", "")
    if importer.startswith(("dstrain", "filelock")):
        if name in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        if name == "signal":
            return bare
    return found(name, globals, *arguments, **keywords)

builtins.__import__ = absent

from dstrain.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def dstrain(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, arguments), "--debug"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    Image.new("RGB", (32, 32), "red").save(folder / "a.png")
    (folder / "metadata.csv").write_text("image,prompt\na.png,a red square\n")
    return folder


def test_families_are_listed_without_modules_of_unix() -> None:
    assert "qwen_image" in dstrain("models")


def test_a_toy_run_trains_and_saves_without_modules_of_unix(
    data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    dstrain(
        "--model", "qwen_image", "--toy", "--max_steps", "2",
        "--dataset_base_path", data, "--output_path", output,
    )  # fmt: skip
    assert list(output.glob("*.safetensors"))
    assert not list(output.glob(".dstrain.lock.pid"))
