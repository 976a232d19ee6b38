"""A family that does not train as promised fails the kit."""

from pathlib import Path

import pytest
from dstrain.testing.trainable import Trainable

from tests.support.kit import breaches_of, fails


@pytest.mark.parametrize("breach", breaches_of(Trainable))
def test_a_breach_is_seen(breach: str, site: Path) -> None:
    assert fails(breach, site)
