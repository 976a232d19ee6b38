"""What stage 1 loaded is gone before stage 2 loads; what something keeps is named."""

import gc

import pytest
import torch
from dstrain.runs.stage_1.freeing import LoadedWeights
from torch import nn


def networks() -> dict[str, object]:
    """An encoder of 128 bytes, another of 64 with a buffer, and a tokenizer."""
    vae = nn.Module()
    vae.register_buffer("mean", torch.zeros(16))
    text_encoder = nn.Linear(8, 4, bias=False)
    return {"text_encoder": text_encoder, "vae": vae, "tokenizer": object()}


def test_weights_that_nobody_uses_are_gone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    components = networks()
    weights = LoadedWeights.of(components)
    assert weights.in_memory() == {"text_encoder": 128, "vae": 64}
    components.clear()
    weights.free()
    assert weights.in_memory() == {}
    assert caplog.messages == ["encoders freed: 0.2 KiB of 0.2 KiB"]


def test_networks_in_a_circle_of_references_are_collected() -> None:
    components = networks()
    components["vae"].__dict__["pipeline"] = components
    weights = LoadedWeights.of(components)
    gc.disable()
    try:
        del components
        assert weights.in_memory().keys() == {"text_encoder", "vae"}
        weights.free()
        assert weights.in_memory() == {}
    finally:
        gc.enable()


def test_a_component_whose_weights_something_keeps_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    components = networks()
    encoder = components["text_encoder"]
    assert isinstance(encoder, nn.Linear)
    # The parameter is gone, its bytes are not.
    view = encoder.weight.detach().t()
    weights = LoadedWeights.of(components)
    del encoder
    components.clear()
    weights.free()
    assert weights.in_memory() == {"text_encoder": 128}
    (line,) = caplog.messages
    assert line.startswith(
        "encoders freed: 0.1 KiB of 0.2 KiB; something keeps weights"
    )
    assert "of text_encoder in memory" in line
    del view
    weights.free()
    assert weights.in_memory() == {}


def test_weights_that_two_layers_share_are_counted_once() -> None:
    network = nn.ModuleList([nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)])
    network[1].weight = network[0].weight
    assert LoadedWeights.of({"text_encoder": network}).in_memory() == {
        "text_encoder": 128
    }
