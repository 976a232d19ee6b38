"""Keys are paired by layer, and a file's rank and alpha are read from where they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import StateError
from dstrain.lora import is_lora_key
from dstrain.lora.key_parser import KEY, AdapterConfig, parse_keys, read_adapter_config

PATH = Path("x.safetensors")
DOWN, UP = torch.ones(2, 3), torch.ones(4, 2)
META = "lora_adapter_metadata"


@pytest.mark.parametrize(
    ("down", "up"),
    [
        ("lora_A.weight", "lora_B.weight"),
        ("lora_A.default.weight", "lora_B.default.weight"),
        ("lora_down.weight", "lora_up.weight"),
        ("lora.down.weight", "lora.up.weight"),
        ("lora_embedding_A", "lora_embedding_B"),
    ],
)
def test_every_spelling_of_a_pair_is_known(down: str, up: str) -> None:
    tensors = {f"a.b.{up}": UP, f"a.b.{down}": DOWN, "a.b.alpha": torch.tensor(3.0)}
    assert all(KEY.fullmatch(key) for key in tensors)
    layers = parse_keys(PATH, tensors)
    assert set(layers) == {"a.b"}
    layer = layers["a.b"]
    assert layer.down is DOWN
    assert layer.up is UP
    assert layer.alpha == 3.0
    assert layer.named == (".default." in down)


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({}, "it has no keys"),
        (
            {"a.weight": UP},
            r"1 of its 1 keys are of no LoRA layer\n  the first: a\.weight",
        ),
        (
            {"a.lora_A.weight": DOWN},
            "1 of 1 layers lack lora_A, lora_B or an alpha\n  a has only A",
        ),
        ({"a.alpha": torch.tensor(1.0)}, "1 of 1 layers lack"),
        (
            {
                "a.lora_A.weight": DOWN,
                "a.lora_down.weight": DOWN,
                "a.lora_B.weight": UP,
            },
            "contains a twice; one of its keys is a.lora_down.weight",
        ),
        (
            {"a.lora_A.weight": DOWN, "a.lora_B.weight": UP / 0},
            "a.lora_B.weight is not a finite matrix of numbers",
        ),
        ({"a.hada_w1_a": DOWN}, "a has only hada_w1_a"),
        (
            {"a.hada_t1": DOWN},
            r"of no LoHa layer\n.*\n.*LoHa of convolutions and with DoRA",
        ),
        ({"a.hada": DOWN}, "of no LoRA layer"),
    ],
)
def test_what_is_no_whole_lora_is_refused(tensors: Any, match: str) -> None:
    with pytest.raises(StateError, match=match):
        parse_keys(PATH, tensors)


def test_xlabs_calls_the_matrices_of_a_layer_down_and_up() -> None:
    tensors = {"a.qkv_lora1.down.weight": DOWN, "a.qkv_lora1.up.weight": UP}
    (name,) = found = parse_keys(PATH, tensors)
    assert name == "a.qkv_lora1" and found[name].named
    assert all(map(is_lora_key, tensors))
    for other in ("a.proj.down.weight", "a.lora3.up.weight"):
        with pytest.raises(StateError, match="of no LoRA layer"):
            parse_keys(PATH, {other: DOWN})


def header(**fields: Any) -> dict[str, str]:
    return {META: json.dumps({f"dit.{name}": one for name, one in fields.items()})}


def test_patterns_give_ranks_and_alphas_by_the_end_of_a_name_or_by_the_whole() -> None:
    found = read_adapter_config(
        PATH,
        header(
            r=4,
            lora_alpha=8,
            target_modules=["to_q"],
            rank_pattern={"^a\\.to_q": 2},
            alpha_pattern={"to_k": 1.0},
        ),
        "dit.",
        peft=False,
    )
    assert found == AdapterConfig(4, 8.0, ("to_q",), {"^a\\.to_q": 2}, {"to_k": 1.0})
    assert found.of("a.to_q") == (2, 8.0)
    assert found.of("b.a.to_q") == (4, 8.0)
    assert found.of("b.to_k") == (4, 1.0)
    assert found.of("b.o_to_k") == (4, 8.0)


def test_the_file_of_peft_beside_is_read_for_its_own_names_or_a_file_of_its_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 6}')
    path = tmp_path / "x.safetensors"
    assert read_adapter_config(path, {}, "dit.", peft=False) is None
    named = tmp_path / "adapter_model.safetensors"
    assert read_adapter_config(named, {}, "dit.", peft=False) is not None
    found = read_adapter_config(path, {}, "dit.", peft=True)
    assert found is not None
    assert found.of("anything") == (2, 6.0)
    # The header comes first.
    both = read_adapter_config(path, header(r=1, lora_alpha=1), "dit.", peft=True)
    assert both is not None
    assert both.rank == 1


def test_a_setting_that_would_change_the_result_is_refused_and_others_are_not() -> None:
    ordinary = header(r=1, lora_alpha=1, use_dora=False, bias="none", revision="x")
    assert read_adapter_config(PATH, ordinary, "dit.", peft=False) is not None
    with pytest.raises(StateError, match="needs use_rslora, which is not sup"):
        read_adapter_config(
            PATH,
            header(r=1, lora_alpha=1, use_rslora=True, use_dora=True),
            "dit.",
            peft=False,
        )
