"""LoRA layers: what is matched, saved and loaded is exact, and nothing is dropped silently."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.errors import StateError, UsageError
from dstrain.lora import LoraSpec, inject, load_lora, lora_state, save_lora
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SPEC = LoraSpec("net", ("to_q", "to_out.0"), 4, 8.0)
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(6, 8)
        self.to_out = nn.ModuleList([nn.Linear(8, 6), nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.to_out[0](self.to_q(x).tanh())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"blocks": nn.Sequential(Block(), Block())}).requires_grad_(True)


def run(module: nn.Module) -> Tensor:
    with torch.no_grad():
        return module["blocks"](X)


def trained(spec: LoraSpec = SPEC, seed: int = 3) -> nn.Module:
    module = net()
    inject(module, spec, {})
    generator = torch.Generator().manual_seed(seed)
    for tensor in lora_state(module).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return module


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, nn.Module]:
    module = trained()
    save_lora(tmp_path / "a.safetensors", module, SPEC, "transformer", {"family": "fam", "step": 12})
    return tmp_path / "a.safetensors", module


def rewrite(path: Path, tensors: dict[str, Tensor] | None = None, **fields: Any) -> None:
    """Write the file again with some tensors, or some fields of the adapter's header, changed."""
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    adapter = json.loads(metadata["lora_adapter_metadata"]) | {f"transformer.{k}": v for k, v in fields.items()}
    metadata["lora_adapter_metadata"] = json.dumps(adapter)
    save_file(load_file(path) if tensors is None else tensors, path, metadata)


def tensors_of(path: Path) -> dict[str, Tensor]:
    return load_file(path)


def test_inject_counts_what_each_target_matches_and_trains_only_that() -> None:
    module = net()
    before = run(module)
    assert inject(module, LoraSpec("net", ("to_q", "to_out.0", "1.to_q", "out"), 2, 2.0), {"out": ("to_out.0",)}) == {
        "to_q": 2, "to_out.0": 2, "1.to_q": 1, "out": 2,
    }  # fmt: skip
    trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name, _ in module.named_parameters() if "lora_" in name}
    assert len(trainable) == 8
    assert torch.equal(run(module), before)


def test_lora_layers_of_a_bfloat16_module_are_fp32() -> None:
    module = net().to(torch.bfloat16)
    inject(module, SPEC, {})
    assert {tensor.dtype for tensor in lora_state(module).values()} == {torch.float32}
    assert module["blocks"](X.bfloat16()).dtype == torch.bfloat16


def test_the_global_generator_decides_the_initial_numbers() -> None:
    states = []
    for _ in range(2):
        module = net()
        torch.manual_seed(7)
        inject(module, SPEC, {})
        states.append(lora_state(module))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_target_that_matches_nothing_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no layer of net matches 'to_qq'\n.*to_q") as caught:
        inject(net(), LoraSpec("net", ("to_q", "to_qq"), 4, 4.0), {})
    assert caught.value.exit_code == 2


def test_a_target_that_ends_inside_a_name_does_not_match() -> None:
    with pytest.raises(UsageError, match="no layer of net matches 'q'"):
        inject(net(), LoraSpec("net", ("q",), 4, 4.0), {})


def test_a_target_that_is_no_layer_is_refused_by_its_kind() -> None:
    with pytest.raises(UsageError, match=r"matches net\.blocks\.0\.to_out, a ModuleList[^\n]*\n.*to_out\.0"):
        inject(net(), LoraSpec("net", ("to_out",), 4, 4.0), {})


def test_no_targets_are_refused() -> None:
    with pytest.raises(UsageError, match="names no layer of net"):
        inject(net(), LoraSpec("net", (), 4, 4.0), {})


def test_a_refused_target_leaves_the_module_as_it_was() -> None:
    module = net()
    names = [name for name, _ in module.named_parameters()]
    with pytest.raises(UsageError):
        inject(module, LoraSpec("net", ("to_q", "nothing"), 4, 4.0), {})
    assert [name for name, p in module.named_parameters() if p.requires_grad] == names


def test_a_module_without_lora_has_no_lora_state() -> None:
    with pytest.raises(StateError, match="has no LoRA layers"):
        lora_state(net())


