"""Run cases with the `dstrain` that is installed in this Python's environment.

Started as `env/bin/python -I runner.py CASES`. The libraries are imported once; each
command is a fork that loads the console script, as a shell starts a process. It prints
where the project's packages lie, then the name of each case that is done.
"""

import filecmp
import json
import os
import runpy
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LIMIT = 120
"""Seconds after which a command counts as hung: SIGALRM ends it, which its code shows."""
BROKEN = 99
"""The exit code of a command that raised."""
QUANTIZERS = ("bitsandbytes", "torchao")
"""A command line imports them only if it quantizes; the other libraries would do so
whenever they are installed.
"""
MODELS = {
    "transformers": ("CLIPTextModel", "Qwen2_5_VLModel", "UMT5EncoderModel"),
    "diffusers": (
        "Flux2Pipeline",
        "FluxPipeline",
        "QwenImageEditPlusPipeline",
        "StableDiffusionXLPipeline",
        "WanImageToVideoPipeline",
        "ZImageOmniPipeline",
    ),
}


def preload() -> None:
    """Import the libraries, and the models that they import where they are first named.

    Nothing here may start a thread or accelerate's state, which forks would inherit.
    """
    sys.modules.update(dict.fromkeys(QUANTIZERS))  # type: ignore[arg-type]  # None: as if not installed
    for library in ("torch", "accelerate", "peft", *MODELS):
        for name in MODELS.get(library, ("__name__",)):
            getattr(import_module(library), name)
    for name in QUANTIZERS:
        del sys.modules[name]
    import_module("torch").set_num_threads(1)


def print_packages() -> None:
    """Print where each of the project's packages lies; raise SystemExit if that is not in
    this environment.
    """
    for name in sorted(packages_distributions()):
        if name.partition("_")[0] == "dstrain":
            file = str(import_module(name).__file__)
            print(f"  {name}: {file}", flush=True)
            if not Path(file).is_relative_to(sys.prefix):
                raise SystemExit(f"{name} is imported from {file}, not {sys.prefix}")


def forked(work: Callable[..., None], *arguments: Any) -> int:
    """Work in a fork, and return its exit code, negative for the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = BROKEN
        try:
            os.setsid()
            signal.alarm(LIMIT)
            work(*arguments)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what a command that hung has left
    return os.waitstatus_to_exitcode(status)


def run_command(words: list[str], folder: Path, printed: Path) -> None:
    """Be the command."""
    for number, target in enumerate((os.devnull, f"{printed}.out", f"{printed}.err")):
        os.dup2(os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    os.chdir(folder / "files")
    if words[0] == "file":
        Path(words[1]).parent.mkdir(parents=True, exist_ok=True)
        Path(words[1]).write_text(words[2], "utf-8")
        return
    if words[0] == "python":
        script = folder / "script.py"
        script.write_text(words[1], "utf-8")
        runpy.run_path(str(script), run_name="__main__")
        return
    sys.argv = ["dstrain", *words]
    (script,) = entry_points(group="console_scripts", name="dstrain")
    sys.exit(script.load()())


def run_case(case: Mapping[str, Any], material: Path, folder: Path) -> None:
    """Run the commands of a case in a folder with the material. `files` has what they
    leave, emptied where it is the material's; `printed` what they print, `codes.json` their
    exit codes.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(material, folder / "files")
    (folder / "printed").mkdir()
    # In the case's folder, names of sockets would be too long.
    with TemporaryDirectory(dir="/tmp") as place:
        os.environ.update(HOME=place, TMPDIR=place)
        tempfile.tempdir = None  # which libraries have looked up already
        codes = [
            forked(run_command, words, folder, folder / f"printed/{number}")
            for number, words in enumerate(case["commands"])
        ]
    for path in material.rglob("*"):
        left = folder / "files" / path.relative_to(material)
        if left.is_file() and filecmp.cmp(path, left):
            left.write_bytes(b"")
    (folder / "codes.json").write_text(json.dumps(codes), "utf-8")


def main() -> None:
    """Run the cases that are not done."""
    given = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    preload()
    if forked(print_packages):
        raise SystemExit("a package of another environment was imported")
    for number, case in enumerate(given["cases"], 1):
        folder = Path(given["results"], case["folder"])
        if not (folder / "codes.json").exists():
            run_case(case, Path(given["material"], case["material"]), folder)
            count = f"{number}/{len(given['cases'])}"
            print(f"  {folder.parent.name[:12]} {count} {case['name']}", flush=True)


if __name__ == "__main__":
    main()
