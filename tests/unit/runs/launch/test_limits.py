"""What cannot be sharded among processes is refused before anything is loaded, by a dry
run as by the run.
"""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from dstrain import UsageError, run
from dstrain.runs.checks.rows import dataset_inputs
from dstrain.runs.launch.limits import refuse_unshardable
from dstrain.runs.resolve import resolve

from tests.support.runs import config, project

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


@pytest.mark.parametrize("is_dry", [False, True])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"preview_prompt": ("dog",)}, "one process makes the previews.*generate --run out"),
        ({"compile": True}, "--compile: sharding puts other weights"),
        ({"optimizer": "muon"}, "muon is not known to do with rows what"),
        ({"optimizer": "adamw8bit"}, "adamw8bit is not known to do with rows what"),
        ({"customized_optimizer": "torch.optim.Adafactor"}, "use adamw, lion or"),
        ({"blocks_to_swap": 1}, "--blocks_to_swap: .*leave it out"),
        ({"enable_model_cpu_offload": True}, "--enable_model_cpu_offload: swapped"),
        ({"mixed_precision": "bf16", "trainable_dtype": "bf16"}, "fp32, not in bf16"),
        ({"ema_decay": 0.9, "optimizer": "schedulefree"}, "averages the weights itself"),
    ],
)  # fmt: skip
def test_it_is_refused_in_words(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: dict[str, Any],
    words: str,
    is_dry: bool,
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("WORLD_SIZE", "2")
    asked = config(here, output_path=Path("out"), dry_run=is_dry, **flags)
    with pytest.raises(UsageError) as refused:
        run(asked)
    assert refused.match(f"(?s){words}")


@pytest.mark.parametrize("stage", ["", ":train"])
def test_a_component_that_a_unit_runs_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = {"trainable_models": "text_encoder", "task": f"sft{stage}"}
    words = "cannot shard text_encoder: encode_prompt runs it once for each sample"
    with pytest.raises(UsageError, match=words):
        run(config(here, output_path=Path("out"), dry_run=True, **flags))


def test_a_dry_run_refuses_a_weight_without_rows(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = UsageError("sharding", "refused")
    monkeypatch.setattr(
        "dstrain.runs.build.refuse_single_numbers", Mock(side_effect=refused)
    )
    with pytest.raises(UsageError, match="refused"):
        run(config(here, output_path=Path("out"), dry_run=True))


def test_machines_have_equally_many_processes(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "HYBRID_SHARD")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="3 processes do not make machines of 2 each"):
        run(config(here, output_path=Path("out"), dry_run=True))


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"trainable_models": "dit"},
        {"trainable_models": "dit.blocks.1"},
        *({"optimizer": name} for name in ("adamw", "lion", "schedulefree")),
        {"customized_optimizer": "torch.optim.NAdam"},
    ],
)
def test_the_denoiser_can_be_divided(here: Path, flags: dict[str, Any]) -> None:
    setup = resolve(config(here, **flags))
    refuse_unshardable(setup, [setup.plan(dataset_inputs(setup))])
