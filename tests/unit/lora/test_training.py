"""LoRA layers are added to what is asked for; a file must be exactly for them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import LoraConfig, StateError, Trainables, UsageError
from dstrain.lora import add_layers, inject, load_layers, lora_layers, lora_state
from torch import nn

from tests.support.lora_family import TOKENS, network, ours, output, read, trained

PATH = Path("x.safetensors")
SPEC = LoraConfig("dit", ("to_q", "to_out.0"), 4, 8.0)


def test_targets_count_their_layers_and_these_alone_are_trained() -> None:
    module = network()
    before = output(module)
    targets = ("to_q", "to_out.0", "1.attn.to_q", "out", "blocks.*.text")
    counts = inject(
        module, LoraConfig("dit", targets, 2, 2.0), {"out": ("to_out.0", "proj_out")}
    )
    assert list(counts.values()) == [2, 2, 1, 3, 2]
    parameters = dict(module.named_parameters())
    trainable = {name for name, one in parameters.items() if one.requires_grad}
    assert trainable == {name for name in parameters if "lora_" in name}
    assert len(trainable) == 14
    assert torch.equal(output(module), before)


@pytest.mark.parametrize(
    ("target", "hint"),
    [("to_qq", "'to_q'"), ("q", ""), ("to_out", "blocks.0.attn.to_q")],
)
def test_a_target_that_is_no_layer_changes_nothing(target: str, hint: str) -> None:
    module = network()
    names = [name for name, _ in module.named_parameters()]
    with pytest.raises(UsageError, match=f"--lora_target_modules: .*'{target}'") as one:
        inject(module, LoraConfig("dit", ("to_q", target), 4, 4.0), {})
    assert hint in str(one.value)
    assert [name for name, one in module.named_parameters() if one.requires_grad] == (
        names
    )


def test_initial_numbers_follow_the_seed_in_fp32_in_every_module() -> None:
    starts = []
    for dtype in (torch.float32, torch.bfloat16):
        module = network().to(dtype)
        torch.manual_seed(3)
        inject(module, SPEC, {})
        starts.append(lora_state(module))
        assert module(TOKENS.to(dtype)).dtype == dtype
        assert not any(hasattr(layer, "compute_dtype") for layer in module.modules())
    assert {weight.dtype for weight in starts[1].values()} == {torch.float32}
    assert all(
        torch.equal(weight, starts[1][name]) for name, weight in starts[0].items()
    )
    assert starts[0]["blocks.0.attn.to_q.lora_A.weight"].any()


LAYERS = (
    "blocks.1.attn1.to_q",
    "blocks.1.attn2.to_q",
    "blocks.1.ff.net.2",
    "blocks.12.attn1.to_q",
    "blocks.12.img_mlp.net.0.proj",
    "proj",
    "x.proj",
)


def network_of(names: tuple[str, ...]) -> nn.Module:
    root = nn.Module()
    for name in names:
        *path, last = name.split(".")
        owner = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.add_module(last, nn.Linear(2, 2))
    return root


def numbers_of(config: LoraConfig, **aliases: tuple[str, ...]) -> dict[str, Any]:
    """Layer -> (rank, alpha), of those that do not have rank 1."""
    module = network_of(LAYERS)
    inject(module, config, aliases)
    return {
        name: (layer.rank, layer.alpha)
        for name, layer in lora_layers(module).items()
        if layer.rank > 1
    }


ALL = LoraConfig("dit", ("*",), 1, None)


@pytest.mark.parametrize(
    ("pattern", "numbers"),
    [
        ("attn", (0, 1, 3)),
        ("attn1", (0, 3)),
        ("attn1.to_q", (0, 3)),
        ("blocks.1", (0, 1, 2)),
        ("blocks.1.attn", (0, 1)),
        ("ff.net.2", (2,)),
        ("*mlp", (4,)),
        ("blocks.12.img_mlp.net.0.proj", (4,)),
        ("q", (0, 1, 3)),
    ],
)
def test_a_pattern_is_dotted_parts_of_a_name_or_an_alias(
    pattern: str, numbers: tuple[int, ...]
) -> None:
    """The last part may be cut short, but for a number."""
    found = numbers_of(replace(ALL, ranks=((pattern, 2),)), q=("to_q",))
    assert list(found) == [LAYERS[number] for number in numbers]
    assert set(found.values()) == {(2, 2.0)}


@pytest.mark.parametrize(
    ("patterns", "hint"),
    [
        (["ff.net.2.x"], ""),
        (["ff.net.20"], ""),
        (["mlp"], ""),
        (["o_q"], "'to_q'"),
        (["atn1"], "'attn1'"),
        (["attn1", "attn"], ""),
    ],
)
def test_a_pattern_without_effect_is_refused(patterns: list[str], hint: str) -> None:
    numbers = tuple((pattern, 2) for pattern in patterns)
    with pytest.raises(UsageError, match=f"--lora_rank: '{patterns[0]}'.*{hint}"):
        numbers_of(replace(ALL, ranks=numbers))
    with pytest.raises(UsageError, match=f"--lora_alpha: '{patterns[0]}'.*{hint}"):
        numbers_of(replace(ALL, alphas=numbers))


def test_the_last_of_several_patterns_counts_and_of_its_own_layers() -> None:
    config = replace(
        ALL,
        alpha=3.0,
        ranks=(("attn", 8), ("attn2", 4), ("proj", 2), ("x.proj", 5)),
        alphas=(("attn2", 6.0), ("x.proj", 1)),
    )
    assert numbers_of(config) == {
        LAYERS[0]: (8, 3.0),
        LAYERS[1]: (4, 6.0),
        LAYERS[3]: (8, 3.0),
        LAYERS[4]: (2, 3.0),
        "proj": (2, 3.0),
        "x.proj": (5, 1.0),
    }


def test_what_identifies_plain_layers_is_what_it_was() -> None:
    """States of earlier versions contain a digest of it."""
    plain = LoraConfig("dit", ("to_q",), 4, 6.0)
    assert plain.identity == {
        "component": "dit",
        "targets": ("to_q",),
        "rank": 4,
        "alpha": 6.0,
    }
    more = {"type": "lokr", "dropout": 0.1, "ranks": (("a", 2),)}
    changed = replace(plain, **more, settings=(("factor", 4),))
    assert changed.identity == {**plain.identity, **more, "factor": 4}
    both = Trainables(("vae", "dit.blocks.0"), (plain,))
    assert both.identity == {"full": both.full, "lora": [plain.identity]}
    assert both.components == ("vae", "dit")


def typed(lora_type: Any, rank: int = 2, **fields: Any) -> LoraConfig:
    """Layers of one type on two targets."""
    return replace(SPEC, rank=rank, alpha=3.0, type=lora_type, **fields)


LORA = typed("lora")


@pytest.mark.parametrize(
    ("own", "given", "words"),
    [
        (LORA, typed("lora", 3), "--lora_rank 3"),
        (LORA, replace(LORA, alpha=4.0), "--lora_alpha 4"),
        (
            replace(LORA, ranks=(("to_q", 4),)),
            replace(LORA, ranks=(("to_q", 3),)),
            r"rank 3 of blocks\.0\.attn\.to_q.*4\n.*--lora_rank.*PATTERN=3",
        ),
        (
            LORA,
            replace(LORA, targets=("to_q",)),
            r"2 .*: blocks\.0\.attn\.to_out\.0, .*--lora_target_modules",
        ),
        (
            replace(LORA, targets=("to_q",)),
            LORA,
            r"2 .*: blocks\.0\.attn\.to_out\.0, .*--lora_target_modules",
        ),
    ],
)
def test_layers_that_are_not_those_in_training_are_refused_with_what_to_give(
    own: LoraConfig, given: LoraConfig, words: str
) -> None:
    with pytest.raises(StateError, match=f"(?s){words}"):
        load_layers(lora_layers(trained(own)), lora_layers(trained(given)), PATH)


def test_layers_are_copied_into_the_memory_of_those_in_training() -> None:
    source, module = trained(LORA), network()
    inject(module, replace(LORA, alpha=3.0), {})
    load_layers(lora_layers(module), lora_layers(source), PATH)
    assert torch.allclose(output(module), output(source), atol=1e-6)
    assert not torch.allclose(output(module), output(network()), atol=1e-3)
    assert {layer.alpha for layer in lora_layers(module).values()} == {3.0}


def test_layers_that_no_loss_reaches_may_be_missing_or_without_effect() -> None:
    layers = dict(lora_layers(trained(SPEC)))
    optional = "blocks.1.attn.to_out.0"
    fewer = {name: layer for name, layer in layers.items() if name != optional}
    own = lora_layers(trained(SPEC))
    own["blocks.0.attn.to_q"].up.zero_()
    load_layers(own, fewer, PATH, [optional])
    assert torch.equal(own["blocks.0.attn.to_q"].up, layers["blocks.0.attn.to_q"].up)
    with pytest.raises(StateError, match=f"1 .*: {optional}"):
        load_layers(own, fewer, PATH)
    three = lora_layers(trained(replace(SPEC, targets=("to_q", "0.attn.to_out.0"))))
    with pytest.raises(StateError, match=f"1 .*: {optional}"):
        load_layers(three, layers, PATH, [optional])
    layers[optional].up.zero_()
    load_layers(three, layers, PATH, [optional])


@pytest.mark.parametrize(
    ("rank", "alpha", "exact"),
    [(4, 4.0, True), (4, 8.0, True), (4, 1.0, True), (8, 3.5, False), (4, 6.0, False)],
)
def test_a_saved_lora_acts_alike_and_training_goes_on_from_it(
    rank: int, alpha: float, exact: bool, tmp_path: Path
) -> None:
    """Bit for bit if alpha / rank is a power of 2, else within a rounding of fp32."""
    config = replace(SPEC, rank=rank, alpha=alpha)
    path, module = ours(tmp_path, config)
    found = read(path)
    plain, again = network(), network()
    add_layers(plain, found.layers)
    tolerance = 0 if exact else 1e-5
    assert torch.allclose(output(plain), output(module), rtol=tolerance, atol=tolerance)
    assert not torch.allclose(output(plain), output(network()), atol=1e-2)
    inject(again, config, {})
    load_layers(lora_layers(again), found.trained_layers(path), path)
    for name, value in lora_state(module).items():
        got = lora_state(again)[name]
        assert torch.allclose(got, value, rtol=0 if exact else 1.2e-7, atol=0)
    assert all(
        one.requires_grad for name, one in again.named_parameters() if "lora_" in name
    )
    assert float(found.header["alpha"]) == alpha
