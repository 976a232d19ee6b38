"""What is written for a program reads back as the layers that were trained, exactly, and
says all that is needed to use it.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import LoraConfig, UsageError, save_lora
from dstrain.lora import (
    Lora,
    add_layers,
    base_shapes,
    base_weights,
    check_names,
    inject,
    log_differences,
    lora_layers,
    save_lora_for,
)
from dstrain.plugin import Files, LoraKeyFormat
from dstrain.storage import CHECKSUM, read_tensors
from dstrain_formats.key_names import key_formats
from safetensors.torch import load_file
from torch import nn

from tests.support.lora_family import (
    COMPONENTS,
    MODEL,
    ORIGINAL,
    SPEC,
    network,
    ours,
    output,
    read,
    same,
    trained,
)

DIT, _, ENCODER = COMPONENTS
QKV = LoraConfig("dit", ("to_q", "to_k", "to_v"), 4, 6.0)
FIRST = [f"blocks.0.attn.to_{part}" for part in "qkv"]
A_B = ("lora_A.weight", "lora_B.weight")
DOWN_UP = ("alpha", "lora_down.weight", "lora_up.weight")


def saved(program: str, folder: Path, config: LoraConfig, module: Any) -> Path:
    """A file of a trained network in a program's names."""
    path = folder / f"{program}.safetensors"
    save_lora_for(program, path, module, config, MODEL, {"family": "fused"})
    return path


@pytest.mark.parametrize(
    ("program", "layer", "ends"),
    [
        ("diffusers", "transformer.blocks.0.attn.to_out.0", A_B),
        ("comfyui", "diffusion_model.double.0.proj", DOWN_UP),
        ("kohya", "lora_unet_double_0_proj", DOWN_UP),
        ("diffsynth", "layers.0.o", A_B),
    ],
)
@pytest.mark.parametrize(("rank", "alpha"), [(4, 4.0), (2, 8.0), (3, 0.7)])
def test_a_file_in_any_naming_acts_as_what_was_trained(
    program: str,
    layer: str,
    ends: tuple[str, ...],
    rank: int,
    alpha: float,
    tmp_path: Path,
) -> None:
    config = LoraConfig("dit", SPEC.targets, rank, alpha)
    path, module = ours(tmp_path, config)
    file = saved(program, tmp_path, config, module)
    keys = sorted(key for key in load_file(file) if key.startswith(f"{layer}."))
    assert keys == [f"{layer}.{end}" for end in ends]
    again, plain = read(file), network()
    add_layers(plain, again.layers)
    assert torch.allclose(output(plain), output(module), atol=1e-5)
    assert same(again.layers, read(path).layers)
    assert {layer.alpha for layer in again.trained_layers(file).values()} == {alpha}


@pytest.mark.parametrize(
    ("config", "rank"),
    [
        (QKV, 12),
        (replace(QKV, targets=("to_q",)), 4),
        (replace(QKV, targets=("to_k", "to_v")), 8),
        (replace(QKV, targets=("0.attn.to_v", "1.attn.to_q")), 4),
        (replace(QKV, ranks=(("to_k", 2),), alphas=(("to_v", 1.0),)), 10),
        (replace(QKV, type="dora"), 12),
        (replace(QKV, targets=("norm_out.linear",), type="dora"), 4),
    ],
    ids=lambda value: ",".join(value.targets) if isinstance(value, LoraConfig) else "",
)
@pytest.mark.parametrize("program", ["comfyui", "kohya"])
def test_layers_that_a_program_has_as_one_come_back_bit_for_bit(
    config: LoraConfig, rank: int, program: str, tmp_path: Path
) -> None:
    """Parts without LoRA are zero rows; rows may be in another order."""
    module = trained(config)
    file = saved(program, tmp_path, config, module)
    tensors = load_file(file)
    assert {len(one) for key, one in tensors.items() if "down" in key} == {rank}
    assert {float(one) for key, one in tensors.items() if "alpha" in key} == {rank}
    own = read(saved("diffusers", tmp_path, config, module)).layers
    found = read(file).layers
    assert same(found, own)
    if config.type == "dora":
        scales = [one for key, one in tensors.items() if key.endswith(".dora_scale")]
        assert [one.shape[1] for one in scales] == [1] * len(scales) != []
        for name, layer in own.items():
            assert torch.equal(found[name].magnitude, layer.magnitude)


