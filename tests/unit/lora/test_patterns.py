"""A pattern of layers matches dotted parts of their names, and one without effect is
refused.
"""

import re

import pytest
from dstrain import UsageError
from dstrain.lora.patterns import (
    exact_pattern,
    is_target,
    matches,
    numbers_of_layers,
)

LAYERS = (
    "blocks.1.attn1.to_q",
    "blocks.1.attn2.to_q",
    "blocks.1.ff.net.2",
    "blocks.12.attn1.to_q",
    "blocks.12.img_mlp.net.0.proj",
)
ALIASES = {"q": ("to_q",)}


@pytest.mark.parametrize(
    ("pattern", "numbers"),
    [
        ("attn", (0, 1, 3)),
        ("attn1", (0, 3)),
        ("attn1.to_q", (0, 3)),
        ("to_q", (0, 1, 3)),
        ("blocks.1", (0, 1, 2)),
        ("blocks.1.attn", (0, 1)),
        ("ff.net.2", (2,)),
        ("ff.net.2.x", ()),
        ("ff.net.20", ()),
        ("*mlp", (4,)),
        ("mlp", ()),
        ("o_q", ()),
        ("blocks.12.img_mlp.net.0.proj", (4,)),
    ],
)
def test_a_pattern_is_dotted_parts_of_a_name(
    pattern: str, numbers: tuple[int, ...]
) -> None:
    """The last may be cut short, but for a number."""
    found = [layer for layer in LAYERS if matches(layer, pattern)]
    assert found == [LAYERS[number] for number in numbers]


def test_a_target_is_the_end_of_a_name() -> None:
    assert is_target("blocks.1.attn.to_q", "to_q")
    assert is_target("blocks.1.attn.to_q", "blocks.*.to_q")
    assert not is_target("blocks.1.attn.to_q", "attn")
    assert not is_target("blocks.1.attn.to_q", "q")


def test_the_last_of_several_patterns_counts() -> None:
    found = numbers_of_layers("--lora_rank", LAYERS, (("attn", 8), ("attn2", 4)), {})
    assert found == {LAYERS[0]: 8, LAYERS[1]: 4, LAYERS[3]: 8}


def test_an_alias_of_the_family_stands_for_its_targets() -> None:
    found = numbers_of_layers("--lora_rank", LAYERS, (("q", 8),), ALIASES)
    assert set(found) == {layer for layer in LAYERS if layer.endswith("to_q")}


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("atn1",), "'atn1' matches no layer with LoRA; did you mean 'attn1'"),
        (("qq",), r"'qq' matches no layer with LoRA.*\n  they are: blocks\.1\.attn1"),
        (("attn1", "attn"), "'attn1' has no effect: later patterns match all"),
    ],
)
def test_a_pattern_without_effect_is_refused(
    patterns: tuple[str, ...], message: str
) -> None:
    numbers = tuple((pattern, 2) for pattern in patterns)
    with pytest.raises(UsageError, match=message):
        numbers_of_layers("--lora_rank", LAYERS, numbers, {})


def test_peft_finds_exactly_the_layers_of_a_pattern() -> None:
    names = ["proj", "blocks.1.proj"]
    # As `peft.utils.get_pattern_key` compares.
    pattern = re.compile(rf"(.*\.)?({exact_pattern(names)})$")
    found = [
        name
        for name in (*names, "blocks.2.proj", "x.blocks.1.proj", "blocksx1.proj")
        if pattern.match(name)
    ]
    assert found == names
