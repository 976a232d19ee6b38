"""LoKr is computed as LyCORIS, peft and ComfyUI have it, and read only if it is whole."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from dstrain import LoraConfig, StateError, UsageError
from dstrain.config import LoraFile
from dstrain.lora import add_layers, inject, lora_layers, merge_layers, read_lora
from dstrain.lora.fusing import joined, merged_parts
from dstrain.lora.key_names import Rows
from dstrain.lora.key_parser import FOLDED
from dstrain.lora.layers import LoraLayer
from dstrain.lora.lokr import LokrLayer, parse_lokr
from torch import Tensor, nn

from tests.support.lora_family import MODEL, SHAPES, read, written

PATH = Path("x.safetensors")


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


LAYERS = (
    LokrLayer((numbers(2, 3),), (numbers(4, 2),), 1, 1.0),
    LokrLayer((numbers(2, 3),), (numbers(4, 1), numbers(1, 2)), 1, 3.0),
    LokrLayer((numbers(2, 2), numbers(2, 3)), (numbers(4, 2), numbers(2, 2)), 2, 3.0),
)
"""Of weights (8, 6): whole, one of two, and two of two matrices."""
IDS = ["whole", "second of two", "both of two"]


def by_comfyui(tensors: dict[str, Tensor]) -> Tensor:
    """From comfy/weight_adapter/lokr.py: alpha counts only where there is a product."""
    dim = None
    matrices = []
    for name in ("lokr_w1", "lokr_w2"):
        if name in tensors:
            matrices.append(tensors[name])
            continue
        dim = len(tensors[f"{name}_b"])
        matrices.append(tensors[f"{name}_a"] @ tensors[f"{name}_b"])
    alpha = tensors.get("alpha")
    scale = 1.0 if alpha is None or dim is None else alpha.item() / dim
    return scale * torch.kron(*matrices)


@pytest.mark.parametrize("layer", LAYERS, ids=IDS)
@pytest.mark.parametrize("with_alpha", [False, True])
def test_a_folded_layer_acts_in_comfyui_with_and_without_alpha(
    layer: LokrLayer, with_alpha: bool
) -> None:
    folded = layer.folded()
    tensors = folded.parts()
    if with_alpha:
        tensors["alpha"] = torch.tensor(folded.alpha)
    wanted = layer.changed(torch.zeros(8, 6))
    assert torch.allclose(by_comfyui(tensors), wanted, atol=1e-6)


@pytest.mark.parametrize("layer", LAYERS, ids=IDS)
def test_what_comfyui_reads_acts_here_as_there(layer: LokrLayer) -> None:
    """Of a file as LyCORIS writes it, where alpha is beside the matrices."""
    tensors = {**layer.parts(), "alpha": torch.tensor(5.0)}
    found = parse_lokr(PATH, {f"a.{key}": one for key, one in tensors.items()})["a"]
    assert found.alpha is not None
    here = found.layer(found.alpha).changed(torch.zeros(8, 6))
    assert torch.allclose(here, by_comfyui(tensors), atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("layer", LAYERS, ids=IDS)
def test_an_added_layer_acts_as_the_merged_one(layer: LokrLayer) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))

    added, merged = net(), net()
    add_layers(added, {"0": layer}, 1.0)
    merge_layers(merged, {"0": layer})
    x = torch.randn(3, 6)
    assert torch.allclose(added(x), merged(x), atol=1e-5)
    assert not torch.allclose(added(x), net()(x), atol=1e-2)
    assert not any(
        one.requires_grad for name, one in added.named_parameters() if "lokr" in name
    )


@torch.no_grad()
@pytest.mark.parametrize(("rank", "factor"), [(1, -1), (1, 4), (8, 2)])
def test_what_is_trained_is_the_lokr_of_peft(rank: int, factor: int) -> None:
    settings = peft.LoKrConfig(
        r=rank, alpha=3, target_modules=["0"], decompose_factor=factor
    )
    wanted: Any = peft.inject_adapter_in_model(
        settings, nn.Sequential(nn.Linear(12, 16))
    )
    net = nn.Sequential(nn.Linear(12, 16))
    config = LoraConfig("net", ("0",), rank, 3.0, type="lokr", factor=factor)
    inject(net, config, {})
    (own,) = lora_layers(net).values()
    assert isinstance(own, LokrLayer)
    for name, matrix in own.parts().items():
        matrix.copy_(numbers(*matrix.shape))
        getattr(wanted[0], name)["default"].copy_(matrix)
    change = own.changed(torch.zeros(16, 12))
    assert torch.allclose(change, wanted[0].get_delta_weight("default"), atol=1e-6)
    assert {name for name, one in net.named_parameters() if one.requires_grad} == {
        f"0.{name}.default" for name in own.parts()
    }


def of_every_form(first: int = 3) -> dict[str, dict[str, Tensor]]:
    """The matrices of four layers of 6 rows and columns: those that are whole, the second
    a product, the first one, and both.
    """
    halves = {"lokr_w1_a": numbers(2, first), "lokr_w1_b": numbers(first, 3)}
    products = {"lokr_w2_a": numbers(3, 1), "lokr_w2_b": numbers(1, 2)}
    whole_1, whole_2 = {"lokr_w1": numbers(2, 3)}, {"lokr_w2": numbers(3, 2)}
    return {
        "to_q": whole_1 | whole_2,
        "to_k": whole_1 | products,
        "to_v": halves | whole_2,
        "to_out.0": halves | products,
    }


def in_file(
    path: Path, layers: dict[str, dict[str, Tensor]], header: dict[str, str]
) -> Path:
    tensors = {
        f"transformer.blocks.0.attn.{layer}.{part}": one
        for layer, parts in layers.items()
        for part, one in parts.items()
    }
    return written(path / "x.safetensors", tensors, header)


@pytest.mark.parametrize("alpha", [5.0, None])
def test_a_file_may_have_layers_of_every_form(
    alpha: float | None, tmp_path: Path
) -> None:
    layers = of_every_form()
    header = {}
    if alpha is None:
        header = dict(FOLDED)
    else:
        for parts in layers.values():
            parts["alpha"] = torch.tensor(alpha)
    found = read(in_file(tmp_path, layers, header)).layers
    assert len(found) == len(layers)
    for name, parts in layers.items():
        here = found[f"blocks.0.attn.{name}"].changed(torch.zeros(6, 6))
        assert torch.allclose(here, by_comfyui(parts), atol=1e-6)


def test_alpha_of_some_products_alone_is_refused(tmp_path: Path) -> None:
    layers = of_every_form()
    for name in ("to_q", "to_k"):
        layers[name]["alpha"] = torch.tensor(5.0)
    with pytest.raises(StateError, match="2 of 3 layers lack an alpha"):
        read(in_file(tmp_path, layers, {}))


def test_without_any_alpha_it_is_asked_for(tmp_path: Path) -> None:
    file = in_file(tmp_path, of_every_form(), {})
    with pytest.raises(StateError, match="rank and alpha are unknown"):
        read(file)
    (lora,) = read_lora(
        LoraFile(file, component="dit", alpha=2.0), MODEL, {"dit": SHAPES}
    )
    ranks = {
        name.split("attn.")[1]: one.scale
        for name, one in lora.layers.items()
        if isinstance(one, LokrLayer)
    }
    assert ranks == {"to_q": 1.0, "to_k": 2.0, "to_v": 2 / 3, "to_out.0": 2.0}


def test_alpha_has_no_effect_on_whole_matrices(tmp_path: Path) -> None:
    file = in_file(tmp_path, {"to_q": of_every_form()["to_q"]}, {})
    assert read(file)
    with pytest.raises(UsageError, match="needs none"):
        read_lora(LoraFile(file, component="dit", alpha=2.0), MODEL, {"dit": SHAPES})


WHOLE = {"a.lokr_w1": numbers(2, 3), "a.lokr_w2": numbers(4, 2)}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a.lokr_w1": numbers(2, 3)}, "a has only lokr_w1, without all of lokr_w2"),
        ({**WHOLE, "a.lokr_w2_a": numbers(4, 1)}, "without all of lokr_w2"),
        (
            {**WHOLE, "a.lokr_t2": numbers(4, 1)},
            r"1 of its 3 .* of no LoKr layer\n.*t2",
        ),
        ({**WHOLE, "a.dora_scale": numbers(8, 1)}, "LoKr of convolutions .* with DoRA"),
        ({**WHOLE, "a.lokr_w1": numbers(2, 3) / 0}, "w1 is not a finite matrix"),
        ({**WHOLE, "a.lokr_w1": numbers(2, 3, 1)}, "w1 is not a finite matrix"),
        ({**WHOLE, "a.alpha": numbers(2)}, "alpha is not a finite number"),
        (
            {
                "a.lokr_w1": numbers(2, 3),
                "a.lokr_w2_a": numbers(4, 1),
                "a.lokr_w2_b": numbers(2, 2),
            },
            "matrices of different ranks",
        ),
    ],
)
def test_what_is_not_whole_is_refused(tensors: dict[str, Tensor], words: str) -> None:
    with pytest.raises(StateError, match=f"(?s){words}"):
        parse_lokr(PATH, tensors)


def test_no_kronecker_product_is_that_of_several_layers() -> None:
    """It is written as none; of a file's, each layer gets its rows, which are merged."""
    rows = (Rows("q", 0, 4, 0), Rows("k", 4, 8, 0))
    parts = merged_parts(LAYERS[0], rows)
    weight = numbers(8, 6)
    found = [parts[name].changed(weight[4 * i :][:4]) for i, name in enumerate("qk")]
    assert torch.equal(torch.cat(found), LAYERS[0].changed(weight))
    with pytest.raises(UsageError, match=r"one layer for q, k\n.*give diffusers"):
        joined({"q": LAYERS[0], "k": LAYERS[0]}, rows)


