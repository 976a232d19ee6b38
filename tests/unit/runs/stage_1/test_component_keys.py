"""What values depend on beside their inputs has a digest."""

from dataclasses import replace
from pathlib import Path

from dstrain.plugin import Column
from dstrain.runs.stage_1.component_keys import code_of_rows

from tests.support.caching_project import write_place


def accept(*_: object) -> None:
    """A check that refuses nothing."""


def refuse(*_: object) -> None:
    """A check."""
    raise ValueError("refused")


def test_the_code_of_a_check_counts(tmp_path: Path) -> None:
    setup = write_place(tmp_path / "place").setup()
    digests = {code_of_rows(setup)}
    inputs = setup.spec.inputs.items()
    name, column = next(one for one in inputs if isinstance(one[1], Column))
    assert isinstance(column, Column)
    for check in (accept, refuse):
        other = {**setup.spec.inputs, name: replace(column, check=check)}
        changed = replace(setup, spec=replace(setup.spec, inputs=other))
        digests.add(code_of_rows(changed))
    assert len(digests) == 3
    assert code_of_rows(setup) in digests
