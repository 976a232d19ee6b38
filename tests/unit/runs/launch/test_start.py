"""The processes of a run meet, whatever their launcher is; accelerate does nothing by
itself.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from dstrain import UsageError
from dstrain.runs.launch.start import TRANSLATED, meet, without_accelerates_own

from tests.support.processes import in_processes


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_processes_on_cpus_meet_told_or_not(told: bool, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        if not told:
            del os.environ["ACCELERATE_USE_CPU"]
        # As accelerate hands on DeepSpeed's settings, which it must not act on.
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        with without_accelerates_own():
            accelerator = meet(os.environ, None, False, 1)
        assert accelerator.num_processes == 2
        assert accelerator.process_index == rank
        assert accelerator.distributed_type == DistributedType.MULTI_CPU
        assert torch.distributed.get_backend() == "gloo"
        one = torch.ones(1)
        torch.distributed.all_reduce(one)
        assert one.item() == 2

    ended = in_processes(2, work, tmp_path)
    assert ended.codes == (0, 0), ended.said


def test_processes_that_do_not_meet_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meet({}, None, False, 1)  # alone
    with pytest.raises(UsageError, match="2 were started, but this one met 0 others"):
        meet({"WORLD_SIZE": "2"}, None, False, 1)


def test_settings_are_hidden_and_there_again_for_another_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in TRANSLATED:
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with without_accelerates_own():
        assert not os.environ.keys() & {*TRANSLATED}
        assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert {os.environ[name] for name in TRANSLATED} == {"true"}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"distributed_type": DistributedType.DEEPSPEED}, "has a deepspeed_plugin"),
        ({"distributed_type": DistributedType.FSDP}, "has an fsdp_plugin"),
        ({"distributed_type": DistributedType.MEGATRON_LM}, "has a megatron_lm_plugin"),
        ({"_mixed_precision": "bf16"}, "has mixed_precision='bf16'"),
    ],
)
def test_a_scripts_own_accelerator_has_no_settings_that_dstrain_acts_on(
    state: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AcceleratorState, "_shared_state", state)
    with pytest.raises(UsageError, match=message) as caught:
        meet({}, None, False, 1)
    assert caught.value.where == "the script's own Accelerator"


def test_a_scripts_own_accumulation_agrees_with_the_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for flag in (4, 2):
        # Each Accelerator sets it anew.
        monkeypatch.setitem(
            GradientState._shared_state, "plugin_kwargs", {"num_steps": 4}
        )
        if flag == 4:
            meet({}, None, False, flag)
            continue
        with pytest.raises(
            UsageError,
            match="--gradient_accumulation_steps: is 2, but the script's own",
        ):
            meet({}, None, False, flag)
