"""Feature caches of the families `stored` and `tiny`."""

from tests.support.filled_caches import here, place, spare, two_plans  # noqa: F401  # fixtures
