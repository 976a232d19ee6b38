"""Feature caches of the families `stored` and `tiny`."""

from tests.support.filled_caches import (  # noqa: F401  # fixtures
    here,
    place,
    spare,
    two_plans,
)
