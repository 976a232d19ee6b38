"""The states of an output folder are found by their names, without torch."""

import subprocess
import sys
from pathlib import Path

from dstrain.runs.checkpoints.state_folders import states


def test_a_folder_of_such_a_name_without_such_files_is_no_state(tmp_path: Path) -> None:
    for name in ("step-1", "step-10", "step-9", "step-11", "step-1.old"):
        (tmp_path / "states" / name).mkdir(parents=True)
    for name in ("step-1/record.json", "step-9/state.json", "step-10/record.json"):
        (tmp_path / "states" / name).touch()
    (tmp_path / "states/step-11/notes.txt").touch()
    (tmp_path / "states/step-1.old/record.json").touch()
    names = [state.name for state in states(tmp_path)]
    assert names == ["step-10", "step-9", "step-1"]


def test_what_refuses_an_output_folder_imports_no_torch() -> None:
    code = "import sys, dstrain.runs.checkpoints.directory; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
