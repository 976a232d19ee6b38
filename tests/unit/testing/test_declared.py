"""A family whose declarations do not hold fails the kit."""

from pathlib import Path

import pytest
from dstrain.testing.declared import Declared

from tests.support.kit import breaches_of, fails


@pytest.mark.parametrize("breach", breaches_of(Declared))
def test_a_breach_is_seen(breach: str, site: Path) -> None:
    assert fails(breach, site)