def test_the_file_says_all_that_is_needed_to_use_it(saved: tuple[Path, nn.Module]) -> None:
    with safe_open(saved[0], "pt") as file:
        metadata = dict(file.metadata())
        keys = list(file.keys())
    assert json.loads(metadata.pop("lora_adapter_metadata")) == {
        "transformer.r": 4, "transformer.lora_alpha": 8.0, "transformer.target_modules": ["to_out.0", "to_q"],
    }  # fmt: skip
    assert metadata == {"format": "pt", "family": "fam", "step": "12", "component": "net", "rank": "4", "alpha": "8.0",
                        "targets": "to_out.0,to_q"}  # fmt: skip
    layers = [f"transformer.blocks.{i}.{name}.lora_{x}.weight" for i in "01" for name in SPEC.targets for x in "AB"]
    assert sorted(keys) == sorted(layers)


def test_an_alias_is_saved_as_the_layer_it_stands_for(tmp_path: Path) -> None:
    spec, module = LoraSpec("net", ("out",), 2, 2.0), net()
    inject(module, spec, {"out": ("to_out.0",)})
    save_lora(tmp_path / "a.safetensors", module, spec, "", {})
    load_lora(tmp_path / "a.safetensors", net(), "")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata()["targets"] == "to_out.0"


@pytest.mark.parametrize(("rank", "alpha"), [(4, 4.0), (4, 8.0), (4, 1.0), (8, 3.5)])
def test_a_saved_lora_loads_exactly_for_every_alpha(tmp_path: Path, rank: int, alpha: float) -> None:
    spec = LoraSpec("net", SPEC.targets, rank, alpha)
    module = trained(spec)
    save_lora(tmp_path / "a.safetensors", module, spec, "transformer", {})
    other = net()
    load_lora(tmp_path / "a.safetensors", other, "transformer")
    assert torch.equal(run(other), run(module))
    assert not torch.equal(run(other), run(net()))


def test_scale_multiplies_the_effect(saved: tuple[Path, nn.Module]) -> None:
    path, _ = saved
    half, baked = net(), net()
    load_lora(path, half, "transformer", scale=0.5)
    rewrite(path, {k: v / 2 if "lora_B" in k else v for k, v in tensors_of(path).items()})
    load_lora(path, baked, "transformer")
    assert torch.allclose(run(half), run(baked), atol=1e-6)


def test_scale_zero_gives_the_plain_module(saved: tuple[Path, nn.Module]) -> None:
    module = net()
    load_lora(saved[0], module, "transformer", scale=0.0)
    assert torch.equal(run(module), run(net()))


