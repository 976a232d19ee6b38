"""Write where a run is to logs/state.json, for programs that watch several."""

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from dstrain.console import redacted, shell_command
from dstrain.runs.checkpoints.directory import STATUS
from dstrain.runs.observers import Observer, WatchedRun
from dstrain.storage import write_json

SECONDS = 1.0
"""The file is replaced at most as often as this."""


class Status(Observer):
    """The file, replaced whole: stage, step, total, speed; host, process id, its start
    time and command; and at the end how the run ended, with its message.
    """

    def __init__(self, stage: str, folder: Path) -> None:
        """Write to a folder, from `start` on."""
        self.path = folder / STATUS
        self.record: dict[str, Any] = {
            "stage": stage or "unsplit",
            "host": socket.gethostname(),
            "process": os.getpid(),
            "started": psutil.Process().create_time(),
            "command": redacted(shell_command(sys.argv)),
        }
        self.written = 0.0

    def start(self, run: WatchedRun) -> None:
        """Write that the run goes on."""
        self._write(run)

    def step(self, run: WatchedRun, numbers: Mapping[str, float]) -> None:
        """Note the step, and write it unless that was done within the last second."""
        self.record["samples_per_second"] = numbers["samples_per_second"]
        self.record["loss"] = numbers["loss"]
        if time.monotonic() - self.written >= SECONDS:
            self._write(run)

    def end(self, run: WatchedRun, how: str) -> None:
        """Write how the run ended."""
        self.record |= {"ended": how, "message": redacted(run.message)}
        self._write(run)

    def _write(self, run: WatchedRun) -> None:
        self.record |= {"step": run.step, "total_steps": run.total_steps}
        write_json(self.path, self.record)
        self.written = time.monotonic()
