"""Differences of whole parameters are added exactly, under every program's names."""

from pathlib import Path

import pytest
import torch
from dstrain import LoraConfig, StateError, UsageError
from dstrain.config import LoraFile
from dstrain.lora import add_differences, read_lora
from dstrain.lora.foreign.differences import difference_table, split_differences
from dstrain.lora.key_names import Rows
from dstrain.models import METHODS, NATIVE
from dstrain.models.execution import Kept, StoredLayers
from dstrain.models.quantization.layers import LayerStore
from dstrain.plugin import CheckpointFormat, KeyMap
from torch import Tensor, nn

from tests.support.lora_family import (
    MODEL,
    ORIGINAL,
    SHAPES,
    network,
    read,
    trained,
    written,
)

PATH = Path("x.safetensors")


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_table_has_a_key_for_each_kind_of_parameter() -> None:
    """The names of Wan: `.diff_m` is LightX2V's, `.modulation.diff` ComfyUI's."""
    wan = CheckpointFormat(
        rows=(
            KeyMap("blocks.*.scale_shift_table", "blocks.*.modulation"),
            KeyMap("blocks.*.to_q", "blocks.*.q"),
        )
    )
    shapes = {
        "blocks.0.scale_shift_table": (1, 6, 4),
        "blocks.0.to_q.weight": (4, 4),
        "blocks.0.to_q.bias": (4,),
    }
    found = {str(key) for key in difference_table(wan, shapes, underscored=False)}
    assert found == {
        *("blocks.0.diff_m", "blocks.0.modulation.diff"),
        *("blocks.0.q.diff", "blocks.0.q.w_norm"),
        *("blocks.0.q.diff_b", "blocks.0.q.b_norm"),
    }
    flat = {str(key) for key in difference_table(wan, shapes, underscored=True)}
    assert {"blocks_0.diff_m", "blocks_0_q.diff_b"} <= flat
    table = difference_table(NATIVE, shapes, underscored=False)
    assert {key.layer: rows for key, rows in table.items() if key.kind == "diff_b"} == {
        "blocks.0.to_q": (Rows("blocks.0.to_q.bias", 0, 4, 0),)
    }


def test_differences_beside_lora_layers_are_those_of_the_networks_parameters(
    tmp_path: Path,
) -> None:
    """Of a fused layer each has its rows; scale and shift are the other way round."""
    bias, swapped, weight = numbers(18), numbers(12, 6), numbers(6, 3)
    tensors = {
        "diffusion_model.double.0.qkv.diff_b": bias,
        "diffusion_model.final.mod.diff": swapped,
        "diffusion_model.img_in.diff": weight,
        "diffusion_model.double.0.proj.lora_down.weight": numbers(2, 6),
        "diffusion_model.double.0.proj.lora_up.weight": numbers(6, 2),
        "diffusion_model.double.0.proj.alpha": torch.tensor(2.0),
    }
    lora = read(written(tmp_path / "x.safetensors", tensors))
    assert list(lora.layers) == ["blocks.0.attn.to_out.0"]
    found = lora.differences
    for i, part in enumerate("qkv"):
        own = found[f"blocks.0.attn.to_{part}.bias"]
        assert torch.equal(own, bias[6 * i :][:6])
    wanted = torch.cat([swapped[6:], swapped[:6]])
    assert torch.equal(found["norm_out.linear.weight"], wanted)
    assert torch.equal(found["proj_in.weight"], weight)
    assert len(found) == 5


def test_differences_of_other_shapes_are_left_out_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a model with other channels: of fused layers, too."""
    tensors = {
        "diffusion_model.double.0.qkv.diff_b": numbers(18),
        "diffusion_model.double.1.qkv.diff_b": numbers(15),
        "diffusion_model.img_in.diff": numbers(6, 4),
    }
    path = written(tmp_path / "x.safetensors", tensors)
    with pytest.raises(StateError, match="has a difference of "):
        read_lora(LoraFile(path), MODEL, {"dit": SHAPES})
    (lora,) = read_lora(LoraFile(path, skip_missing=True), MODEL, {"dit": SHAPES})
    assert sorted(lora.differences) == [
        f"blocks.0.attn.to_{part}.bias" for part in "kqv"
    ]
    said = capsys.readouterr().err
    assert "left out 2, layers that dit lacks: double.*.qkv.diff_b, img_in.diff" in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_added_in_fp32_to_parameters_below_lora_layers_too(
    dtype: torch.dtype,
) -> None:
    module = trained(LoraConfig("dit", ("to_q",), 4, 6.0)).to(dtype)
    layer = module.get_submodule("blocks.0.attn.to_q").base_layer
    before = layer.bias.detach().clone(), layer.weight.detach().clone()
    name = "blocks.0.attn.to_q"
    differences = {f"{name}.bias": numbers(6), f"{name}.weight": numbers(6, 6)}
    add_differences(module, differences, 0.3)
    for own, was, (_, difference) in zip(
        (layer.bias, layer.weight), before, differences.items(), strict=True
    ):
        assert torch.equal(own, (was.float() + 0.3 * difference).to(dtype))


def test_of_what_is_quantized_biases_can_be_changed_and_weights_not() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    store = LayerStore(Kept((StoredLayers(METHODS["int8_block"]),)), "dit")
    store(module, "0.weight", module[0].weight.detach())
    bias = module[0].bias.clone()
    with pytest.raises(
        UsageError, match=r"difference of 0\.weight, which is quantized"
    ):
        add_differences(module, {"0.bias": numbers(64), "0.weight": numbers(64, 64)})
    assert torch.equal(module[0].bias, bias)
    add_differences(module, {"0.bias": numbers(64)})
    assert torch.equal(module[0].bias, bias + numbers(64))


def test_what_is_no_difference_stays() -> None:
    tensors = {"a.diff": numbers(2), "a.diff_b": numbers(2), "a.differ": numbers(2)}
    found, others = split_differences(PATH, tensors)
    assert {str(key) for key in found} == {"a.diff", "a.diff_b"}
    assert list(others) == ["a.differ"]


def test_a_name_that_two_parameters_share_is_left_out() -> None:
    shapes = {"a.b.weight": (2, 2), "a_b.weight": (2, 2)}
    assert not difference_table(NATIVE, shapes, underscored=True)
    assert difference_table(ORIGINAL, SHAPES, underscored=True)
    assert network() is not None
