"""Fixtures of the tests of core: how many trials of a promise run, and how they are counted."""

from collections.abc import Callable

import pytest
from dstrain.lazy import own_process

from tests.support.selection import TENTH


def pytest_configure(config: pytest.Config) -> None:
    # As a command line does, tests import no library that quantizes unless they use it.
    own = own_process()
    own.__enter__()
    config.add_cleanup(lambda: own.__exit__(None, None, None))


@pytest.fixture
def trials(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """Total -> how many of so many trials this run makes: all, or a tenth, but one at
    least.
    """

    def share(total: int) -> int:
        takes_all = request.config.getoption("--all-cases")
        count = total if takes_all else max(1, total // TENTH)
        request.node.user_properties.append(("trials", count))
        return count

    return share


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Callable[[str, int], None]:
    """Note a number beside the trials, such as ("kills", 2): the table has its sum."""
    return lambda name, number: request.node.user_properties.append((name, number))


@pytest.fixture
def wide_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of a page is broken: the paths of tests are long."""
    monkeypatch.setattr("dstrain.console.PAGE_WIDTH", 1000)
