"""A command line that a test adds to, and the same as a configuration."""

import io
from pathlib import Path
from typing import Any

from dstrain import TrainConfig

BASE = (
    *("--model", "faky", "--toy"),
    *("--dataset_base_path", "data", "--output_path", "out"),
)


def toy_config(**changes: Any) -> TrainConfig:
    """A configuration with what every run needs."""
    needed: dict[str, Any] = {
        "model": "faky",
        "toy": True,
        "dataset_base_path": Path("data"),
        "output_path": Path("out"),
    }
    return TrainConfig(**needed | changes)


class Terminal(io.StringIO):
    """A terminal that keeps what it is shown."""

    def isatty(self) -> bool:
        return True
