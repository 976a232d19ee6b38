"""A dry run says how much memory and disk a run needs: what loading allocates, what is
trained, what is there at once, and what is written.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dstrain import UsageError
from dstrain.runs.loop import steps
from dstrain_memory.quantization.known_methods import METHODS
from torch import nn

from tests.support.runs import config, train, training_run

pytestmark = pytest.mark.usefixtures("tiny")
DryRun = Callable[..., Any]
DIGITS = 0.06 * 2**10
"""Bytes by which a size may be rounded."""


def near(size: float, share: float = 0.02) -> Any:
    return pytest.approx(size, rel=share, abs=DIGITS)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"mixed_precision": "bf16"},
        {"trainable_models": "dit", "mixed_precision": "bf16"},
        {"trainable_models": "dit.blocks", "mixed_precision": "bf16"},
        {"trainable_models": "text_encoder", "lora_base_model": "dit"},
        {"lora_type": "dora", "lora_rank": "3,to_out=2"},
        {"lora_type": "lokr", "lokr_factor": 2, "lora_rank": "4,to_out=1"},
        {"quant_options": "dit:int8_block;text_encoder:fp8"},
        {"quant_options": "dit:fp8@to_q", "mixed_precision": "bf16"},
        *({"quant_options": f"dit:{one};text_encoder:{one}"} for one in METHODS),
    ],
    ids=str,
)
def test_weights_are_what_loading_allocates(
    flags: dict[str, Any], deep: Path, dry_run: DryRun
) -> None:
    printed = dry_run(deep, **flags)
    module = training_run(config(deep, **{"mixed_precision": "no", **flags})).module
    for name, network in module.pipeline.components.items():
        if isinstance(network, nn.Module):
            tensors = [*network.parameters(), *network.buffers()]
            frozen = [one for one in tensors if not one.requires_grad]
            size = sum(one.untyped_storage().nbytes() for one in frozen)
            assert printed.memory.get(name, 0) == near(size)
    size = sum(one.nbytes for one in module.trained_parameters)
    count = sum(one.numel() for one in module.trained_parameters)
    assert f"  {count:,} parameters in fp32\n" in printed.page
    assert printed.memory["trained weights"] == near(size)
    assert printed.memory["gradients"] == near(size)


@pytest.mark.parametrize("trained", [{}, {"trainable_models": "dit"}])
def test_the_state_of_the_optimizer_is_what_a_step_leaves(
    trained: dict[str, Any], deep: Path, dry_run: DryRun
) -> None:
    ready = training_run(config(deep, ema_decay=0.9, **trained))
    next(steps(ready))
    state = ready.optimizer.state.values()
    tensors = [one for own in state for one in own.values() if one.ndim]
    found = dry_run(deep, ema_decay=0.9, **trained).memory
    assert found["optimizer state"] == near(sum(one.nbytes for one in tensors))
    assert found["average (EMA)"] == near(found["trained weights"], 0)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("adamw", 8, 8.1), ("adafactor", 0, 0.2), ("muon", 4, 4.1), ("adamw8bit", 2, 3)],
)
def test_each_optimizer_has_bytes_of_its_own(
    name: str, least: float, most: float, deep: Path, dry_run: DryRun
) -> None:
    found = dry_run(deep, optimizer=name)
    (per_number,) = re.findall(rf"{name}, ([\d.]+) bytes", found.page)
    assert least <= float(per_number) <= most
    trained = found.memory["trained weights"] / 4
    assert found.memory["optimizer state"] == near(float(per_number) * trained)


def test_each_stage_has_its_own_components_and_stage_1_trains_nothing(
    deep: Path, dry_run: DryRun
) -> None:
    whole = dry_run(deep).memory
    cache = {"feature_cache": deep / "cache"}
    both = dry_run(deep, **cache)
    first, second = both.stages
    assert list(first)[:3] == ["text_encoder", "vae", "encoding"]
    assert list(second)[:4] == [
        "dit",
        "trained weights",
        "gradients",
        "optimizer state",
    ]
    assert {"dit", "text_encoder", "vae", "gradients"} <= whole.keys()
    # Units run before a step keeps anything.
    assert whole["activations"] == max(first["encoding"], second["activations"])
    stage_1 = dry_run(deep, task="sft:data_process", **cache)
    assert stage_1.memory == first
    stage_2 = dry_run(deep, task="sft:train", **cache)
    assert stage_2.memory.keys() == second.keys()
    larger = both.page.partition("whether it fits: ")[2].partition("\n")[0]
    number = 1 + both.sums.index(max(both.sums))
    assert f" stage {number}: 1.00 GiB" in larger


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"task": "sft:data_process", "feature_cache": "cache"},
        {"trainable_models": "dit", "ema_decay": 0.9},
        {"feature_cache": "cache"},
    ],
)
def test_it_fits_where_there_is_room_for_what_is_not_counted(
    flags: dict[str, Any], deep: Path, dry_run: DryRun
) -> None:
    if "feature_cache" in flags:
        flags = {**flags, "feature_cache": deep / "cache"}
    needed = 2**30 + 1.05 * max(dry_run(deep, **flags).sums)
    for beyond in (-500, 500):
        size = f"{(needed + beyond) / 2**20:.6f}MiB"
        answer = dry_run(deep, device_memory=size, **flags).page
        assert ("    it fits on --device_memory" in answer) is (beyond > 0)
        assert ("    it does not fit on " in answer) is (beyond < 0)


def test_swapped_blocks_are_in_ram_and_two_of_them_on_the_device(
    deep: Path, dry_run: DryRun
) -> None:
    plain = dry_run(deep).memory
    checkpointed = dry_run(deep, use_gradient_checkpointing=True).memory
    block = dry_run(deep, blocks_to_swap=1).memory["RAM for weights"]
    every = {"enable_model_cpu_offload": True}
    for flags, count in (
        *(({"blocks_to_swap": count}, count) for count in (1, 2, 3, 4)),
        (every, 4),
    ):
        found = dry_run(deep, **flags).memory
        assert found["RAM for weights"] == near(count * block)
        assert found["dit"] == near(plain["dit"] - max(count - 2, 0) * block)
        # Blocks are computed once more, as with gradient checkpointing.
        assert found["activations"] == checkpointed["activations"]
    # Of blocks that differ, two of the largest.
    smaller = dry_run(deep, quant_options="dit:fp8@blocks.3.*", blocks_to_swap=4).memory
    assert smaller["dit"] == found["dit"]


def test_what_is_offloaded_is_on_the_device_while_a_unit_borrows_it(
    deep: Path, dry_run: DryRun
) -> None:
    stage_1 = {"task": "sft:data_process", "feature_cache": deep / "cache"}
    plain = dry_run(deep, **stage_1).memory
    names = ("text_encoder", "vae")
    found = dry_run(deep, offload_models=",".join(names), **stage_1).memory
    assert [found[name] for name in names] == [0, 0]
    sizes = [plain[name] for name in names]
    assert found["RAM for weights"] == near(sum(sizes))
    assert found["encoding"] == near(plain["encoding"] + max(sizes))


def test_trained_weights_in_bf16_have_gradients_in_bf16_and_no_copies(
    deep: Path, dry_run: DryRun
) -> None:
    flags: dict[str, Any] = {"trainable_models": "dit", "mixed_precision": "bf16"}
    flags |= {"use_gradient_checkpointing": True, "ema_decay": 0.9}
    exact = dry_run(deep, **flags).memory
    found = dry_run(deep, trainable_dtype="bf16", **flags)
    rounded = found.memory
    for name in ("trained weights", "gradients"):
        assert rounded[name] == near(exact[name] / 2)
    for name in ("optimizer state", "average (EMA)"):
        assert rounded[name] == exact[name]
    assert rounded["activations"] < exact["activations"]
    assert re.search(r"trained weights .* in bf16\n +gradients .* bf16\n", found.page)
    with pytest.raises(UsageError, match="--trainable_dtype"):
        dry_run(deep, trainable_dtype="bf16", **flags | {"mixed_precision": "no"})


SHARDS = ("trained weights", "gradients", "optimizer state", "average (EMA)")


@pytest.mark.parametrize("gives_up", [True, False])
def test_sharding_divides_what_is_trained_and_puts_blocks_together(
    gives_up: bool, deep: Path, dry_run: DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"trainable_models": "dit", "ema_decay": 0.9}
    alone = dry_run(deep, **flags)
    block = dry_run(deep, blocks_to_swap=1).memory["RAM for weights"]
    outside = dry_run(deep).memory["dit"] - 4 * block
    for name, value in {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": str(gives_up),
        "WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    divided = dry_run(deep, **flags)
    for name in SHARDS:
        assert divided.memory[name] == near(alone.memory[name] / 2)
    together = divided.memory["weights put together"]
    assert together == near(outside + (2 if gives_up else 4) * block)
    assert divided.disk == alone.disk
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    offloaded = dry_run(deep, **flags).memory
    assert [offloaded[name] for name in SHARDS[:3]] == [0, 0, 0]
    shards = sum(divided.memory[name] for name in SHARDS)
    assert offloaded["RAM for what is sharded"] == near(shards)
    monkeypatch.setenv("RANK", "1")
    assert dry_run(deep, **flags).page == ""


def test_sharding_divides_frozen_weights_and_each_process_has_a_row(
    deep: Path, dry_run: DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = dry_run(deep).memory
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("WORLD_SIZE", "2")
    divided = dry_run(deep, offload_models="text_encoder").memory
    assert divided["dit"] == near(alone["dit"] / 2)
    assert divided["RAM for weights"] == alone["text_encoder"]
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    found = dry_run(deep).memory
    assert found["dit"] == 0
    shards = sum(divided[name] for name in ("dit", *SHARDS[:3]))
    assert found["RAM for what is sharded"] == near(shards)
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "false")
    monkeypatch.setenv("WORLD_SIZE", "99")
    # Of each matrix of LoRA, which has 2 or 24 rows.
    assert dry_run(deep).memory["trained weights"] == near(8 * 4 * (24 + 2))


@pytest.mark.parametrize(
    ("flags", "saves", "states"),
    [
        ({"save_steps": 100, "max_steps": 1000}, "10", 3),
        ({"save_steps": 600, "max_steps": 1000}, "2", 2),
        ({"save_steps": 100, "max_steps": 1000, "keep_checkpoints": 4}, "5", 5),
        ({"save_steps": 1, "max_steps": 2, "keep_checkpoints": 4}, "2", 2),
        ({"max_steps": 12}, "2", 2),
        ({"save_steps": 4, "dataset_base_path": None}, "unknown", 3),
        ({"keep_checkpoints": 2, "dataset_base_path": None}, "3", 3),
    ],
)
def test_saves_and_states_are_counted(
    flags: dict[str, Any], saves: str, states: int, deep: Path, dry_run: DryRun
) -> None:
    found = dry_run(deep, **flags)
    (counted,) = re.findall(r"weights files .* x (\w+) save", found.page)
    (kept,) = re.findall(r"training states .* x (\d+),", found.page)
    assert (counted, int(kept)) == (saves, states)
    if saves == "unknown":
        assert "in all" not in found.disk
    else:
        weights = int(saves) * found.disk["weights files"]
        most = weights + states * found.disk["training states"]
        assert found.disk["in all"] == near(most, 0.1)


@pytest.mark.parametrize("flags", [{}, {"ema_decay": 0.9}, {"trainable_models": "dit"}])
def test_disk_is_what_the_run_leaves(
    flags: dict[str, Any], deep: Path, tmp_path: Path, dry_run: DryRun
) -> None:
    flags = {**flags, "save_steps": 1, "max_steps": 2}
    said = dry_run(deep, **flags).disk["in all"]
    train(deep, output_path=tmp_path, **flags)
    written = sum(one.stat().st_size for one in tmp_path.rglob("*.safetensors"))
    # Beside the headers of files, which count at the size of a toy.
    assert 0.5 < said / written <= 1
