"""A method is identified by its name, and by its version where that is not the first."""

from dataclasses import replace

from dstrain.plugin import QuantizationMethod


def test_a_method_of_another_version_is_another_one() -> None:
    first = QuantizationMethod("half", lambda layer, weight: layer, lambda shape: 1)
    assert first.identity == "half" and first.gives_gradient
    assert replace(first, version=2).identity == "half (version 2)"
