"""Projects that runs read and do not change, and a signal in the middle of a run."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.runs import warm_project


@pytest.fixture(scope="module")
def here(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project without dropout."""
    return warm_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def dropping(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose denoiser has dropout."""
    return warm_project(tmp_path_factory.mktemp("dropping"), dropout=0.3)


@pytest.fixture
def ask_to_stop() -> Iterator[Callable[[], None]]:
    """Return a function that sends this process SIGTERM, which a run has to handle."""

    def fail(number: int, frame: object) -> None:
        raise AssertionError("no run handles the signal")

    before = signal.signal(signal.SIGTERM, fail)
    yield lambda: os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
