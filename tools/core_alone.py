"""Run core's tests where core and the template's family are installed, and no plugin: what
core imports of a plugin, or expects of one, fails here.

    python tools/core_alone.py [words for pytest]
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from dstrain.registry import write_plugin

from tools.golden.trees import make_environment

ROOT = Path(__file__).parents[1]
FAMILY = "my_model"


def main(words: list[str]) -> int:
    """Make the environment, run the tests and return pytest's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        python = make_environment(Path(folder) / "env")
        write_plugin(FAMILY, Path(folder) / FAMILY, ())
        pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "-q")
        offline = ("--no-deps", "--no-build-isolation", "--no-index")
        packages = (str(ROOT / "core"), str(Path(folder) / FAMILY))
        subprocess.run((*pip, *offline, *packages), check=True)
        tests = words or ["tests/unit", "-n", "2", "--dist", "worksteal"]
        pytest = (str(python), "-m", "pytest", *tests)
        done = subprocess.run(pytest, cwd=ROOT, stdin=subprocess.DEVNULL, check=False)
        return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
