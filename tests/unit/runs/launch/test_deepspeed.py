"""DeepSpeed's ZeRO stages become sharding, and what it has besides is refused by name."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from dstrain import UsageError
from dstrain.distributed import Sharding
from dstrain.runs.launch.deepspeed import (
    OWN_SPEED,
    PREFIX,
    DeepSpeed,
    read_deepspeed,
)

from tests.support.launchers import ZERO_3


def said(**settings: str) -> DeepSpeed:
    """What settings of accelerate's own file say."""
    return read_deepspeed(
        {f"ACCELERATE_DEEPSPEED_{name}": value for name, value in settings.items()}
    )


def filed(folder: Path, **changes: Any) -> DeepSpeed:
    """What DeepSpeed's own file says."""
    path = folder / "zero.json"
    path.write_text(json.dumps({**ZERO_3, **changes}))
    return said(CONFIG_FILE=str(path))


@pytest.mark.parametrize(
    ("stage", "sharding"),
    [
        ("0", None),
        ("1", Sharding("full", False)),
        ("2", Sharding("full", False)),
        ("3", Sharding("full", True)),
    ],
)
def test_a_stage_becomes_sharding(stage: str, sharding: Sharding | None) -> None:
    found = said(ZERO_STAGE=stage)
    assert found.sharding == sharding
    assert found.said.startswith(f"ZeRO stage {stage} of ")


@pytest.mark.parametrize("part", ["OPTIMIZER", "PARAM"])
def test_offload_to_the_cpu_is_taken_over_and_to_a_disk_refused(part: str) -> None:
    name = f"OFFLOAD_{part}_DEVICE"
    assert said(ZERO_STAGE="3", **{name: "cpu"}).sharding == Sharding(offload=True)
    with pytest.raises(UsageError, match=f"offload to nvme .offload_{part.lower()}_"):
        said(ZERO_STAGE="3", **{name: "nvme"})


@pytest.mark.parametrize("stage", ["auto", "4"])
def test_another_stage_is_refused(stage: str) -> None:
    with pytest.raises(UsageError, match=f"ZeRO stage {stage} is not supported"):
        said(ZERO_STAGE=stage)


def test_deepspeeds_own_file_is_read(tmp_path: Path) -> None:
    found = filed(tmp_path)
    assert found.sharding == Sharding("full", True, True)
    assert found.flags == {}
    assert found.total_batch_size is None
    found = filed(
        tmp_path,
        bf16={"enabled": True},
        gradient_accumulation_steps=4,
        gradient_clipping=0.5,
        train_micro_batch_size_per_gpu=2,
        train_batch_size=16,
        zero_optimization={"stage": 2},
    )
    assert found.sharding == Sharding("full", False)
    assert found.flags == {
        "gradient_accumulation_steps": "4",
        "max_grad_norm": "0.5",
        "batch_size": "2",
        "mixed_precision": "bf16",
    }
    assert found.total_batch_size == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_optimization": {"stage": "auto"}}, "ZeRO stage auto"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "offload to nvme",
        ),
        ({"zero_optimization": 3}, "zero_optimization has to be an object"),
        ({"fp16": {"enabled": True}}, "fp16 is not supported"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer of DeepSpeed is not supported"),
        ({"compression_training": {"x": 1}}, "compression_training of DeepSpeed"),
        ({"train_batch_size": "many"}, "train_batch_size is 'many'"),
        ({"communication_data_type": "bf16"}, "communication_data_type of DeepSpeed"),
        ({"wandb": {"enabled": True}}, "give --report_to wandb"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            "zero_quantized_weights of DeepSpeed is not supported; leave it out",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
            "zero_hpz_partition_size of DeepSpeed",
        ),
        ({"zero_optimization": {"stge": 3}}, "stge of DeepSpeed"),
    ],
)
def test_what_deepspeeds_file_has_besides_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        filed(tmp_path, **changes)
    assert caught.value.where.endswith("zero.json")


def test_what_has_no_effect_is_said(tmp_path: Path) -> None:
    found = filed(tmp_path, communication_data_type="fp32")
    names = "communication_data_type, overlap_comm, contiguous_gradients, stage3_gather"
    assert f"; without effect here: steps_per_print, {names}" in found.said
    zero = {"stage": 2, "cpu_offload": True, "zero_hpz_partition_size": 1}
    found = filed(tmp_path, zero_optimization=zero)
    assert found.sharding == Sharding("full", False, True)
    assert found.said.endswith("here: steps_per_print, zero_hpz_partition_size")
    assert said(ZERO3_INIT="true").said.endswith("here: zero3_init_flag")
    assert "without effect" not in said(ZERO3_INIT="false").said


def test_every_setting_that_accelerate_hands_on_is_known() -> None:
    source = inspect.getsource(prepare_deepspeed_cmd_env)
    handed = set(re.findall(rf"{PREFIX}(\w+)", source))
    read = {"CONFIG_FILE", "ZERO_STAGE"}
    read |= {f"OFFLOAD_{part}_DEVICE" for part in ("OPTIMIZER", "PARAM")}
    assert handed == read | OWN_SPEED.keys()


def test_what_is_switched_off_changes_nothing(tmp_path: Path) -> None:
    assert filed(tmp_path, flops_profiler={"enabled": False}) == filed(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.json: cannot be read"):
        said(CONFIG_FILE=str(tmp_path / "absent.json"))
    (tmp_path / "torn.json").write_text('{"zero')
    with pytest.raises(UsageError, match=r"torn\.json: cannot be read"):
        said(CONFIG_FILE=str(tmp_path / "torn.json"))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UsageError, match=r"list\.json: is not a JSON object"):
        said(CONFIG_FILE=str(tmp_path / "list.json"))
