"""run.json lists what a run wrote, and nothing else is removed or replaced."""

from pathlib import Path

import pytest
from dstrain import StateError
from dstrain.storage import RUN, RunFiles


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    "record",
    [
        *("", "{", '{"a": 1}', "[1]"),
        '{"files": [["../data/0.safetensors", 1]]}',
        '{"files": [["..\\\\data\\\\0.safetensors", 1]]}',
        '{"files": [["C:\\\\data\\\\0.safetensors", 1]]}',
        '{"files": [["/etc/passwd", 0]]}',
        '{"files": [["x", "y"]]}',
        '{"files": {"x": 1}}',
    ],
)
def test_a_record_that_is_none_lists_nothing(record: str, tmp_path: Path) -> None:
    (tmp_path / RUN).write_text(record)
    assert RunFiles.read(tmp_path).steps == {}


def test_the_file_written_last_is_never_pruned_at_any_step(tmp_path: Path) -> None:
    record = RunFiles.read(tmp_path)
    for step in (2, 5, 9, 5):
        record.add([f"step-{step}.safetensors"], step)
        (tmp_path / f"step-{step}.safetensors").touch()
    RunFiles.read(tmp_path).prune_weights(1)
    assert names(tmp_path) == [RUN, "step-5.safetensors"]


def test_a_file_that_appears_during_the_run_is_not_replaced(tmp_path: Path) -> None:
    files = RunFiles.read(tmp_path)
    files.add(["step-1.safetensors"], 1)
    (tmp_path / "step-2.safetensors").write_text("mine")
    with pytest.raises(StateError, match=r"step-2\.safetensors"):
        files.add(["step-2.safetensors"], 2)
    # A listed file that is gone is no longer the run's.
    files.forget_missing()
    assert "step-1.safetensors" not in RunFiles.read(tmp_path).steps


def test_a_saved_state_is_noted_once(tmp_path: Path) -> None:
    files = RunFiles.read(tmp_path)
    files.add(["a"])
    assert not RunFiles.read(tmp_path).committed
    files.commit()
    assert RunFiles.read(tmp_path).committed
    # Older versions did not write it down.
    (tmp_path / RUN).write_text('{"files": [["a", 0]]}')
    assert RunFiles.read(tmp_path).committed
