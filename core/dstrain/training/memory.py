"""Recognize running out of memory on any device, and measure the memory in use."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from dstrain.errors import OutOfMemory

SIGNS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "Cannot allocate memory",
    "out of memory",
)
"""Texts of a RuntimeError that mean it: of the CPU's allocator, of a file that is mapped, of
CUDA's libraries, of torch.OutOfMemoryError.
"""
RSS_UNITS_PER_GIB = 2**30 if sys.platform == "darwin" else 2**20
"""ru_maxrss is in KiB, on macOS in bytes (getrusage(2))."""
LESS_MEMORY = (
    "lower --max_pixels (or --height and --width), or --num_frames; or use --mixed_precision bf16",
    "in training, lower --batch_size, or give --use_gradient_checkpointing or --feature_cache",
    "with plugin-planner, --dry_run lists the flags with which a run fits",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch or Python reports with this error that memory ran out."""
    if isinstance(error, RuntimeError):
        return any(sign in str(error) for sign in SIGNS)
    return isinstance(error, MemoryError)


def peak_memory() -> float:
    """Return the peak memory use until now in GiB, of the GPU, else of this process."""
    import torch  # imported late, because recognizing needs none of it

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    try:
        resource: Any = import_module("resource")
    except ImportError:
        import psutil  # Windows has no getrusage(2), and psutil its figure

        memory = psutil.Process().memory_info()
        return float(getattr(memory, "peak_wset", memory.rss)) / 2**30
    peak: float = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / RSS_UNITS_PER_GIB


def collect_memory() -> None:
    """Collect what nothing uses any more, give the device's cached memory back, and let
    the peak of a GPU begin anew.
    """
    import torch
    from accelerate.utils import release_memory

    # Collects garbage, too: networks may lie in circles of references.
    release_memory()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def oom_as_error(where: str, *advice: str) -> Iterator[None]:
    """Raise OutOfMemory if memory runs out within, with this advice in place of the usual."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        what = f"out of memory at {peak_memory():.1f} GiB"
        raise OutOfMemory(where, what, *(advice or LESS_MEMORY)) from error
