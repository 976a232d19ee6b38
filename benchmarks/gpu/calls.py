"""The calls of a sitting with a GPU, each below ten minutes, in the order in which they
are worth most.

    python -m benchmarks.gpu.calls 1            one call; a JSON line for each case
    python -m benchmarks.gpu.calls 1 --tiny     the same on a CPU, at toy sizes
    python -m benchmarks.gpu.calls 2 --memory 24GB   with no more memory than a card has
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import click
import torch
from dstrain.config.sizes import parse_size
from dstrain.errors import DstrainError

from benchmarks.gpu.step import Case, copy_rate, measure

WARM, STEPS = 3, 8
METHODS = ("", "fp8", "int8_block", "bitsandbytes_nf4")
QWEN = Case(model="qwen_image")
BLOCKS_OF_CALL_1 = 4

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
            Case(model=model, method=method, checkpointing="offload")
            for model in ("flux", "wan")
            for method in ("", "fp8", "bitsandbytes_nf4")
        ),
        5: tuple(
            replace(QWEN, method=method, compile=compiled, batch=batch)
            for method in ("", "fp8")
            for compiled in (False, True)
            for batch in (1, 4)
        ),
        6: (
            Case(model="wan", train="full", layers=4, optimizer="adamw8bit"),
            replace(QWEN, train="full", layers=12, optimizer="adamw8bit"),
        ),
        7: (QWEN, QWEN, replace(QWEN, bare=True)),
    }
)
"""What each call measures. 1: that all runs, and what a block costs. 2: the table of
cards. 3: whether copies are hidden. 4: the other families. 5: whether to compile. 6: full
training. 7: dstrain's own cost, and whether two runs are equal bit for bit."""


def lines(number: int, device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """Run a call; yield what each case gave, or why it could not be run."""
    yield {
        "call": number,
        "device": torch.cuda.get_device_name()
        if device.type == "cuda"
        else device.type,
        "torch": torch.__version__,
        "copy_gb_s": copy_rate(device) if number == 3 else None,
    }
    for case in CALLS[number]:
        if tiny:
            # Toys have few blocks; to compile these takes as long as to compile all.
            swap = -1 if case.swap else 0
            case = replace(case, layers=0, rank=2, swap=swap, compile=False)
        try:
            warm, steps = (0, 1) if tiny else (WARM, STEPS)
            yield measure(case, device, tiny, warm, steps).as_data()
        except (DstrainError, torch.OutOfMemoryError) as error:
            yield {"case": vars(case), "failed": str(error).partition("\n")[0]}
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


@click.command()
@click.argument("number", type=click.IntRange(min(CALLS), max(CALLS)))
@click.option("--tiny", is_flag=True, help="Toy sizes, on a CPU.")
@click.option("--memory", help="Fail where a card with this much memory fails: 24GB.")
def main(number: int, tiny: bool, memory: str | None) -> None:
    """Run call NUMBER and print a JSON line for each case."""
    has_gpu = torch.cuda.is_available() and not tiny
    if not has_gpu and not tiny:
        raise click.UsageError("there is no GPU here; --tiny runs on a CPU")
    if memory is not None and has_gpu:
        whole = torch.cuda.get_device_properties(0).total_memory
        share = parse_size("--memory", memory) / whole
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    for line in lines(number, torch.device("cuda" if has_gpu else "cpu"), tiny):
        click.echo(json.dumps(line))


if __name__ == "__main__":
    main()
