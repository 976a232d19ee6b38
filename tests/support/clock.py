"""The clock, as it is some time after a test's files were written."""

import time

import pytest


def settle(patch: pytest.MonkeyPatch) -> None:
    """Let files that were written just now be written ten seconds ago: what is computed
    from a file is remembered if its times can be trusted.
    """
    now = time.time_ns
    patch.setattr(time, "time_ns", lambda: now() + 10 * 10**9)
