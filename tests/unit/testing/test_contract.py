"""The conformance kit passes a family that keeps the contract, and each of its tests
has a breach that it sees.
"""

from pathlib import Path

from dstrain.testing import Conformance

from tests.support.kit import BREACHES, install_family, run_kit


def test_a_new_family_keeps_the_whole_contract(site: Path) -> None:
    outcomes = run_kit(install_family("fine", site))
    assert outcomes.failed == set()
    for name in BREACHES:
        assert any(name in test for test in outcomes.passed) or "published" in name, (
            name
        )


def test_every_test_of_the_kit_has_a_breach_that_it_sees() -> None:
    tests = [name for name in dir(Conformance) if name.startswith("test_")]
    assert [
        name for name in tests if sum(breach in name for breach in BREACHES) != 1
    ] == []
