"""docs/reference/messages.md has the messages that commands print."""

import runpy

from tests.support import ROOT

REFERENCE = ROOT / "docs/reference"


def test_the_page_has_the_messages_that_its_commands_print() -> None:
    made = runpy.run_path(str(REFERENCE / "make_messages.py"))["page"]()
    written = (REFERENCE / "messages.md").read_text(encoding="utf-8")
    assert made == written, "run: python docs/reference/make_messages.py, and read it"
