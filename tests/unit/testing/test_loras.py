"""Readers apply LoRA files by the published rules of other programs."""

import pytest
import torch
from dstrain import LoraConfig
from dstrain.testing.loras import LoraReader, trained
from torch import nn


def network() -> nn.Module:
    """Two linear layers, one of them below another name."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2)))


def test_a_layer_is_named_with_prefix_and_underscores() -> None:
    assert LoraReader(None, "lora_unet_", underscored=True).layer("1.0.weight") == (
        "lora_unet_1_0"
    )
    assert LoraReader(None, "diffusion_model.").layer("1.0.weight") == (
        "diffusion_model.1.0"
    )


@pytest.mark.parametrize(("alpha", "scale"), [(None, 1.0), (6.0, 1.5)])
def test_a_lora_is_added_by_alpha_over_rank_and_unknown_keys_are_left(
    alpha: float | None, scale: float
) -> None:
    reader = LoraReader(None, "lora_unet_", underscored=True)
    plain = network()
    file = reader.lora(plain, rank=4, alpha=alpha)
    changed, left = reader.read(plain, {**file, "lora_unet_9.alpha": torch.ones(())})
    assert left == ["lora_unet_9.alpha"]
    down, up = ("lora_A", "lora_B") if alpha is None else ("lora_down", "lora_up")
    names = [name for name in file if name.startswith("lora_unet_0.")]
    (below,) = (file[name].double() for name in names if f".{down}." in name)
    (above,) = (file[name].double() for name in names if f".{up}." in name)
    wanted = plain.state_dict()["0.weight"].double() + scale * (above @ below)
    assert torch.equal(changed.state_dict()["0.weight"], wanted)
    assert torch.equal(
        plain.state_dict()["0.weight"].double(), network()[0].weight.double()
    )  # type: ignore[index]  # a Sequential has items


def test_no_weight_of_the_layers_drawn_is_zero() -> None:
    made = trained(network(), LoraConfig("net", ("0",), 2, 4.0), {})
    drawn = {name: one for name, one in made.named_parameters() if "lora_" in name}
    assert len(drawn) >= 2
    assert all(weight.all() for weight in drawn.values())
