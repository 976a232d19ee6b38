"""LoRA layers: what is matched, saved and loaded is exact, and nothing is dropped
silently.
"""

import importlib.util
import sys
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from dstrain import LoraConfig, StateError, UsageError, save_lora
from dstrain.config import LoraFile
from dstrain.lazy import import_name
from dstrain.lora import (
    Lora,
    add_layers,
    base_shapes,
    inject,
    load_layers,
    lora_layers,
    lora_state,
    merge_layers,
    read_lora,
)
from dstrain.lora.layers import LoraLayer
from dstrain.plugin import Component, ModelFamily
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

SPEC = LoraConfig("net", ("to_q", "to_out.0"), 4, 8.0)
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


COMPONENTS = (Component("net", SimpleNamespace(), "net", ("blocks.*.to_q.weight",)),)
RECORD = ModelFamily(
    "fam",
    "",
    f"{__name__}:COMPONENTS",
    "",
    ("base",),
    "net",
    MappingProxyType({}),
    MappingProxyType({"net": "transformer"}),
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(6, 8)
        self.to_out = nn.ModuleList([nn.Linear(8, 6), nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.to_out[0](self.to_q(x).tanh())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"blocks": nn.Sequential(Block(), Block())}).requires_grad_(
        True
    )


def read(path: Path, module: nn.Module) -> Lora:
    (found,) = read_lora(LoraFile(path), RECORD, {"net": base_shapes(module)})
    return found


def load(
    path: Path, module: nn.Module, scale: float = 1.0, adapter_name: str = "default"
) -> None:
    add_layers(module, read(path, module).layers, scale, adapter_name)


def start(path: Path, module: nn.Module) -> None:
    layers = read(path, module).trained_layers(path)
    load_layers(lora_layers(module), layers, path)


def run(module: nn.Module) -> Tensor:
    with torch.no_grad():
        return module["blocks"](X)


def trained(lora_config: LoraConfig = SPEC, seed: int = 3) -> nn.Module:
    module = net()
    inject(module, lora_config, {})
    generator = torch.Generator().manual_seed(seed)
    for tensor in lora_state(module).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return module


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, nn.Module]:
    module = trained()
    save_lora(
        tmp_path / "a.safetensors",
        module,
        SPEC,
        "transformer",
        {"family": "fam", "step": 12},
    )
    return tmp_path / "a.safetensors", module


def tensors_of(path: Path) -> dict[str, Tensor]:
    return load_file(path)


