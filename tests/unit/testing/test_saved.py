"""A family whose files or images differ fails the kit."""

from pathlib import Path

import pytest
from dstrain.testing.saved import Saved

from tests.support.kit import AGREES, breaches_of, fails, install_family, run_kit


@pytest.mark.parametrize("breach", breaches_of(Saved))
def test_a_breach_is_seen(breach: str, site: Path) -> None:
    assert fails(breach, site)


def test_a_family_equal_to_its_published_pipeline_passes(site: Path) -> None:
    """Here the published pipeline is the family's own."""
    tests = install_family(
        "published", site, (("../tests/test_conformance.py", "    family", AGREES),)
    )
    outcomes = run_kit(tests, "every_step_equals")
    assert (len(outcomes.passed), outcomes.failed) == (2, set())
