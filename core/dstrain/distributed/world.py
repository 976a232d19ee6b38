"""Give the code of a run its rank, barriers and sums over all processes."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from dstrain.distributed.liveness import FAILED, Heartbeat
from dstrain.distributed.peers import (
    ENDED,
    INTERRUPTED,
    ignore_sigterm,
    peer_failed,
    peer_failure,
)
from dstrain.distributed.signals import is_interrupt
from dstrain.errors import Interrupted


@dataclass(frozen=True)
class ProcessGroup:
    """A thin view of an Accelerator for code that needs rank, size, a barrier and sums."""

    accelerator: Accelerator
    heartbeat: Heartbeat | None = None
    """Waits without a time limit; without it the process group's limit applies."""

    @cached_property
    def rank(self) -> int:
        """Return the number of this process."""
        return int(self.accelerator.process_index)

    @cached_property
    def size(self) -> int:
        """Return the number of processes."""
        return int(self.accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        """Return whether this process writes what is written once."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until every process is here; raises SystemFault if one has ended."""
        if self.heartbeat is not None:
            self.heartbeat.wait()
        elif self.size > 1:
            self.accelerator.wait_for_everyone()

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""
        if self.size == 1:
            return value
        summed: Tensor = self.accelerator.reduce(value, reduction="sum")
        return summed

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        if self.size == 1:
            return flag
        number = torch.tensor(float(flag), device=self.accelerator.device)
        return bool(self.total(number).item())

    def union(self, names: Collection[str]) -> frozenset[str]:
        """Return the names of all processes."""
        if self.size == 1:
            return frozenset(names)
        return frozenset(gather_object(sorted(names)))


@contextmanager
def distributed_run(accelerator: Accelerator) -> Iterator[ProcessGroup]:
    """Yield the processes of a run. If one of several ends, the others raise
    SystemFault, or KeyboardInterrupt if it was interrupted.
    """
    if accelerator.num_processes == 1:
        yield ProcessGroup(accelerator)
        return
    heartbeat = Heartbeat(accelerator.process_index, accelerator.num_processes)
    why = ""
    try:
        yield ProcessGroup(accelerator, heartbeat)
    except BaseException as error:
        ignore_sigterm()
        asked = isinstance(error, Interrupted) or is_interrupt(error)
        what = peer_failure(error)
        if asked and not what and heartbeat.peer_ended() == FAILED:
            # The signal was the launcher's, which ends all processes when one has ended.
            what = ENDED
        if what and heartbeat.peer_ended() == INTERRUPTED:
            # This process was in a collective, where no signal reaches it.
            asked = True
            what = ""
            error = KeyboardInterrupt()
        why = INTERRUPTED if asked and not what else FAILED
        if what:
            raise peer_failed(what) from error
        raise error
    finally:
        heartbeat.leave(why)
