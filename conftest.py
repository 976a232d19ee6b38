"""No test asks a hub: models are fetched only from the server that a test starts itself
(see `hub_server`).
"""

import os
from collections.abc import Iterator

import pytest
from dstrain.console import logging_to_stderr

os.environ["DSTRAIN_SKIP_DOWNLOAD"] = "True"

pytest_plugins = ["tests.support.fixtures"]


@pytest.fixture(autouse=True)
def lines_on_stderr() -> Iterator[None]:
    """Show what a run logs on stderr, where tests read it as its user does."""
    with logging_to_stderr():
        yield
