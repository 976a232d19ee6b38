"""The wheels of core and plugin install into an empty environment, and the command finds the family."""

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("core", "plugins/qwen_image")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the two wheels, and whatever else this one has."""
    folder = tmp_path_factory.mktemp("packaging")
    for package in PACKAGES:
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "dist", ROOT / package)
    venv.create(folder / "env", with_pip=False)
    python = folder / "env/bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index")
    run(*pip, "--find-links", folder / "dist", "core", "plugin-qwen-image")
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "env"


def test_the_command_finds_the_family_of_the_wheel(environment: Path, tmp_path: Path) -> None:
    found = json.loads(run(environment / "bin/dstrain", "plugins", "--json", cwd=tmp_path))
    assert [(one["name"], one["state"]) for one in found] == [("qwen_image", "ready")]


def test_the_installed_packages_are_those_of_the_wheels(environment: Path, tmp_path: Path) -> None:
    code = "import dstrain, dstrain_qwen_image as family; print(dstrain.__file__, family.__file__)"
    places = run(environment / "bin/python", "-c", code, cwd=tmp_path).split()
    assert all(place.startswith(str(environment)) for place in places)


def test_the_module_runs_as_the_command_does(environment: Path, tmp_path: Path) -> None:
    arguments = ("graph", "--model", "qwen_image")
    by_module = run(environment / "bin/python", "-m", "dstrain", *arguments, cwd=tmp_path)
    assert by_module == run(environment / "bin/dstrain", *arguments, cwd=tmp_path)
    assert "encode_prompt" in by_module
