"""What the ordinary suite tests of many alike cases; `make everything` tests all."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def cases(rows: Iterable[Any], is_everyday: Callable[[Any], bool]) -> list[Any]:
    """Return the values of every case, those that are not everyday ones marked as left to
    `make everything`. A tuple has the values of several parameters.
    """
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else (row,)),
            marks=() if is_everyday(row) else pytest.mark.drawn,
        )
        for row in rows
    ]