def test_lokr_and_another_are_not_added_to_one_layer() -> None:
    lora = LoraLayer(numbers(2, 6), numbers(8, 2), 2.0)
    for first, second in ((lora, LAYERS[0]), (LAYERS[0], lora), (LAYERS[0], LAYERS[1])):
        net = nn.Sequential(nn.Linear(6, 8))
        add_layers(net, {"0": first}, adapter_name="a")
        with pytest.raises(UsageError, match="1 layer with a Lo"):
            add_layers(net, {"0": second}, adapter_name="b")


def test_lokr_and_lora_act_together_on_unlike_layers() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    lora = LoraLayer(numbers(2, 8), numbers(6, 2), 2.0)
    merged = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    merged.load_state_dict(net.state_dict())
    add_layers(net, {"0": LAYERS[1]}, adapter_name="a")
    add_layers(net, {"1": lora}, adapter_name="b")
    merge_layers(merged, {"0": LAYERS[1], "1": lora})
    x = torch.randn(3, 6)
    with torch.no_grad():
        assert torch.allclose(net(x), merged(x), atol=1e-4)


def test_lokr_is_for_linear_layers() -> None:
    net = nn.Sequential(nn.Conv2d(4, 4, 3))
    with pytest.raises(UsageError, match="lokr is for linear layers; 0 is Conv2d"):
        inject(net, LoraConfig("net", ("0",), 1, 1.0, type="lokr"), {})
