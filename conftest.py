"""No test asks a hub: models are fetched only from the server that a test starts itself
(see `hub_server`).
"""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from dstrain.console import logging_to_stderr
from dstrain.registry import load_family

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

    A family's test class names those that the ordinary suite tests in `everyday`, each
    with its denoiser and with the components that no earlier one has; other tests mark
    what it leaves out.
    """
    if config.getoption("--all-variants"):
        return
    first: dict[tuple[str, str], object] = {}
    kept = []
    left = []
    for item in items:
        everyday = getattr(getattr(item, "cls", None), "everyday", None)
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        case = parameters.get("case")
        variant = parameters.get("variant", getattr(case, "variant", None))
        skipped = everyday is not None and variant not in (None, *everyday)
        if everyday is not None and not skipped:
            test = item.nodeid.partition("[")[0]
            names = others(item.cls.family, parameters)
            by = [first.setdefault((test, name), variant) for name in names]
            skipped = bool(by) and variant not in by
        is_marked = item.get_closest_marker("all_variants") is not None
        (left if skipped or is_marked else kept).append(item)
    items[:] = kept
    if left:
        config.hook.pytest_deselected(items=left)


def others(family: str, parameters: Mapping[str, Any]) -> list[str]:
    """Return the components that a test of the conformance kit is of, but the denoiser."""
    trained = parameters.get("trained")
    named = [parameters.get(name) for name in ("component", "adapted")]
    names = trained.components if trained else [one for one in named if one]
    return [name for name in names if name != load_family(family).default_trainable]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Leave what has been imported out of the collector's sight, after each file's tests.

    A run collects garbage several times, and looks through the millions of objects of
    libraries each time.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
