"""No test asks a hub: models are fetched only from the server that a test starts itself
(see `hub_server`).
"""

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest
from dstrain.console import logging_to_stderr

os.environ["DSTRAIN_SKIP_DOWNLOAD"] = "True"
# Nothing is remembered from one session of tests to another.
os.environ["DSTRAIN_CACHE"] = tempfile.mkdtemp(prefix="dstrain-tests-")
atexit.register(shutil.rmtree, os.environ["DSTRAIN_CACHE"], ignore_errors=True)
# A shell starts its background jobs with SIGINT ignored, which tests of Ctrl-C need.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests kill processes, which loses nothing that was written; only a machine that dies loses
# what is not on its disk. A run waits for the disk about 30 times, a quarter of its time.
# That it does, and in which order, tests see that put their own function here.
os.fsync = lambda descriptor: None

pytest_plugins = ["tests.support.fixtures"]


@pytest.fixture(autouse=True)
def lines_on_stderr() -> Iterator[None]:
    """Show what a run logs on stderr, where tests read it as its user does."""
    with logging_to_stderr():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make conformance`."""
    parser.addoption(
        "--all-variants",
        action="store_true",
        help="Run the conformance kit for every variant, not for one per mechanism.",
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave variants whose mechanisms another one has to `--all-variants`.

    A family's test class names those that the ordinary suite tests in `everyday`; other
    tests mark those that it leaves out.
    """
    if config.getoption("--all-variants"):
        return
    kept = []
    left = []
    for item in items:
        everyday = getattr(getattr(item, "cls", None), "everyday", None)
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        case = parameters.get("case")
        variant = parameters.get("variant", getattr(case, "variant", None))
        skipped = everyday is not None and variant not in (None, *everyday)
        is_marked = item.get_closest_marker("all_variants") is not None
        (left if skipped or is_marked else kept).append(item)
    items[:] = kept
    if left:
        config.hook.pytest_deselected(items=left)
