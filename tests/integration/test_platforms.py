"""The commands run where a platform lacks what Linux has, as Windows and macOS do."""

import ast
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dstrain.cli.main import main
from dstrain_planner.memory.without_memory import WithoutMemory
from PIL import Image

from tests.support import ROOT, everyday
from tests.support.videos import film, steady

PROGRAM = ROOT / "tests/support/other_platform.py"
SOURCES = ("core/dstrain", "plugins", "tools", "demo")
TOY = ("--model", "qwen_image", "--toy")


def dstrain(*arguments: str | Path) -> str:
    done = subprocess.run(
        [
            *(sys.executable, "-X", "warn_default_encoding", PROGRAM),
            *map(str, arguments),
            "--debug",
        ],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "images").mkdir(parents=True)
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (32, 32), colour).save(folder / f"images/{name}.png")
    (folder / "metadata.csv").write_text(
        "image,prompt\nimages/a.png,a red square\nimages\\b.png,ein blaues Quadrat: 蓝\n",
        encoding="utf-8",
    )
    return folder


def test_families_are_listed_without_modules_of_unix() -> None:
    assert "qwen_image" in dstrain("models")


@pytest.mark.drawn  # six processes, each of which imports torch
def test_the_demos_commands_run_without_what_unix_alone_has(
    data: Path, tmp_path: Path
) -> None:
    """Both stages, with a process that loads; the run resumed; its image; the cache
    verified, and pruned.
    """
    output, cache = tmp_path / "run", tmp_path / "cache"
    train = (
        *("train", *TOY, "--dataset_base_path", data, "--output_path", output),
        *("--feature_cache", cache, "--task", "sft"),
        *("--dataset_num_workers", "1", "--save_steps", "1", "--keep_checkpoints", "1"),
    )
    dstrain(*train, "--max_steps", "2")
    dstrain(*train, "--max_steps", "3", "--resume")
    assert [path.name for path in output.glob("*.safetensors")] == [
        "step-3.safetensors"
    ]
    names = {path.name for folder in (output, cache) for path in folder.rglob("*")}
    assert not [name for name in names if set(name) & set('<>:"|?*\\')]
    assert not list(output.glob(".dstrain.lock.pid"))
    image = tmp_path / "image.png"
    dstrain(
        *("generate", *TOY, "--run", output, "--prompt", "a red square"),
        *("--num_inference_steps", "2", "--height", "32", "--width", "32"),
        *("--output", image),
    )
    assert image.is_file()
    dstrain("cache", "verify", cache)
    dstrain("cache", "prune", cache, "--yes")


@pytest.mark.parametrize(
    "family",
    everyday.cases(
        ["flux", "flux2", "qwen_image", "sdxl", "wan", "z_image"],
        lambda name: name == "wan",
    ),
)
def test_a_step_of_training_computes_nothing_on_the_device_that_macs_cannot(
    family: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs of Macs have no float64. A dry run follows what is computed from weights."""
    if family == "wan":
        film(data / "video.mp4", steady(5, 16), 16)
        (data / "metadata.csv").write_text("video,prompt\nvideo.mp4,x\n", "utf-8")
    computed: list[torch.dtype] = []
    wide: list[str] = []
    follow = WithoutMemory._follow

    def noting(mode: WithoutMemory, tensor: torch.Tensor) -> None:
        computed.append(tensor.dtype)
        if tensor.dtype in (torch.float64, torch.complex128):
            calls = [frame.filename for frame in traceback.extract_stack()[:-2]]
            (*_, by) = [
                one for one in calls if re.search("dstrain_|/dstrain/|diffusers/", one)
            ]
            # Networks of diffusers look at the device themselves, which is a CPU here.
            if "diffusers/" not in by:
                wide.append(by)
        follow(mode, tensor)

    monkeypatch.setattr(WithoutMemory, "_follow", noting)
    words = ["--model", family, "--toy", "--dry_run", "--device_memory", "24GB"]
    words += ["--dataset_base_path", str(data), "--output_path", str(tmp_path / "run")]
    words += ["--variant", "t2v"] if family == "wan" else []
    assert main(words) == 0
    assert len(computed) > 500
    assert not wide


def unencoded(tree: ast.AST) -> Iterator[int]:
    """The lines at which a text file is read or written by the platform's encoding."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        given = {keyword.arg for keyword in node.keywords}
        function = node.func
        if isinstance(function, ast.Attribute):
            name, before = function.attr, 0
        else:
            name, before = getattr(function, "id", ""), 1
        is_named = "encoding" in given
        if name == "read_text":
            is_wrong = not node.args and not is_named
        elif name == "write_text" and ast.unparse(function.value) != "formatter":
            # What writes help has a method of this name.
            is_wrong = len(node.args) < 2 and not is_named
        elif name == "open" and (before or _is_mode(node.args)):
            modes = [one for one in node.args[before:] if isinstance(one, ast.Constant)]
            is_binary = any("b" in str(mode.value) for mode in modes)
            is_wrong = not is_binary and not is_named
        else:
            is_wrong = "text" in given and name in ("run", "Popen", "check_output")
        if is_wrong:
            yield node.lineno


def _is_mode(arguments: list[ast.expr]) -> bool:
    """Whether the arguments of an `open` are those of a path's."""
    if not arguments:
        return False
    first = arguments[0]
    value = getattr(first, "value", None)
    return isinstance(value, str) and set(value) <= set("rwxabt+")


@pytest.mark.parametrize(
    ("code", "is_wrong"),
    [
        ("path.read_text()", True),
        ("path.read_text('utf-8')", False),
        ("path.write_text(text)", True),
        ("formatter.write_text(text)", False),
        ("path.write_text(text, encoding='utf-8')", False),
        ("path.open('w')", True),
        ("path.open('rb')", False),
        ("open(path)", True),
        ("open(path, 'wb')", False),
        ("run(command, text=True)", True),
        ("run(command, encoding='utf-8')", False),
    ],
)
def test_an_encoding_that_is_missing_is_found(code: str, is_wrong: bool) -> None:
    assert bool(list(unencoded(ast.parse(code)))) == is_wrong


def test_text_files_have_the_same_encoding_on_every_platform() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*.py")
        if "tests" not in path.relative_to(ROOT / folder).parts
        for line in unencoded(ast.parse(path.read_text("utf-8")))
    ]
    assert not found
