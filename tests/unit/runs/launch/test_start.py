"""The processes of a run meet, whatever their launcher is."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, TorchDynamoPlugin
from dstrain import UsageError, run
from dstrain.cli.main import main

from tests.support.forks import forget_accelerator
from tests.support.processes import in_processes, words
from tests.support.runs import changed, config, flags_of, log, train

pytestmark = pytest.mark.usefixtures("tiny")
HIDDEN = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_SHARDING_STRATEGY": "NO_SHARD",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "ACCELERATE_DYNAMO_BACKEND": "no",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto",
}
"""Settings, of which all but one would make accelerate act itself."""


@pytest.fixture(autouse=True)
def no_accelerator() -> Iterator[None]:
    """Forget the Accelerators of other runs in this process, and those of a test."""
    forget_accelerator()
    yield
    forget_accelerator()


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_processes_on_cpus_meet_told_or_not_and_train_as_one(
    told: bool, here: Path, tmp_path: Path
) -> None:
    flags = flags_of(here, output_path=tmp_path / "out", learning_rate=1e-2)

    def work(rank: int) -> int:
        if not told:
            del os.environ["ACCELERATE_USE_CPU"]
        # As accelerate hands on DeepSpeed's settings, which it must not act on.
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = "0"
        return main(words(flags))

    ended = in_processes(2, work, tmp_path)
    assert ended.codes == (0, 0), ended.said
    one = log(train(here, output_path=tmp_path / "one", batch_size=2))
    # Of three samples of each size, one is alone in its step.
    assert len(one) == 4
    for found, wanted in zip(log(tmp_path / "out"), one, strict=True):
        assert found == pytest.approx(wanted, rel=1e-3)


def test_settings_are_hidden_and_there_again_for_another_run(
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in HIDDEN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    seen: list[dict[str, str]] = []
    module = changed(lambda _: seen.append(dict(os.environ)))
    train(here, module, output_path=tmp_path, max_steps=1)
    assert set(seen[0]) & set(HIDDEN) == {"FSDP_SHARDING_STRATEGY"}
    assert seen[0]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert HIDDEN.items() <= os.environ.items()
    assert "FSDP 1 with NO_SHARD of " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"distributed_type": DistributedType.DEEPSPEED}, "plugin for DEEPSPEED"),
        ({"distributed_type": DistributedType.FSDP}, "plugin for FSDP"),
        ({"_mixed_precision": "bf16"}, "mixed_precision='bf16'"),
        ({"dynamo_plugin": TorchDynamoPlugin(backend="inductor")}, "dynamo_plugin"),
    ],
)
def test_a_scripts_own_accelerator_has_no_settings_that_dstrain_acts_on(
    state: dict[str, Any], named: str, here: Path, tmp_path: Path
) -> None:
    Accelerator(cpu=True)
    AcceleratorState._shared_state |= state
    with pytest.raises(UsageError, match=named) as caught:
        run(config(here, output_path=tmp_path))
    assert caught.value.where == "the script's own Accelerator"