@pytest.mark.parametrize("shared", ["qkv", "qv"])
def test_a_layer_of_several_keeps_its_rank_there_and_back(
    shared: str, tmp_path: Path
) -> None:
    """Another program's qkv of rank 4 has one A for all: as three layers and as one
    again it is what it was. Of parts that have their own A, that one alone is added.
    """
    module = trained(QKV)
    layers = lora_layers(module)
    for block in "01":
        for part in shared:
            first = layers[f"blocks.{block}.attn.to_q"].down
            layers[f"blocks.{block}.attn.to_{part}"].down.copy_(first)
    file = saved("comfyui", tmp_path, QKV, module)
    key = "diffusion_model.double.0.qkv.lora_down.weight"
    assert len(load_file(file)[key]) == 4 * (4 - len(shared))
    found = read(file).layers
    plain = network()
    add_layers(plain, found)
    assert torch.allclose(output(plain), output(module), atol=1e-5)
    ranks = {layer.rank for layer in found.values()}
    assert ranks == {4 if shared == "qkv" else 8}


def test_dora_whose_product_is_zero_in_a_part_keeps_its_lengths(tmp_path: Path) -> None:
    config = replace(QKV, type="dora")
    module = trained(config)
    own = lora_layers(module)
    own[FIRST[1]].up.zero_()
    found = read(saved("comfyui", tmp_path, config, module)).layers
    assert torch.equal(found[FIRST[1]].magnitude, own[FIRST[1]].magnitude)
    assert not found[FIRST[1]].up.any()
    plain = network()
    add_layers(plain, found)
    assert torch.allclose(output(plain), output(module), atol=1e-5)


@pytest.mark.parametrize(
    ("targets", "lora_type", "program", "words"),
    [
        (("to_q", "to_v"), "dora", "comfyui", f"--lora_format: .*{', '.join(FIRST)}"),
        (("to_q",), "dora", "diffsynth", "--lora_format: diffsynth .*dora"),
        (QKV.targets, "lokr", "comfyui", f"--lora_format: .*{', '.join(FIRST)}"),
        (("to_q",), "dora", "else", "--lora_format: expected .*else"),
        (QKV.targets, "dora", "comfyui", None),
        (("to_q",), "dora", "diffusers", None),
        (("to_q",), "lora", "comfyui", None),
        (("to_q",), "lokr", "diffusers", None),
        (("to_out.0",), "lokr", "comfyui", None),
    ],
)
def test_what_no_file_could_hold_is_refused_before_it_is_trained(
    targets: tuple[str, ...],
    lora_type: Any,
    program: str,
    words: str | None,
    tmp_path: Path,
) -> None:
    config = replace(QKV, targets=targets, rank=1, type=lora_type)
    module = trained(config)
    if words is None:
        check_names(module, config, MODEL, program)
        own, file = lora_layers(module), saved(program, tmp_path, config, module)
        assert read(file).layers.keys() == own.keys()
        return
    with pytest.raises(UsageError, match=words):
        check_names(module, config, MODEL, program)
    with pytest.raises(UsageError, match=words):
        saved(program, tmp_path, config, module)


@pytest.mark.parametrize(
    ("lora_type", "extra"), [("lora", {}), ("dora", {"use_dora": True})]
)
def test_the_file_says_all_that_is_needed_to_use_it(
    lora_type: Any, extra: Mapping[str, Any], tmp_path: Path
) -> None:
    config = replace(SPEC, targets=("to_q", "to_out.0"), alpha=8.0, type=lora_type)
    config = replace(config, dropout=0.1)
    path, _ = ours(tmp_path, config, step="12")
    tensors, header = read_tensors(path)
    assert json.loads(header.pop("lora_adapter_metadata")) == {
        f"transformer.{name}": value
        for name, value in {
            "r": 4,
            "lora_alpha": 4,
            "target_modules": ["to_out.0", "to_q"],
            **extra,
        }.items()
    }
    assert header.pop(CHECKSUM)
    assert header == {
        "format": "pt",
        "family": "fused",
        "step": "12",
        "component": "dit",
        "rank": "4",
        "alpha": "8.0",
        "targets": "to_out.0,to_q",
        "scale": "in lora_B",
        "dropout": "0.1",
        **({"type": lora_type} if extra else {}),
    }
    ends = [*A_B, "lora_magnitude_vector"] if extra else A_B
    assert sorted(tensors) == sorted(
        f"transformer.blocks.{block}.attn.{name}.{end}"
        for block in "01"
        for name in config.targets
        for end in ends
    )


