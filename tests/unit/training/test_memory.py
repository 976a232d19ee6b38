"""Out of memory is known by what torch and Python say of it, and the peak is said."""

import pytest
import torch
from dstrain import OutOfMemory
from dstrain.cli.errors import explain
from dstrain.training import is_out_of_memory, oom_as_error, peak_memory

CPU = "DefaultCPUAllocator: "
LACKING = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError(f"{CPU}can't allocate memory: you tried to allocate 9 bytes"),
    RuntimeError(f"{CPU}not enough memory: you tried to allocate 9 bytes"),
    RuntimeError("unable to mmap 9 bytes from file <a>: Cannot allocate memory (12)"),
    MemoryError("Unable to allocate 9 GiB"),
    MemoryError(),
)


@pytest.mark.parametrize("error", LACKING, ids=str)
def test_every_way_to_say_it_has_exit_code_6(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert explain(error).exit_code == 6
    printed = r"^dstrain: error: loading: .* [\d.]+ GiB\n  wait$"
    with pytest.raises(OutOfMemory, match=printed), oom_as_error("loading", "wait"):
        raise error


def test_of_a_traceback_of_a_process_the_line_is_shown_that_says_it() -> None:
    said = f"RuntimeError: {CPU}can't allocate memory"
    caught = RuntimeError(f"Caught RuntimeError in a worker.\nTraceback:\n{said}")
    assert (explain(caught).exit_code, explain(caught).what) == (6, said)
    number = MemoryError("Unable to allocate 9 GiB")
    assert explain(number).what == str(number)


def test_the_peak_is_of_the_gpu_or_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_memory() > 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    assert peak_memory() == 3
