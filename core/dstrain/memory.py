"""Out of memory: how it is recognised on any device, and what is said of it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dstrain.errors import OutOfMemory

SIGNS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "out of memory")
"""What a RuntimeError says that means it: of the CPU's allocator, of CUDA's libraries."""
LOAD_ADVICE = (
    "train in two stages: --task TASK:data_process, then TASK:train, which does not load the encoders",
    "or --mixed_precision bf16; other programs may hold memory, too",
)
STAGE_1_ADVICE = (
    "lower --max_pixels (or --height and --width), or --num_frames; or give --mixed_precision bf16",
    "what was computed is kept: the same command goes on from there",
)
GENERATE_ADVICE = ("lower --height and --width, or --num_frames; or give --mixed_precision bf16",)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is how torch or Python says that there is not enough memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def peak() -> float:
    """The most GPU memory that was in use, in GiB; 0 without a GPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


@contextmanager
def explained(where: str, *advice: str) -> Iterator[None]:
    """Turn whatever says out of memory within into OutOfMemory, with what lowers it there."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        used = f" at {peak():.1f} GiB" if torch.cuda.is_available() else ""
        raise OutOfMemory(where, f"out of memory{used}", *advice) from error