def test_a_rank_of_a_layer_whose_name_ends_another_is_that_of_it_alone(
    tmp_path: Path,
) -> None:
    """As peft compares names: by their ends, unless a pattern begins with '^'."""
    block = nn.ModuleDict({"out": nn.Linear(2, 2), "in": nn.Linear(2, 2)})
    module = nn.ModuleDict({"out": nn.Linear(2, 2), "block": block})
    ranks = (("out", 2), ("block.out", 4), ("in", 2))
    config = LoraConfig("dit", ("out", "in"), 4, 4.0, ranks)
    inject(module, config, {})
    save_lora(tmp_path / "x", module, config, "transformer", {})
    header = read_tensors(tmp_path / "x")[1]
    fields = json.loads(header["lora_adapter_metadata"])
    wanted = {"^out": 2, "block.in": 2}
    assert fields["transformer.rank_pattern"] == wanted
    assert fields["transformer.alpha_pattern"] == wanted
    assert json.loads(header["ranks"]) == {"out": 2, "block.in": 2}
    layers = read(tmp_path / "x", dit=base_shapes(module)).layers
    assert {name: layer.rank for name, layer in layers.items()} == {
        "out": 2,
        "block.out": 4,
        "block.in": 2,
    }


def test_a_component_has_the_names_it_declares_and_defaults_for_the_others() -> None:
    found = key_formats(DIT, MODEL)
    assert set(found) == {"diffusers", "comfyui", "kohya", "diffsynth"}
    assert found["diffusers"] == LoraKeyFormat("diffusers", ("transformer.",))
    assert found["comfyui"].checkpoint_format is ORIGINAL
    assert found["diffsynth"] is DIT.lora[0]
    assert set(key_formats(ENCODER, MODEL)) == {"diffusers", "kohya", "diffsynth"}
    # One that declares no prefixes has the default ones.
    declared = LoraKeyFormat("kohya", checkpoint_format=ORIGINAL, underscored=True)
    changed = key_formats(replace(DIT, lora=(declared,)), MODEL)
    assert changed["kohya"] == replace(declared, prefixes=("lora_unet_",))
    assert changed["kohya"] == found["kohya"]


SIZE = 2**20


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file of a base model."""
    path = tmp_path / "weights.safetensors"
    path.write_bytes(bytes(i % 251 for i in range(SIZE)))
    return path


def test_the_digest_of_weights_depends_on_contents_and_not_on_names_or_order(
    weights: Path, tmp_path: Path
) -> None:
    def digest(*paths: Path) -> str:
        return base_weights(Files(paths))["digest"]

    content = weights.read_bytes()
    changed = {
        "small": b"1",
        "empty": b"",
        "longer": content + b"\0",
        "first": b"\1" + content[1:],
        "last": content[:-1] + b"\0",
    }
    others = [tmp_path / name for name in changed]
    for path in others:
        path.write_bytes(changed[path.name])
    moved = tmp_path / "moved"
    moved.write_bytes(content)
    small = others[0]
    assert len(digest(weights)) == 40
    assert base_weights(Files((weights,))) == {"digest": digest(weights)}
    assert digest(moved) == digest(weights)
    assert digest(small, moved) == digest(weights, small)
    found = {digest(weights), digest(weights, small), *map(digest, others)}
    assert len(found) == 2 + len(others)
    assert base_weights(Files((weights,), model_id="Some/Model")) == {
        "digest": digest(weights),
        "model_id": "Some/Model",
    }


@pytest.mark.parametrize("base", ["", "[]", "no", '"text"', "[" * 100_000, None])
def test_only_what_differs_from_the_training_is_named(
    base: str | None, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record that cannot be read says nothing."""
    files, other = Files((weights,)), tmp_path / "other.safetensors"
    other.write_bytes(weights.read_bytes()[::-1])
    recorded = json.dumps(base_weights(files)) if base is None else base
    lora = Lora("dit", {}, {"variant": "base", "base": recorded})
    for known in (files, None):
        log_differences(lora, weights, "base", known)
        log_differences(replace(lora, header={}), weights, "base", known)
    assert capsys.readouterr().err == ""
    for model_id, used in ((None, other.name), ("Some/Model", "Some/Model")):
        log_differences(lora, weights, "edit", Files((other,), model_id=model_id))
        first, *more = capsys.readouterr().err.splitlines()
        assert f"{weights}: " in first and "base" in first and "edit" in first
        assert len(more) == (base is None)
        assert all("dit" in line and used in line for line in more)
