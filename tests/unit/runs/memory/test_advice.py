"""Flags are advised in the order of their cost, as commands that can be typed."""

import shlex
from pathlib import Path
from typing import Any

from dstrain.config.options.train import TrainConfig
from dstrain.runs.memory.advice import (
    Possible,
    added_flags,
    as_commands,
    cheapest,
    ways,
)

GIVEN: dict[str, Any] = {
    "model": "tiny",
    "toy": True,
    "dataset_base_path": Path("data"),
    "output_path": Path("out"),
    "dry_run": True,
    "device_memory": "24GB",
}


def test_the_cheapest_comes_first_and_keeps_what_is_before_it() -> None:
    config = TrainConfig(**GIVEN, batch_size=4)
    found = [added_flags(way) for way in ways(config, Possible("no", can_split=True))]
    checkpointing = "--use_gradient_checkpointing"
    split = f"{checkpointing} --task sft:train --feature_cache out-features"
    mixed = f"{split} --mixed_precision bf16"
    small = f"{mixed} --gradient_accumulation_steps 4"
    assert found[:4] == [checkpointing, split, mixed, small]
    assert "--use_gradient_checkpointing_offload" in found[-1].split()
    assert "--use_gradient_checkpointing" not in found[-1].split()


def test_what_is_given_is_not_advised() -> None:
    config = TrainConfig(
        **GIVEN, use_gradient_checkpointing_offload=True, mixed_precision="bf16"
    )
    assert list(ways(config, Possible("bf16", can_split=False))) == []


def test_frozen_weights_take_8_bits_then_blocks_are_swapped_then_4_bits() -> None:
    config = TrainConfig(**GIVEN, use_gradient_checkpointing_offload=True)
    possible = Possible(
        "bf16",
        can_split=False,
        blocks=4,
        lora=("dit",),
        modulation={"dit": ("mod.1",)},
        has_bitsandbytes=True,
    )
    found = [added_flags(way) for way in ways(config, possible)]
    mild = "--quant_options dit:int8_block"
    strong = "--quant_options 'dit:bitsandbytes_nf4/mod.1;dit:int8_block@mod.1'"
    assert found == [
        mild,
        f"{mild} --blocks_to_swap 1",
        f"{mild} --blocks_to_swap 2",
        strong,
        *(f"{strong} --blocks_to_swap {count}" for count in (1, 2, 3, 4)),
        f"{strong} --blocks_to_swap 4 --optimizer adamw8bit",
    ]


def test_the_first_that_fits_is_taken() -> None:
    config = TrainConfig(**GIVEN)
    way = cheapest(config, Possible("bf16", can_split=True), lambda way: way.is_split)
    assert way is not None and way.changes["task"] == "sft:train"
    assert cheapest(config, Possible("bf16", can_split=True), lambda way: None) is None


def test_the_commands_are_those_that_run_it() -> None:
    config = TrainConfig(**GIVEN)
    way = cheapest(config, Possible("bf16", can_split=True), lambda way: way.is_split)
    assert way is not None
    first, second = map(shlex.split, as_commands(config, way))
    for words, stage in ((first, "sft:data_process"), (second, "sft:train")):
        assert words[words.index("--task") + 1] == stage
        assert words[words.index("--feature_cache") + 1] == "out-features"
        assert "--dry_run" not in words and "--device_memory" not in words
    assert "--use_gradient_checkpointing" in second


def test_of_a_command_that_is_not_complete_the_flags_are_said() -> None:
    config = TrainConfig(model="tiny", dry_run=True, device_memory="24GB")
    way = next(ways(config, Possible("bf16", can_split=False)))
    assert as_commands(config, way) == ["add --use_gradient_checkpointing"]
