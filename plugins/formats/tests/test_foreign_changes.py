"""What files of other programs have and dstrain does not train is merged exactly: LoHa, a
LoKr of several layers at once, and differences of whole parameters.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from dstrain import LoraConfig, Pipeline, StateError, UsageError
from dstrain.config import LoraFile
from dstrain.lora import merge, read_lora
from dstrain.plugin import CheckpointFormat, KeyMap
from dstrain.plugin.lora import groups_in
from dstrain_formats.differences import Difference
from dstrain_formats.reading import OtherNames
from torch import Tensor, nn

from tests.support.lora_family import (
    COMPONENTS,
    MODEL,
    SHAPES,
    merge_layers,
    network,
    output,
    read,
    trained,
    written,
)
from tests.support.stored_weights import halved

PATH = Path("x.safetensors")
FIRST = "blocks.0.attn.to_"


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def under(name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{part}": one for part, one in parts.items()}


def loha(rows: int, columns: int = 6, rank: int = 2) -> dict[str, Tensor]:
    shapes = {"a": (rows, rank), "b": (rank, columns)}
    return {
        f"hada_w{n}_{end}": numbers(*shapes[end], seed=n)
        for n in (1, 2)
        for end in "ab"
    }


def changes(module: Any) -> dict[str, Tensor]:
    """What the weights of the first block's q, k and v are more than they were."""
    names = [f"{FIRST}{part}.weight" for part in "qkv"]
    before = network()
    return {
        name: module.get_parameter(name) - before.get_parameter(name) for name in names
    }


