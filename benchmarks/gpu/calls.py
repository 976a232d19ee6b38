"""The calls of a sitting with a GPU, each below ten minutes, in the order in which they
are worth most.

    python -m benchmarks.gpu.calls 2            one call; a JSON line for each case
    python -m benchmarks.gpu.calls 2 --tiny     the same on a CPU, at toy sizes
    python -m benchmarks.gpu.calls 2 --memory 24GB   with no more memory than a card has
"""

import gc
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

import click
import torch
from dstrain import DstrainError
from dstrain_planner.sizes import parse_size

from benchmarks.gpu.case import Case
from benchmarks.gpu.step import copy_rate, measure

NF4 = "bitsandbytes_nf4"
METHODS = ("", "fp8", "int8_block", NF4)
QWEN = Case(model="qwen_image")
BLOCKS_OF_CALL_1 = 4
WAN = Case(model="wan", checkpointing="offload", warm=1, steps=3)
"""A step of 32,760 tokens takes several times as long as one of an image."""
BEGIN_WITHIN = 420.0
"""Seconds after which no case of a call begins, so that the last one ends in time."""

CALLS: Mapping[int, tuple[Case, ...]] = MappingProxyType(
    {
        1: tuple(
            replace(QWEN, layers=BLOCKS_OF_CALL_1, method=method, checkpointing=how)
            for method in METHODS
            for how in ("block", "offload", "none")
        ),
        2: tuple(replace(QWEN, method=method) for method in METHODS),
        3: (
            *(replace(QWEN, method="fp8", swap=count) for count in (16, 30, 45, -1)),
            replace(QWEN, swap=-1),
        ),
        4: tuple(
            replace(case, method=method)
            for case in (Case(model="flux", checkpointing="offload"), WAN)
            for method in ("", "fp8", NF4)
        ),
        5: tuple(
            replace(QWEN, method=method, compile=compiled, batch=batch)
            for method in ("", "fp8")
            for compiled in (False, True)
            for batch in (1, 4)
        ),
        6: (
            replace(WAN, model="wan_1.3b", train="full", optimizer="adamw8bit"),
            replace(QWEN, train="full", optimizer="adamw8bit"),
        ),
        7: (QWEN, QWEN, replace(QWEN, program="bare")),
        8: tuple(
            replace(QWEN, program=program, method=method)
            for method in ("", NF4)
            for program in ("dstrain", "diffusers")
        ),
        9: (
            *(
                replace(QWEN, program=program, method=method)
                for method in ("", "fp8", NF4)
                for program in ("dstrain", "reference")
            ),
            replace(QWEN, swap=-1),
            replace(QWEN, program="reference", swap=-1, warm=1, steps=3),
        ),
    }
)
"""What each call measures. 1: that all runs, and what a block costs. 2: the table of
cards. 3: whether copies are hidden. 4: the other families. 5: whether to compile. 6: full
training in bf16. 7: dstrain's own cost, and whether two runs are equal bit for bit. 8 and
9: the same step as diffusers' script and as DiffSynth-Studio make it."""


def toy(case: Case) -> Case:
    """Return a case as it is tried on a CPU."""
    is_compiled = case.compile and case.batch == 1 and case.method != ""
    return replace(
        case,
        layers=2 if is_compiled else 0,
        rank=2,
        swap=-1 if case.swap else 0,  # toys have few blocks
        compile=is_compiled,  # one of them: it takes long
        warm=0,
        steps=1,
    )


def lines(
    number: int, device: torch.device, tiny: bool, seconds: float = BEGIN_WITHIN
) -> Iterator[dict[str, Any]]:
    """Run a call; yield what each case gave, or why it could not be run.

    Args:
        number: Which one.
        device: Where.
        tiny: Whether networks are of toy size.
        seconds: No case begins later than this.
    """
    start = time.monotonic()
    yield {
        "call": number,
        "device": torch.cuda.get_device_name()
        if device.type == "cuda"
        else device.type,
        "torch": torch.__version__,
        "copy_gb_s": copy_rate(device) if number == 3 else None,
    }
    for case in CALLS[number]:
        if time.monotonic() - start > seconds:
            yield {"case": vars(case), "left_out": f"{seconds:g} seconds are over"}
            continue
        try:
            yield asdict(measure(toy(case) if tiny else case, device, tiny))
        except (DstrainError, torch.OutOfMemoryError) as error:
            yield {"case": vars(case), "failed": str(error).partition("\n")[0]}
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


@click.command()
@click.argument("number", type=click.IntRange(min(CALLS), max(CALLS)))
@click.option("--tiny", is_flag=True, help="Toy sizes, on a CPU.")
@click.option("--memory", help="Fail where a card with this much memory fails: 24GB.")
@click.option(
    "--seconds",
    default=BEGIN_WITHIN,
    show_default=True,
    help="Begin no case after this time.",
)
def main(number: int, tiny: bool, memory: str | None, seconds: float) -> None:
    """Run call NUMBER and print a JSON line for each case."""
    has_gpu = torch.cuda.is_available() and not tiny
    if not has_gpu and not tiny:
        raise click.UsageError("there is no GPU here; --tiny runs on a CPU")
    if memory is not None and has_gpu:
        whole = torch.cuda.get_device_properties(0).total_memory
        share = parse_size("--memory", memory) / whole
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    device = torch.device("cuda" if has_gpu else "cpu")
    for line in lines(number, device, tiny, seconds):
        click.echo(json.dumps(line))


if __name__ == "__main__":
    main()
