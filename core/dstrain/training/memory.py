"""Out of memory: how it is recognised on any device, what is said of it, and how much
was in use.
"""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dstrain.errors import OutOfMemory

SIGNS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "out of memory",
)
"""What a RuntimeError says that means it: of the CPU's allocator, of CUDA's libraries,
torch.OutOfMemoryError.
"""
RSS_UNITS_PER_GIB = 2**30 if sys.platform == "darwin" else 2**20
"""ru_maxrss is in KiB, on macOS in bytes (getrusage(2))."""
LOAD_ADVICE = (
    "train in two stages: --task TASK:data_process, then TASK:train, which does not load the encoders",
    "or --mixed_precision bf16; other programs may hold memory, too",
)
STAGE_1_ADVICE = (
    "lower --max_pixels (or --height and --width), or --num_frames; or give --mixed_precision bf16",
    "what was computed is kept: the same command goes on from there",
)
GENERATE_ADVICE = (
    "lower --height and --width, or --num_frames; or give --mixed_precision bf16",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is how torch or Python says that there is not enough memory."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    )


def peak_memory() -> float:
    """The most memory that was in use until now, in GiB: of the GPU, else of this
    process.
    """
    import torch  # slow to import, and recognising needs none of it

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / RSS_UNITS_PER_GIB


@contextmanager
def oom_as_error(where: str, *advice: str) -> Iterator[None]:
    """Turn whatever says out of memory within into OutOfMemory, with what lowers it
    there.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            where, f"out of memory at {peak_memory():.1f} GiB", *advice
        ) from error