@torch.no_grad()
def test_a_loha_acts_as_that_of_peft(tmp_path: Path) -> None:
    """It trains LyCORIS' formula; its names are those of LyCORIS but for the adapter."""
    config = peft.LoHaConfig(r=2, alpha=3, target_modules=["0"], init_weights=False)
    wanted: Any = peft.inject_adapter_in_model(config, nn.Sequential(nn.Linear(6, 6)))
    own = {name: getattr(wanted[0], name)["default"].clone() for name in loha(6)}
    own["alpha"] = torch.tensor(3.0)
    path = written(tmp_path / PATH, under(f"transformer.{FIRST}q", own))
    module = network()
    merge_layers(module, read(path).layers, 0.5)
    found = changes(module)[f"{FIRST}q.weight"]
    delta = wanted[0].get_delta_weight("default")
    assert torch.allclose(found, 0.5 * delta, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_a_product_of_several_layers_at_once_is_merged_into_each(
    kind: str, tmp_path: Path
) -> None:
    if kind == "loha":
        own = {**loha(18), "alpha": torch.tensor(3.0)}
        first, second = (own[f"hada_w{n}_a"] @ own[f"hada_w{n}_b"] for n in (1, 2))
        product = 1.5 * first * second
    else:
        own = {"lokr_w1": numbers(6, 2), "lokr_w2": numbers(3, 3)}
        product = torch.kron(own["lokr_w1"], own["lokr_w2"])
    path = written(tmp_path / PATH, under("lora_unet_double_0_qkv", own))
    lora = read(path)
    assert not lora.layers
    module = network()
    merge(module, lora.merged, 0.5)
    for i, change in enumerate(changes(module).values()):
        assert torch.allclose(change, 0.5 * product[6 * i :][:6], atol=1e-5)
    with pytest.raises(StateError, match=f"{FIRST}q.weight, {FIRST}k"):
        lora.refuse_merged(path, "")
    tall = {name: torch.cat([one, one]) for name, one in own.items() if "w1" in name}
    written(path, under("lora_unet_double_0_qkv", own | tall))
    with pytest.raises(StateError, match="double_0_qkv"):
        read(path)


@torch.no_grad()
def test_what_changes_one_weight_twice_is_added_up(tmp_path: Path) -> None:
    """As a program does that saves LoRA and what it changed of the whole weight."""
    product, whole = (
        {"lokr_w1": numbers(6, 2), "lokr_w2": numbers(3, 3)},
        numbers(18, 6),
    )
    tensors = under("lora_unet_double_0_qkv", product | {"diff": whole})
    lora = read(written(tmp_path / PATH, tensors))
    module = network()
    merge(module, lora.merged, 0.5)
    wanted = 0.5 * (torch.kron(*product.values()) + whole)
    for i, change in enumerate(changes(module).values()):
        assert torch.allclose(change, wanted[6 * i :][:6], atol=1e-5)


def test_alpha_of_some_layers_alone_is_refused(tmp_path: Path) -> None:
    """Of one type or of several: nothing says what the others' alpha was."""
    own = {**loha(6), "alpha": torch.tensor(3.0)}
    pair = {"lora_down.weight": torch.ones(2, 6), "lora_up.weight": torch.ones(6, 2)}
    for silent in (loha(6), pair):
        tensors = under(f"transformer.{FIRST}q", own)
        tensors |= under(f"transformer.{FIRST}k", silent)
        with pytest.raises(StateError, match=rf"1 of 2 .*\n.*: {FIRST}k"):
            read(written(tmp_path / PATH, tensors))


def test_lora_and_lokr_in_one_file_are_both_added(tmp_path: Path) -> None:
    tensors = {
        "lycoris_blocks_0_attn_to_k.lokr_w1": numbers(2, 3),
        "lycoris_blocks_0_attn_to_k.lokr_w2": numbers(3, 2),
        "lycoris_blocks_0_attn_to_q.lora_down.weight": numbers(2, 6),
        "lycoris_blocks_0_attn_to_q.lora_up.weight": numbers(6, 2),
        "lycoris_blocks_0_attn_to_q.alpha": torch.tensor(3.0),
    }
    path = written(tmp_path / PATH, tensors)
    spec: Any = SimpleNamespace(unused_parameters={}, variant="base")
    pipeline = Pipeline(spec, MODEL, {"dit": network()})
    pipeline.load_lora(path, 0.5)
    whole = network()
    merge_layers(whole, read(path).layers, 0.5)
    found = output(pipeline.components["dit"])
    assert torch.allclose(found, output(whole), atol=1e-5)
    assert not torch.allclose(found, output(network()), atol=1e-3)


WAN = CheckpointFormat(
    rows=(
        KeyMap("blocks.*.scale_shift_table", "blocks.*.modulation"),
        KeyMap("blocks.*.to_q", "blocks.*.q"),
    )
)
OF_WAN = (replace(COMPONENTS[0], formats=(WAN,)), *COMPONENTS[1:])
FAMILY = replace(MODEL, components=f"{__name__}:OF_WAN")


@pytest.mark.parametrize("prefix", ["diffusion_model.", "lora_unet_"])
@pytest.mark.parametrize(
    ("key", "parameter"),
    [
        ("blocks.0.diff_m", "blocks.0.scale_shift_table"),
        ("blocks.0.modulation.diff", "blocks.0.scale_shift_table"),
        ("blocks.0.q.diff", "blocks.0.to_q.weight"),
        ("blocks.0.q.w_norm", "blocks.0.to_q.weight"),
        ("blocks.0.q.diff_b", "blocks.0.to_q.bias"),
        ("blocks.0.q.b_norm", "blocks.0.to_q.bias"),
        ("blocks.0.to_q.diff_b", "blocks.0.to_q.bias"),
        ("blocks.0.q.bias.diff", None),
        ("blocks.0.q.differ", None),
    ],
)
def test_every_kind_of_difference_has_a_name(
    key: str, parameter: str | None, prefix: str, tmp_path: Path
) -> None:
    """The names of Wan: `.diff_m` is LightX2V's, `.modulation.diff` ComfyUI's."""
    shapes = {
        "blocks.0.scale_shift_table": (1, 6, 4),
        "blocks.0.to_q.weight": (4, 4),
        "blocks.0.to_q.bias": (4,),
    }
    layer, _, kind = key.rpartition(".")
    if prefix.endswith("_"):
        layer = layer.replace(".", "_")
    difference = numbers(*shapes[parameter or "blocks.0.to_q.bias"])
    # Axes of length 1 may be more or fewer.
    tensors = {f"{prefix}{layer}.{kind}": difference.squeeze(0)}
    path = written(tmp_path / PATH, tensors)
    file = LoraFile(path, component="dit", skip_missing=True)
    if parameter is None:
        with pytest.raises(StateError):
            read_lora(file, FAMILY, {"dit": shapes})
        return
    (lora,) = read_lora(file, FAMILY, {"dit": shapes})
    assert list(lora.merged) == [parameter]
    assert torch.equal(lora.merged[parameter].tensor, difference)


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
    lora = read(written(tmp_path / PATH, tensors))
    assert list(lora.layers) == ["blocks.0.attn.to_out.0"]
    wanted = {
        f"{FIRST}{part}.bias": bias[6 * i :][:6] for i, part in enumerate("qkv")
    } | {
        "norm_out.linear.weight": torch.cat([swapped[6:], swapped[:6]]),
        "proj_in.weight": weight,
    }
    assert lora.merged.keys() == wanted.keys()
    for name, one in wanted.items():
        assert torch.equal(lora.merged[name].tensor, one)
    (group,) = groups_in(PATH, tensors, MODEL, OtherNames())
    assert len(group.layers) == 4
    for key in ("double.0.qkv.b_norm", "double.0.qkv.diff"):
        more = {f"diffusion_model.{key}": bias}
        with pytest.raises(StateError, match=f"{FIRST}q"):
            read(written(tmp_path / PATH, tensors | more))


def test_differences_of_other_shapes_are_left_out_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a model with other channels: of fused layers, too."""
    tensors = {
        "diffusion_model.double.0.qkv.diff_b": numbers(18),
        "diffusion_model.double.1.qkv.diff_b": numbers(15),
        "diffusion_model.double.1.proj.diff": numbers(6, 6),
        "diffusion_model.img_in.diff": numbers(6, 4),
    }
    path = written(tmp_path / PATH, tensors)
    with pytest.raises(StateError, match=r"1\.attn\.to_.\.bias|proj_in"):
        read(path)
    (lora,) = read_lora(LoraFile(path, skip_missing=True), MODEL, {"dit": SHAPES})
    assert list(lora.merged) == [
        *(f"{FIRST}{part}.bias" for part in "qkv"),
        "blocks.1.attn.to_out.0.weight",
    ]
    said = capsys.readouterr().err
    assert said.rstrip().endswith(": double.*.qkv.diff_b, img_in.diff")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_differences_are_added_in_fp32_to_parameters_below_lora_layers_too(
    dtype: torch.dtype,
) -> None:
    module = trained(LoraConfig("dit", ("to_q",), 4, 6.0)).to(dtype)
    layer = module.get_submodule(f"{FIRST}q").base_layer
    for name, shape in (("bias", (6,)), ("weight", (6, 6))):
        before = getattr(layer, name).detach().clone()
        merge(module, {f"{FIRST}q.{name}": Difference(numbers(*shape))}, 0.3)
        wanted = (before.float() + 0.3 * numbers(*shape)).to(dtype)
        assert torch.allclose(getattr(layer, name), wanted, atol=1e-6)


def test_of_what_is_quantized_biases_can_be_changed_and_weights_not() -> None:
    linear = nn.Linear(64, 64).requires_grad_(False)
    stored = halved(linear, linear.weight)
    module = nn.Sequential(stored)
    bias, more = linear.bias.clone(), Difference(numbers(64))
    with pytest.raises(UsageError, match=r"--lora: .*0\.weight"):
        merge(module, {"0.bias": more, "0.weight": Difference(numbers(64, 64))})
    assert torch.equal(stored.bias, bias)
    merge(module, {"0.bias": more})
    assert torch.equal(stored.bias, bias + numbers(64))