def test_two_loras_act_together(saved: tuple[Path, nn.Module], tmp_path: Path) -> None:
    other = LoraSpec("net", ("to_q",), 2, 1.0)
    save_lora(tmp_path / "b.safetensors", trained(other, seed=9), other, "transformer", {})
    both, one, merged = net(), net(), net()
    load_lora(saved[0], both, "transformer", adapter_name="a")
    load_lora(tmp_path / "b.safetensors", both, "transformer", scale=2.0, adapter_name="b")
    load_lora(saved[0], one, "transformer")
    with torch.no_grad():
        for path, factor in ((saved[0], 2.0), (tmp_path / "b.safetensors", 2.0 * 0.5)):
            weights = tensors_of(path)
            for key in (key for key in weights if "lora_B" in key):
                layer = merged.get_submodule(key.removeprefix("transformer.").removesuffix(".lora_B.weight"))
                layer.weight += factor * weights[key] @ weights[key.replace("lora_B", "lora_A")]
    assert torch.allclose(run(both), run(merged), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(run(both), run(one), atol=1e-2)


def test_loading_changes_no_other_parameter(saved: tuple[Path, nn.Module]) -> None:
    module = net()
    module.get_submodule("blocks.1").requires_grad_(False)
    before = {id(parameter): parameter.requires_grad for parameter in module.parameters()}
    load_lora(saved[0], module, "transformer")
    after = {id(parameter): parameter.requires_grad for parameter in module.parameters()}
    assert before.items() <= after.items()
    assert not any(after[key] for key in after.keys() - before.keys())


def test_a_run_can_start_from_a_saved_lora(saved: tuple[Path, nn.Module]) -> None:
    module = net()
    inject(module, SPEC, {})
    load_lora(saved[0], module, "transformer")
    assert torch.equal(run(module), run(saved[1]))
    assert all(p.requires_grad for name, p in module.named_parameters() if "lora_" in name)


def test_training_beside_a_loaded_lora_saves_only_what_is_trained(saved: tuple[Path, nn.Module]) -> None:
    module = net()
    load_lora(saved[0], module, "transformer", adapter_name="preset")
    before = run(module)
    counts = inject(module, LoraSpec("net", ("to_q",), 2, 2.0), {})
    assert counts == {"to_q": 2}
    assert torch.equal(run(module), before)
    trainable = [name for name, p in module.named_parameters() if p.requires_grad]
    assert len(trainable) == 4
    assert all(".default." in name for name in trainable)
    assert {tensor.shape[0] for key, tensor in lora_state(module).items() if "lora_A" in key} == {2}


@pytest.mark.parametrize(("spec", "flag"), [(LoraSpec("net", SPEC.targets, 2, 8.0), "--lora_rank 4"),
                                            (LoraSpec("net", SPEC.targets, 4, 4.0), "--lora_alpha 8")])  # fmt: skip
def test_another_rank_or_alpha_is_refused(saved: tuple[Path, nn.Module], spec: LoraSpec, flag: str) -> None:
    with pytest.raises(StateError, match=flag):
        load_lora(saved[0], trained(spec), "transformer")


def test_other_targets_are_refused_both_ways(saved: tuple[Path, nn.Module]) -> None:
    with pytest.raises(StateError, match=r"4 unknown: transformer\.blocks\.0\.to_out\.0"):
        load_lora(saved[0], trained(LoraSpec("net", ("to_q",), 4, 8.0)), "transformer")


def test_half_a_file_is_refused(saved: tuple[Path, nn.Module]) -> None:
    rewrite(saved[0], {k: v for k, v in tensors_of(saved[0]).items() if "blocks.1" in k})
    with pytest.raises(StateError, match=r"of 8 keys wanted, 4 found\n.*4 missing: transformer\.blocks\.0") as caught:
        load_lora(saved[0], net(), "transformer")
    assert caught.value.exit_code == 3


def test_an_unknown_key_is_refused(saved: tuple[Path, nn.Module]) -> None:
    rewrite(saved[0], tensors_of(saved[0]) | {"transformer.blocks.9.to_q.lora_A.weight": torch.ones(4, 6)})
    with pytest.raises(StateError, match=r"1 unknown: transformer\.blocks\.9\.to_q"):
        load_lora(saved[0], net(), "transformer")


def test_another_shape_is_refused(saved: tuple[Path, nn.Module]) -> None:
    rewrite(saved[0], r=2)
    with pytest.raises(StateError, match="8 of another shape"):
        load_lora(saved[0], net(), "transformer")


def test_layers_the_module_lacks_are_refused(saved: tuple[Path, nn.Module]) -> None:
    with pytest.raises(StateError, match="does not fit Sequential"):
        load_lora(saved[0], nn.Sequential(nn.Linear(2, 2)), "transformer")


@pytest.mark.parametrize("prefix", ["", "unet"])
def test_another_prefix_is_refused(saved: tuple[Path, nn.Module], prefix: str) -> None:
    with pytest.raises(StateError, match="tells no rank, alpha and targets"):
        load_lora(saved[0], net(), prefix)


@pytest.mark.parametrize("fields", [{"use_rslora": True}, {"use_dora": True}, {"alpha_pattern": {"to_q": 1}},
                                    {"bias": "all"}, {"something_new": 1}])  # fmt: skip
def test_what_would_change_the_result_is_refused(saved: tuple[Path, nn.Module], fields: dict[str, Any]) -> None:
    rewrite(saved[0], **fields)
    with pytest.raises(StateError, match=f"needs {next(iter(fields))}, which is not supported"):
        load_lora(saved[0], net(), "transformer")


@pytest.mark.parametrize(
    "fields", [{"bias": "none"}, {"use_dora": False}, {"peft_version": "0.1"}, {"peft_type": "LORA"}]
)
def test_what_changes_nothing_is_accepted(saved: tuple[Path, nn.Module], fields: dict[str, Any]) -> None:
    rewrite(saved[0], **fields)
    module = net()
    load_lora(saved[0], module, "transformer")
    assert torch.equal(run(module), run(saved[1]))


@pytest.mark.parametrize("header", [None, "no json", "[]", "{}", '{"t.r": 4}',
                                    '{"t.r": 0, "t.lora_alpha": 1, "t.target_modules": []}',
                                    '{"t.r": 4, "t.lora_alpha": 1, "t.target_modules": ".*"}'])  # fmt: skip
def test_a_header_without_rank_and_alpha_is_refused(saved: tuple[Path, nn.Module], header: str | None) -> None:
    save_file(
        tensors_of(saved[0]),
        saved[0],
        {"lora_adapter_metadata": header.replace("t.", "transformer.")} if header is not None else {},
    )
    with pytest.raises(StateError, match="rank"):
        load_lora(saved[0], net(), "transformer")