def test_inject_counts_what_each_target_matches_and_trains_only_that() -> None:
    module = net()
    before = run(module)
    assert inject(module, LoraConfig("net", ("to_q", "to_out.0", "1.to_q", "out"), 2, 2.0), {"out": ("to_out.0",)}) == {
        "to_q": 2, "to_out.0": 2, "1.to_q": 1, "out": 2,
    }  # fmt: skip
    trainable = {
        name for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    assert trainable == {
        name for name, _ in module.named_parameters() if "lora_" in name
    }
    assert len(trainable) == 8
    assert torch.equal(run(module), before)


def test_peft_is_asked_anew_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has noted before would have it import a library that is hidden from it."""
    noted = import_name("peft.import_utils", "is_bnb_available")
    noted.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: object())
        assert noted()
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    inject(net(), LoraConfig("net", ("to_q",), 2, 2.0), {})
    assert noted() == (importlib.util.find_spec("bitsandbytes") is not None)


def test_lora_layers_of_a_bfloat16_module_are_fp32() -> None:
    module = net().to(torch.bfloat16)
    inject(module, SPEC, {})
    assert {tensor.dtype for tensor in lora_state(module).values()} == {torch.float32}
    assert module["blocks"](X.bfloat16()).dtype == torch.bfloat16


def test_initial_numbers_do_not_depend_on_the_dtype_of_the_module() -> None:
    starts = []
    for dtype in (torch.float32, torch.bfloat16):
        module = net().to(dtype)
        torch.manual_seed(3)
        inject(module, SPEC, {})
        starts.append(lora_state(module))
    assert all(
        torch.equal(weight, starts[1][name]) for name, weight in starts[0].items()
    )
    assert not any(hasattr(layer, "compute_dtype") for layer in module.modules())


def test_the_global_generator_decides_the_initial_numbers() -> None:
    states = []
    for _ in range(2):
        module = net()
        torch.manual_seed(7)
        inject(module, SPEC, {})
        states.append(lora_state(module))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_target_that_matches_nothing_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        UsageError,
        match=r"no layer of net matches 'to_qq'; did you mean 'to_q'\?\n  its layers: blocks\.0\.to_q",
    ) as caught:
        inject(net(), LoraConfig("net", ("to_q", "to_qq"), 4, 4.0), {})
    assert caught.value.exit_code == 2


def test_a_target_that_ends_inside_a_name_does_not_match() -> None:
    with pytest.raises(UsageError, match="no layer of net matches 'q'"):
        inject(net(), LoraConfig("net", ("q",), 4, 4.0), {})


def test_a_target_that_is_no_layer_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        UsageError,
        match=r"no layer of net matches 'to_out'.*\n  its layers: blocks\.0\.to_q, blocks\.0\.to_out\.0",
    ):
        inject(net(), LoraConfig("net", ("to_out",), 4, 4.0), {})


def test_a_target_that_is_also_a_module_without_weights_is_refused() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ModuleDict()})
    module["b"]["a"] = nn.Identity()
    with pytest.raises(UsageError, match=r"--lora_target_modules: .*Identity"):
        inject(module, LoraConfig("net", ("a",), 4, 4.0), {})


def test_no_targets_are_refused() -> None:
    with pytest.raises(UsageError, match="--lora_target_modules: No "):
        inject(net(), LoraConfig("net", (), 4, 4.0), {})


def test_a_refused_target_leaves_the_module_as_it_was() -> None:
    module = net()
    names = [name for name, _ in module.named_parameters()]
    with pytest.raises(UsageError):
        inject(module, LoraConfig("net", ("to_q", "nothing"), 4, 4.0), {})
    assert [name for name, p in module.named_parameters() if p.requires_grad] == names


def test_an_alias_is_saved_as_the_layer_it_stands_for(tmp_path: Path) -> None:
    lora_config, module = LoraConfig("net", ("out",), 2, 2.0), net()
    inject(module, lora_config, {"out": ("to_out.0",)})
    save_lora(tmp_path / "a.safetensors", module, lora_config, "transformer", {})
    load(tmp_path / "a.safetensors", net())
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata()["targets"] == "to_out.0"


@pytest.mark.parametrize(
    ("rank", "alpha", "exact"),
    [(4, 4.0, True), (4, 8.0, True), (4, 1.0, True), (8, 3.5, False), (4, 6.0, False)],
)
def test_a_saved_lora_acts_alike_and_training_goes_on_from_it(
    tmp_path: Path, rank: int, alpha: float, exact: bool
) -> None:
    """Bit for bit if alpha / rank is a power of 2, else within a rounding of fp32."""
    lora_config = LoraConfig("net", SPEC.targets, rank, alpha)
    module = trained(lora_config)
    save_lora(tmp_path / "a.safetensors", module, lora_config, "transformer", {})
    other = net()
    load(tmp_path / "a.safetensors", other)
    assert torch.allclose(run(other), run(module), rtol=0 if exact else 1e-5, atol=0)
    assert not torch.equal(run(other), run(net()))
    again = net()
    inject(again, lora_config, {})
    start(tmp_path / "a.safetensors", again)
    for name, value in lora_state(module).items():
        got = lora_state(again)[name]
        assert torch.allclose(got, value, rtol=0 if exact else 1.2e-7, atol=0)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert float(file.metadata()["alpha"]) == alpha


def test_scale_multiplies_the_effect(saved: tuple[Path, nn.Module]) -> None:
    path, _ = saved
    half, baked = net(), net()
    load(path, half, scale=0.5)
    halves = {
        name: LoraLayer(layer.down, layer.up / 2, layer.alpha)
        for name, layer in read(path, net()).layers.items()
    }
    add_layers(baked, halves)
    assert torch.allclose(run(half), run(baked), atol=1e-6)


def test_scale_zero_gives_the_plain_module(saved: tuple[Path, nn.Module]) -> None:
    module = net()
    load(saved[0], module, scale=0.0)
    assert torch.equal(run(module), run(net()))


def test_two_loras_act_together(saved: tuple[Path, nn.Module], tmp_path: Path) -> None:
    other = LoraConfig("net", ("to_q",), 2, 1.0)
    save_lora(
        tmp_path / "b.safetensors", trained(other, seed=9), other, "transformer", {}
    )
    both, one, merged = net(), net(), net()
    load(saved[0], both, adapter_name="a")
    load(tmp_path / "b.safetensors", both, scale=2.0, adapter_name="b")
    load(saved[0], one)
    with torch.no_grad():
        for path, factor in ((saved[0], 1.0), (tmp_path / "b.safetensors", 2.0)):
            weights = tensors_of(path)
            for key in (key for key in weights if "lora_B" in key):
                layer = merged.get_submodule(
                    key.removeprefix("transformer.").removesuffix(".lora_B.weight")
                )
                layer.weight += (
                    factor * weights[key] @ weights[key.replace("lora_B", "lora_A")]
                )
    assert torch.allclose(run(both), run(merged), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(run(both), run(one), atol=1e-2)


def test_loading_changes_no_other_parameter(saved: tuple[Path, nn.Module]) -> None:
    module = net()
    module.get_submodule("blocks.1").requires_grad_(False)
    before = {
        id(parameter): parameter.requires_grad for parameter in module.parameters()
    }
    load(saved[0], module)
    after = {
        id(parameter): parameter.requires_grad for parameter in module.parameters()
    }
    assert before.items() <= after.items()
    assert not any(after[key] for key in after.keys() - before.keys())


def test_a_run_can_start_from_a_saved_lora(saved: tuple[Path, nn.Module]) -> None:
    module = net()
    inject(module, SPEC, {})
    start(saved[0], module)
    assert torch.equal(run(module), run(saved[1]))
    assert all(
        p.requires_grad for name, p in module.named_parameters() if "lora_" in name
    )


def test_training_beside_a_loaded_lora_saves_only_what_is_trained(
    saved: tuple[Path, nn.Module],
) -> None:
    module = net()
    load(saved[0], module, adapter_name="preset")
    before = run(module)
    counts = inject(module, LoraConfig("net", ("to_q",), 2, 2.0), {})
    assert counts == {"to_q": 2}
    assert torch.equal(run(module), before)
    trainable = [name for name, p in module.named_parameters() if p.requires_grad]
    assert len(trainable) == 4
    assert all(".default." in name for name in trainable)
    assert {
        tensor.shape[0] for key, tensor in lora_state(module).items() if "lora_A" in key
    } == {2}


@pytest.mark.parametrize(("lora_config", "flag"), [(LoraConfig("net", SPEC.targets, 2, 8.0), "--lora_rank 4"),
                                            (LoraConfig("net", SPEC.targets, 4, 4.0), "--lora_alpha 8")])  # fmt: skip
def test_another_rank_or_alpha_is_refused(
    saved: tuple[Path, nn.Module], lora_config: LoraConfig, flag: str
) -> None:
    with pytest.raises(StateError, match=flag):
        start(saved[0], trained(lora_config))


def test_other_targets_are_refused_both_ways(
    saved: tuple[Path, nn.Module], tmp_path: Path
) -> None:
    fewer = LoraConfig("net", ("to_q",), 4, 8.0)
    with pytest.raises(
        StateError, match=r"2 layers in the file but not trained: blocks\.0\.to_out\.0"
    ):
        start(saved[0], trained(fewer))
    save_lora(tmp_path / "b.safetensors", trained(fewer), fewer, "transformer", {})
    with pytest.raises(
        StateError, match=r"2 layers trained but not in the file: blocks\.0\.to_out\.0"
    ):
        start(tmp_path / "b.safetensors", trained())


def test_layers_that_no_loss_reaches_may_be_missing_or_without_effect(
    saved: tuple[Path, nn.Module],
) -> None:
    layers = dict(read(saved[0], net()).trained_layers(saved[0]))
    optional_layers = ["blocks.1.to_out.0"]
    fewer = {
        name: layer for name, layer in layers.items() if name not in optional_layers
    }
    module = net()
    inject(module, SPEC, {})
    load_layers(lora_layers(module), fewer, Path("file"), optional_layers)
    assert torch.equal(
        lora_state(module)["blocks.0.to_q.lora_B.weight"], layers["blocks.0.to_q"].up
    )
    with pytest.raises(StateError, match="1 layer trained but not in the file"):
        load_layers(lora_layers(module), fewer, Path("file"))
    module, three = net(), LoraConfig("net", ("to_q", "0.to_out.0"), 4, 8.0)
    inject(module, three, {})
    with pytest.raises(StateError, match="1 layer in the file but not trained"):
        load_layers(lora_layers(module), layers, Path("file"), optional_layers)
    layers[optional_layers[0]].up.zero_()
    load_layers(lora_layers(module), layers, Path("file"), optional_layers)


def test_layers_of_several_ranks_and_alphas_act_exactly() -> None:
    draw = torch.Generator().manual_seed(3)
    layers = {
        name: LoraLayer(
            torch.randn(rank, 6, generator=draw),
            torch.randn(8, rank, generator=draw),
            alpha,
        )
        for name, rank, alpha in (("blocks.0.to_q", 2, 3.0), ("blocks.1.to_q", 4, 4.0))
    }
    added, merged = net(), net()
    add_layers(added, layers)
    merge_layers(merged, layers)
    state = net().state_dict()
    for name, layer in layers.items():
        state[f"{name}.weight"] += layer.alpha / layer.rank * (layer.up @ layer.down)
    assert all(
        torch.equal(state[name], value) for name, value in merged.state_dict().items()
    )
    assert torch.allclose(run(added), run(merged), atol=1e-5)
    assert not torch.allclose(run(added), run(net()), atol=1e-2)
    layer_added: Any = added.get_submodule("blocks.0.to_q")
    assert layer_added.r == {"default": 2}


def test_one_layer_is_added_where_its_name_ends_another(tmp_path: Path) -> None:
    module = nn.ModuleDict(
        {"out": nn.Linear(2, 2), "block": nn.ModuleDict({"out": nn.Linear(2, 2)})}
    )
    add_layers(module, {"out": LoraLayer(torch.ones(1, 2), torch.ones(2, 1), 1.0)})
    assert [name for name, _ in module.named_modules() if name.endswith("lora_A")] == [
        "out.lora_A"
    ]


def test_an_embedding_is_saved_added_and_merged(tmp_path: Path) -> None:
    def words() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict({"embed": nn.Embedding(5, 3)})

    lora_config, module, ids = (
        LoraConfig("net", ("embed",), 2, 3.0),
        words(),
        torch.arange(5),
    )
    inject(module, lora_config, {})
    for tensor in lora_state(module).values():
        tensor.copy_(
            torch.randn(
                tensor.shape, generator=torch.Generator().manual_seed(len(tensor))
            )
        )
    save_lora(tmp_path / "a.safetensors", module, lora_config, "transformer", {})
    added, merged = words(), words()
    load(tmp_path / "a.safetensors", added)
    merge_layers(merged, read(tmp_path / "a.safetensors", words()).layers)
    assert torch.allclose(added["embed"](ids), module["embed"](ids), rtol=1e-6)
    assert torch.allclose(merged["embed"](ids), module["embed"](ids), atol=1e-6)
    assert not torch.allclose(merged["embed"](ids), words()["embed"](ids), atol=1e-2)
