"""Pages of other widths than that of a terminal."""

import pytest


def set_page_width(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Break no line of a page below this width."""
    monkeypatch.setattr("dstrain.console.PAGE_WIDTH", columns)
