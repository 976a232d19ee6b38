"""CPU seconds are added up by name and printed once at the end."""

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from dstrain.testing.timing import PLUGIN, count


class Reporter:
    """What pytest prints its summary with."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write_line(self, line: str) -> None:
        self.lines.append(line)


def test_the_seconds_of_one_name_add_up_and_another_has_its_own() -> None:
    manager = pytest.PytestPluginManager()
    config = cast(pytest.Config, SimpleNamespace(pluginmanager=manager))
    for name in ("fine base", "fine other", "fine base"):
        with count(config, name):
            end = time.process_time() + 0.02
            while time.process_time() < end:
                pass
    times: Any = manager.getplugin(PLUGIN)
    assert list(times.spent) == ["fine base", "fine other"]
    assert times.spent["fine base"] >= 0.04 > times.spent["fine other"] >= 0.02
    reporter = Reporter()
    times.pytest_terminal_summary(cast(pytest.TerminalReporter, reporter))
    assert [line.partition(": ")[0] for line in reporter.lines] == [
        "conformance of fine base",
        "conformance of fine other",
    ]
    assert all(line.endswith(" CPU seconds") for line in reporter.lines)
