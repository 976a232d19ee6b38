"""The processes of one run: which one this is, and what they do together."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dstrain.distributed.liveness import (
    ENDED,
    FAILED,
    INTERRUPTED,
    Heartbeat,
    ignore_sigterm,
    peer_failed,
    peer_failure,
)
from dstrain.errors import Interrupted


@dataclass(frozen=True)
class ProcessGroup:
    """A thin view of an Accelerator for code that needs rank, size, a barrier and sums.

    With a meeting, waiting has no time limit; without one, the process group's.
    """

    accelerator: Any
    heartbeat: Heartbeat | None = None

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
        """Wait until every process is here; raises SystemFault if one of them has
        ended.
        """
        if self.heartbeat is not None:
            self.heartbeat.wait()
        elif self.size > 1:
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
        return bool(
            self.total(torch.tensor(float(flag), device=self.accelerator.device)).item()
        )


@contextmanager
def distributed_run(accelerator: Any) -> Iterator[ProcessGroup]:
    """Yield the world of a run; where one of several processes ends, the others end
    with SystemFault.
    """
    if accelerator.num_processes == 1:
        yield ProcessGroup(accelerator)
        return
    heartbeat = Heartbeat(
        int(accelerator.process_index), int(accelerator.num_processes)
    )
    why = ""
    try:
        yield ProcessGroup(accelerator, heartbeat)
    except BaseException as error:
        ignore_sigterm()
        asked = isinstance(error, Interrupted | KeyboardInterrupt)
        # Where another is lost, the signal was the launcher's, which ends all when one
        # has ended.
        what = peer_failure(error) or (asked and heartbeat.peer_lost() and ENDED)
        if (
            what and heartbeat.peer_interrupted()
        ):  # it was in a collective, where no signal reaches it
            asked, what = True, ""
            error = KeyboardInterrupt()
        why = INTERRUPTED if asked and not what else FAILED
        if what:
            raise peer_failed(what) from error
        raise error
    finally:
        heartbeat.leave(why)
