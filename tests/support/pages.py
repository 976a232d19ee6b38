"""Pages of other widths than that of a terminal."""

import pytest


def set_page_width(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Break no line of a page below this width, in each module that breaks some."""
    for module in ("console", "config.serialize", "runs.memory.report"):
        monkeypatch.setattr(f"dstrain.{module}.PAGE_WIDTH", columns)
