"""Out of memory is known by what torch and Python say of it, within a step or outside
one, and the peak is said.
"""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from dstrain import OutOfMemory
from dstrain.cli import explain
from dstrain.training import collect_memory, is_out_of_memory, oom_as_error, peak_memory

LACKING = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    ),
    RuntimeError(
        "[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"
    ),
    MemoryError("Unable to allocate 9 GiB"),
    MemoryError(),
)
OTHERS = (
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("out of memory"),
)


@pytest.mark.parametrize("error", LACKING, ids=str)
def test_every_way_to_say_it_has_exit_code_6_within_a_step_and_outside(
    error: Exception,
) -> None:
    assert is_out_of_memory(error)
    assert explain(error).exit_code == 6
    printed = r"^dstrain: error: loading: out of memory at [\d.]+ GiB\n  wait$"
    with pytest.raises(OutOfMemory, match=printed), oom_as_error("loading", "wait"):
        raise error


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_another_error_is_not_taken_for_it(error: Exception) -> None:
    assert not is_out_of_memory(error)
    assert explain(error).exit_code == 1


def test_of_a_traceback_that_a_process_handed_on_the_line_is_shown_that_says_it() -> (
    None
):
    said = "RuntimeError: DefaultCPUAllocator: can't allocate memory"
    caught = RuntimeError(
        f"Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback:\n{said}"
    )
    assert (explain(caught).exit_code, explain(caught).what) == (6, said)


def test_without_such_a_line_what_python_says_is_shown() -> None:
    assert (
        explain(MemoryError("Unable to allocate 9 GiB")).what
        == "Unable to allocate 9 GiB"
    )
    assert explain(MemoryError()).what == "the machine ran out of memory"


def test_recognizing_it_imports_no_torch() -> None:
    code = "import sys, dstrain.cli.errors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_peak_is_that_of_the_process_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status = Path("/proc/self/status")
    if status.exists():
        peak = next(
            int(line.split()[1])
            for line in status.read_text().splitlines()
            if line.startswith("VmHWM")
        )
        assert peak_memory() == pytest.approx(peak / 2**20, rel=0.05)
    assert peak_memory() > 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    assert peak_memory() == 3


def test_what_lies_in_a_circle_of_references_is_collected() -> None:
    circle: list[object] = []
    weight = torch.zeros(2)
    circle += [circle, weight]
    known = weakref.ref(weight)
    gc.disable()
    try:
        del circle, weight
        assert known() is not None
        collect_memory()
        assert known() is None
    finally:
        gc.enable()
