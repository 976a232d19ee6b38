"""my_model keeps the contract of a family."""

from dstrain.testing import Conformance


class TestConformance(Conformance):
    """Every test of the kit, for every variant."""

    family = "my_model"
