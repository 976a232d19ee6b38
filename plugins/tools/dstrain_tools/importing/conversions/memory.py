"""Conversions of what saves memory: dtypes, swapped blocks, caches, tiles."""

from typing import Any

from dstrain_tools.importing.context import Context, as_whole_number, truth
from dstrain_tools.importing.conversions.output import output
from dstrain_tools.importing.entries import Result


def precision(option: str, value: Any, context: Context) -> Result:
    """Name the dtype that is computed in."""
    name = str(value).lower()
    if name in ("bf16", "bfloat16"):
        return Result({option: "bf16"})
    if name in ("no", "fp32", "float32"):
        return Result({option: "no"})
    return Result({option: "bf16"}, f"{name} is not supported: bf16 has its speed")


def in_bf16(option: str, value: Any, context: Context) -> Result:
    """Train weights in bf16."""
    if not truth(value):
        return Result(note="is off")
    return Result({option: "bf16"}, "updates are rounded up or down by chance")


def blocks(option: str, value: Any, context: Context) -> Result:
    """Count the blocks that wait in RAM; 0 is none."""
    if not as_whole_number(value):
        return Result(note="is 0: none")
    if not context.trains_lora:
        what = "weights that are trained in full stay on the GPU"
        return Result(
            lost=f"{what}; --optimizer paged_adamw8bit lets its state leave it"
        )
    return Result({option: value})


def cached(option: str, value: Any, context: Context) -> Result:
    """Compute what is not trained once: latents and texts, both in one folder."""
    if not truth(value):
        return Result(note="is off")
    folder = output("output_path", context.output_folder, context).options
    return Result({option: f"{folder['output_path']}-features"})


def tiles(option: str, value: Any, context: Context) -> Result:
    """Give the side of tiles."""
    if not value:
        return Result(note="is the default")
    return Result({option: value, "tiled": True})
