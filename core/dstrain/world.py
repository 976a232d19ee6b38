"""The processes of one run: which one this is, and what they do together."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class World:
    """A thin view of an Accelerator for code that needs rank, size, a barrier and sums."""

    accelerator: Any

    @property
    def rank(self) -> int:
        """This process's number."""
        return int(self.accelerator.process_index)

    @property
    def size(self) -> int:
        """Number of processes."""
        return int(self.accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.size > 1:
            self.accelerator.wait_for_everyone()

    def total(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.size == 1:
            return value
        summed: Tensor = self.accelerator.reduce(value, reduction="sum")
        return summed

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        if self.size == 1:
            return flag
        return bool(self.total(torch.tensor(float(flag), device=self.accelerator.device)).item())

    def say(self, line: str) -> None:
        """Print a line once, on the main process."""
        if self.is_main:
            print(line, file=sys.stderr, flush=True)


def default_device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
