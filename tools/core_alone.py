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
NEEDS_A_PLUGIN = "needs_plugin"
"""The marker of tests that a plugin's feature, or a family, takes part in."""
FILES_THAT_NEED_ONE = (
    "tests/unit/cli/test_config_file.py",
    "tests/unit/config/test_serialize.py",
    "tests/unit/generation/test_one_image.py",
)
"""Those whose tables have options of plugins."""


def main(words: list[str]) -> int:
    """Make the environment, run the tests and return pytest's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        python = make_environment(Path(folder) / "env")
        write_plugin(FAMILY, Path(folder) / FAMILY, ())
        pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "-q")
        offline = ("--no-deps", "--no-build-isolation", "--no-index")
        packages = (str(ROOT / "core"), str(Path(folder) / FAMILY))
        subprocess.run((*pip, *offline, *packages), check=True)
        pytest = (str(python), "-m", "pytest", "-m", f"not {NEEDS_A_PLUGIN}")
        pytest += tuple(f"--ignore={name}" for name in FILES_THAT_NEED_ONE)
        tests = words or ["tests/unit", "-n", "2", "--dist", "worksteal"]
        done = subprocess.run(
            (*pytest, *tests), cwd=ROOT, stdin=subprocess.DEVNULL, check=False
        )
        return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
