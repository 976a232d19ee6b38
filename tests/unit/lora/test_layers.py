"""What a layer makes of a weight, and what identifies the layers of a run."""

from dataclasses import asdict

import peft
import pytest
import torch
from dstrain import LoraConfig, Trainables, TrainConfig
from dstrain.lora import merged
from dstrain.lora.layers import LoraLayer, row_lengths
from torch import nn


def dora(linear: nn.Linear) -> tuple[nn.Module, LoraLayer]:
    """A layer of peft's own with DoRA, and what it consists of."""
    torch.manual_seed(1)
    module = nn.Sequential(linear)
    settings = peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=["0"], use_dora=True, init_lora_weights=False
    )
    wrapped = peft.inject_adapter_in_model(settings, module)
    layer = wrapped[0]
    lengths = layer.lora_magnitude_vector["default"].weight
    with torch.no_grad():
        lengths.mul_(torch.rand(len(lengths)) + 0.5)
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return wrapped, LoraLayer(down.detach(), up.detach(), 3.0, lengths.detach())


@torch.no_grad()
def test_dora_changes_a_weight_as_peft_does() -> None:
    linear = nn.Linear(5, 4)
    weight = linear.weight.clone()
    wrapped, layer = dora(linear)
    x = torch.randn(3, 5)
    got = x @ merged(nn.Linear(5, 4), weight, layer).T + linear.bias
    assert torch.allclose(got, wrapped(x), atol=1e-5)
    assert layer.magnitude is not None
    assert torch.allclose(row_lengths(layer.changed(weight)), layer.magnitude)


@torch.no_grad()
@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0, 2.0, -1.0])
def test_strength_scales_all_that_dora_changes(strength: float) -> None:
    linear = nn.Linear(5, 4)
    weight = linear.weight.clone()
    _, layer = dora(linear)
    wanted = weight + strength * (layer.changed(weight) - weight)
    found = layer.at_strength(weight, strength)
    assert torch.allclose(found.changed(weight), wanted, atol=1e-5)


def test_an_alpha_that_is_part_of_up_changes_no_dora() -> None:
    linear = nn.Linear(5, 4)
    weight = linear.weight.detach()
    _, layer = dora(linear)
    folded = layer.folded()
    assert folded.scale == 1
    assert torch.allclose(folded.changed(weight), layer.changed(weight), atol=1e-6)


def test_what_identifies_plain_layers_is_what_it_was() -> None:
    """States of earlier versions contain a digest of it."""
    plain = LoraConfig("dit", ("to_q",), 4, 6.0)
    assert plain.identity == {
        "component": "dit",
        "targets": ("to_q",),
        "rank": 4,
        "alpha": 6.0,
    }
    changed = LoraConfig("dit", ("to_q",), 4, 6.0, type="dora", dropout=0.1)
    assert changed.identity.items() >= {"type": "dora", "dropout": 0.1}.items()
    assert "ranks" not in changed.identity
    trained = Trainables(("vae",), (plain,))
    assert trained.identity == {"full": ("vae",), "lora": [plain.identity]}
    assert asdict(changed).keys() >= changed.identity.keys()


def test_options_become_ranks_and_alphas() -> None:
    def of(**given: object) -> LoraConfig:
        options = TrainConfig(model="m", **given)  # type: ignore[arg-type]
        return LoraConfig.of(options, "dit", ("a",))

    assert of() == LoraConfig("dit", ("a",), 32, 32.0)
    assert of(lora_rank=8, lora_alpha=4) == LoraConfig("dit", ("a",), 8, 4.0)
    assert of(lora_rank="ff=8") == LoraConfig("dit", ("a",), 32, None, (("ff", 8),))
    assert of(lora_rank="4,ff=8", lora_alpha="2,ff=1") == LoraConfig(
        "dit", ("a",), 4, 2.0, (("ff", 8),), (("ff", 1.0),)
    )
