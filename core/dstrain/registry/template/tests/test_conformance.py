"""The family my_model passes the conformance kit."""

from dstrain.testing import Conformance


class TestConformance(Conformance):
    """Every test of the kit, for every variant."""

    family = "my_model"
