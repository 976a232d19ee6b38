"""Flags are advised in the order of their cost, as commands that can be typed."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain import TrainConfig
from dstrain.runs.memory.advice import (
    Advice,
    Possible,
    Way,
    added_flags,
    as_commands,
    encoding_ways,
    first_stage,
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
ONE_RUN = Possible("bf16", can_split=False)


def added(config: TrainConfig, possible: Possible) -> list[str]:
    return [added_flags(way.changes) for way in ways(config, possible)]


def test_the_cheapest_comes_first_and_keeps_what_is_before_it() -> None:
    config = TrainConfig(**GIVEN, batch_size=4)
    found = added(config, Possible("no", can_split=True))
    checkpointing = "--use_gradient_checkpointing"
    split = f"{checkpointing} --task sft:train --feature_cache out-features"
    mixed = f"{split} --mixed_precision bf16"
    small = f"{mixed} --batch_size 1 --gradient_accumulation_steps 4"
    assert found[:4] == [checkpointing, split, mixed, small]
    assert "--use_gradient_checkpointing_offload" in found[-1].split()
    assert "--use_gradient_checkpointing" not in found[-1].split()


def test_what_is_given_is_not_advised() -> None:
    config = TrainConfig(
        **GIVEN,
        use_gradient_checkpointing_offload=True,
        mixed_precision="bf16",
        trainable_dtype="bf16",
    )
    assert list(ways(config, ONE_RUN)) == []


def test_a_run_that_resumes_keeps_what_its_numbers_depend_on() -> None:
    possible = Possible(
        "no",
        can_split=True,
        blocks=2,
        lora=("dit",),
        has_bitsandbytes=True,
        resumes=True,
    )
    in_ram = "--use_gradient_checkpointing_offload"
    assert added(TrainConfig(**GIVEN, batch_size=4), possible) == [
        "--use_gradient_checkpointing",
        in_ram,
        f"{in_ram} --blocks_to_swap 1",
        f"{in_ram} --blocks_to_swap 2",
    ]


def test_a_folder_without_a_name_gets_its_cache_beside_it() -> None:
    config = TrainConfig(**{**GIVEN, "output_path": Path(".")})
    here = Path.cwd()
    cache = split_way(config, Possible("bf16", can_split=True)).config.feature_cache
    assert cache == here.with_name(f"{here.name}-features")


def test_a_run_of_stage_2_is_not_split_again() -> None:
    config = TrainConfig(**GIVEN, task="sft:train", feature_cache=Path("features"))
    found = list(ways(config, Possible("bf16", can_split=True)))
    assert found
    assert not any(way.is_split or "feature_cache" in way.changes for way in found)


def test_frozen_weights_take_8_bits_then_blocks_are_swapped_then_4_bits() -> None:
    config = TrainConfig(**GIVEN, use_gradient_checkpointing_offload=True)
    possible = replace(
        ONE_RUN,
        blocks=4,
        lora=("dit",),
        modulation={"dit": ("mod.1",)},
        has_bitsandbytes=True,
    )
    mild = "--quant_options dit:int8_block"
    strong = "--quant_options 'dit:bitsandbytes_nf4/mod.1;dit:int8_block@mod.1'"
    assert added(config, possible) == [
        mild,
        f"{mild} --blocks_to_swap 1",
        f"{mild} --blocks_to_swap 2",
        strong,
        *(f"{strong} --blocks_to_swap {count}" for count in (1, 2, 3, 4)),
        f"{strong} --blocks_to_swap 4 --optimizer adamw8bit",
        f"{strong} --blocks_to_swap 4 --optimizer adamw8bit --trainable_dtype bf16",
    ]
    given = replace(config, quant_options="text_encoder:fp8")
    assert added(given, possible)[0] == (
        "--quant_options 'text_encoder:fp8;dit:int8_block'"
    )


def test_full_training_takes_a_smaller_state_then_weights_in_bf16() -> None:
    config = TrainConfig(**GIVEN, use_gradient_checkpointing_offload=True)
    small = "--optimizer adamw8bit"
    with_library = replace(ONE_RUN, has_bitsandbytes=True)
    assert added(config, with_library) == [small, f"{small} --trainable_dtype bf16"]
    assert added(config, ONE_RUN) == ["--trainable_dtype bf16"]
    other = replace(config, customized_optimizer="torch.optim.SGD")
    assert added(other, with_library) == ["--trainable_dtype bf16"]


def test_another_optimizer_gets_the_arguments_that_it_takes() -> None:
    config = TrainConfig(
        **GIVEN,
        use_gradient_checkpointing_offload=True,
        optimizer_args=("foreach=true", "eps=1e-6"),
    )
    possible = replace(ONE_RUN, has_bitsandbytes=True)
    way = next(iter(ways(config, possible)))
    assert way.config.optimizer == "adamw8bit"
    assert way.config.optimizer_args == ("eps=1e-6",)


def test_stage_1_takes_turns_then_tiles_then_8_bits_for_the_largest_encoder() -> None:
    config = TrainConfig(**GIVEN, task="sft:data_process")
    possible = replace(
        ONE_RUN,
        encoders=("large", "small"),
        taking_turns=("large", "small", "vae"),
        has_tiles=True,
        has_bitsandbytes=True,
    )
    found = [added_flags(way.changes) for way in encoding_ways(Way(config), possible)]
    turns = "--offload_models large,small,vae"
    assert found[:4] == ["", turns, "--tiled", f"--tiled {turns}"]
    assert found[4:6] == ["--quant_options large:int8_block",
                          f"--quant_options large:int8_block {turns}"]  # fmt: skip
    stored = [one.split(" --")[0] for one in found[4::4]]
    assert stored == [
        "--quant_options large:int8_block",
        "--quant_options 'large:int8_block;small:int8_block'",
        "--quant_options large:bitsandbytes_nf4",
        "--quant_options 'large:bitsandbytes_nf4;small:bitsandbytes_nf4'",
    ]


def split_way(config: TrainConfig, possible: Possible) -> Way:
    return next(way for way in ways(config, possible) if way.is_split)


def test_what_cached_values_depend_on_is_in_both_commands() -> None:
    config = TrainConfig(**GIVEN, quant_options="vae:fp8", mixed_precision="no")
    possible = Possible("no", can_split=True, lora=("dit",), encoders=("text_encoder",),
                        taking_turns=("text_encoder", "vae"), has_tiles=True)  # fmt: skip
    *_, way = (way for way in ways(config, possible) if "quant_options" in way.changes)
    *_, encoding = encoding_ways(first_stage(config, way), possible)
    commands = as_commands(config, way.with_first_stage(encoding))
    assert all(one.is_whole for one in commands)
    first, second = [shlex.split(one.text) for one in commands]
    for words, stage in ((first, "sft:data_process"), (second, "sft:train")):
        assert words[words.index("--task") + 1] == stage
        assert words[words.index("--feature_cache") + 1] == "out-features"
        assert words[words.index("--mixed_precision") + 1] == "bf16"
        assert "--tiled" in words
        assert "--dry_run" not in words and "--device_memory" not in words
    stored = "vae:fp8;text_encoder:int8_block"
    assert first[first.index("--quant_options") + 1] == stored
    assert second[second.index("--quant_options") + 1] == f"{stored};dit:int8_block"
    assert "--offload_models" in first and "--offload_models" not in second
    assert "--use_gradient_checkpointing_offload" in second


def test_of_a_command_that_is_not_complete_the_flags_are_said() -> None:
    config = TrainConfig(model="tiny", dry_run=True, device_memory="24GB")
    way = next(ways(config, ONE_RUN))
    flag = "add --use_gradient_checkpointing"
    assert as_commands(config, way) == [Advice(flag, is_whole=False)]
    typed = replace(config, optimizer_args=("foreach=False",))
    changes = {"optimizer": "adamw8bit", "optimizer_args": ()}
    assert as_commands(typed, Way(typed).with_changes(**changes)) == [
        Advice("add --optimizer adamw8bit, without --optimizer_args", is_whole=False)
    ]
    way = split_way(config, Possible("bf16", can_split=True))
    first = next(encoding_ways(first_stage(config, way), ONE_RUN))
    cache = "--feature_cache output-features"
    commands = as_commands(config, way.with_first_stage(first))
    assert [one.text for one in commands] == [
        f"add {cache} --task sft:data_process",
        f"add --use_gradient_checkpointing --task sft:train {cache}",
    ]
