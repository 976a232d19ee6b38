"""What cannot be sharded is refused before loading, by a dry run as by the run."""

from pathlib import Path
from typing import Any

import pytest
from dstrain import UsageError, run

from tests.support.runs import config

pytestmark = pytest.mark.usefixtures("tiny", "sharded")
ROUNDED = {"mixed_precision": "bf16", "trainable_dtype": "bf16"}
AVERAGED_TWICE = {"ema_decay": 0.9, "optimizer": "schedulefree"}


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.parametrize("is_dry", [False, True])
@pytest.mark.parametrize(
    ("flags", "option", "named"),
    [
        ({"optimizer": "muon"}, "--optimizer", "muon"),
        ({"optimizer": "adamw8bit"}, "--optimizer", "adamw8bit"),
        ({"customized_optimizer": "torch.optim.Adafactor"}, "--optimizer", "lion"),
        ({"lora_type": "dora"}, "--lora_type", "dora"),
        (ROUNDED, "--trainable_dtype", "fp32"),
        (AVERAGED_TWICE, "--ema_decay", "schedulefree"),
    ],
)
def test_it_is_refused_by_its_option(
    here: Path, flags: dict[str, Any], option: str, named: str, is_dry: bool
) -> None:
    with pytest.raises(UsageError) as refused:
        run(config(here, output_path=Path("out"), dry_run=is_dry, **flags))
    assert refused.value.where == option
    assert named in str(refused.value)


@pytest.mark.parametrize("stage", ["", ":train"])
def test_a_component_that_a_unit_runs_is_refused(here: Path, stage: str) -> None:
    flags = {"trainable_models": "text_encoder", "task": f"sft{stage}"}
    with pytest.raises(UsageError, match="text_encoder: encode_prompt"):
        run(config(here, dry_run=True, **flags))


def test_machines_have_equally_many_processes(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "HYBRID_SHARD")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"3 .* 2 each"):
        run(config(here, dry_run=True))
