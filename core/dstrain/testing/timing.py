"""Count the CPU seconds of each variant's tests, and print them after the last test."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PLUGIN = "dstrain-conformance"


class VariantTimes:
    """A pytest plugin that adds up CPU seconds by name."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        """Print a line per name."""
        for name, seconds in self.spent.items():
            terminalreporter.write_line(
                f"conformance of {name}: {seconds:.1f} CPU seconds"
            )


@contextmanager
def count(config: pytest.Config, name: str) -> Iterator[None]:
    """Add the CPU time that this process spends meanwhile, in all its threads, to that
    of `name`.
    """
    if not config.pluginmanager.hasplugin(PLUGIN):
        config.pluginmanager.register(VariantTimes(), PLUGIN)
    seconds: VariantTimes = config.pluginmanager.getplugin(PLUGIN)
    start = time.process_time()
    yield
    seconds.spent[name] = seconds.spent.get(name, 0.0) + time.process_time() - start
