"""A configuration becomes a run, or is refused by its option."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import Task, TrainConfig, UsageError, run
from torch import nn

from tests.support import family
from tests.support.experts import copied_denoiser, let_tiny_have_experts
from tests.support.runs import config, log, project, train, training_run, weights_of

pytestmark = pytest.mark.usefixtures("tiny")


WITHOUT_BLOCKS = {"trainable_models": "vae.encoder", "use_gradient_checkpointing": True}
NO_TIMESTEPS = {"min_timestep_boundary": 0.5, "max_timestep_boundary": 0.5}


@pytest.mark.parametrize(
    ("changes", "option", "named"),
    [
        ({"trainable_models": "dot"}, "--trainable_models", "'dit'"),
        (WITHOUT_BLOCKS, "--use_gradient_checkpointing", "Vae"),
        (NO_TIMESTEPS, "--min_timestep_boundary", "0.5"),
    ],
)
def test_what_is_unknown_or_missing_is_refused_by_its_option(
    changes: dict[str, Any], option: str, named: str, here: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        run(config(here, **changes))
    assert caught.value.where == option
    assert named in caught.value.what


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({}, 6),
        ({"num_epochs": 2}, 12),
        ({"max_steps": 8}, 8),
        ({"num_epochs": 1, "max_steps": 5}, 5),
        ({"num_epochs": 1, "max_steps": 7}, 6),
    ],
)
def test_the_smaller_of_epochs_and_steps_ends_a_run(
    flags: dict[str, Any],
    steps: int,
    here: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(log(train(here, output_path=tmp_path, **flags))) == steps
    (line,) = (one for one in capsys.readouterr().err.splitlines() if "runs to" in one)
    assert f" {steps}, {steps / 6:.4g} epoch" in line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {"lr_scheduler": "cosine", "lr_warmup_steps": 6},
            {"--lr_warmup_steps 6", "few"},
        ),
        ({"lr_scheduler": "cosine", "lr_warmup_steps": 5}, {"few"}),
        (
            {"lr_scheduler": "cosine_with_restarts", "lr_scheduler_num_cycles": 7},
            {"--lr_scheduler_num_cycles 7", "few"},
        ),
        ({"batch_size": 4, "max_steps": 20}, {"no step has"}),
        ({"batch_size": 3, "max_steps": 20}, set()),
        ({"dataset_repeat": 4}, set()),
    ],
)
def test_what_has_no_effect_in_so_short_a_run_is_said_also_in_a_dry_run(
    flags: dict[str, Any],
    said: set[str],
    here: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for more in ({"dry_run": True}, {}):
        run(config(here, output_path=tmp_path, **flags, **more))
        printed = "".join(capsys.readouterr())
        words = ("--lr_warmup_steps 6", "no step has", "few")
        words += ("--lr_scheduler_num_cycles 7",)
        assert {one for one in words if one in printed} == said


@pytest.mark.parametrize("trained", ["dit", "text_encoder.layer"])
def test_what_is_trained_in_full_alone_is_fp32(trained: str, here: Path) -> None:
    """A component that a unit runs is fp32 as a whole, since units have no autocast."""
    flags = {"trainable_models": trained, "mixed_precision": "bf16"}
    module = training_run(config(here, **flags)).module
    dtypes = {
        name: {one.dtype for one in network.parameters()}
        for name, network in module.pipeline.components.items()
        if isinstance(network, nn.Module)
    }
    assert dtypes.pop(trained.partition(".")[0]) == {torch.float32}
    assert set(map(frozenset, dtypes.values())) == {frozenset({torch.bfloat16})}


def test_a_unit_may_run_an_expert_of_which_a_part_is_trained_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for the denoiser by its role."""

    def encode_prompt(
        prompt: str, *, text_encoder: Any, tokenizer: Any, dit: Any
    ) -> family.Prompt:
        made = family.encode_prompt(
            prompt, text_encoder=text_encoder, tokenizer=tokenizer
        )
        dit.proj_in(made["prompt_emb"][..., : dit.proj_in.in_features].float())
        return made

    let_tiny_have_experts(monkeypatch)
    spec = family.PIPELINES["base"]
    units = (encode_prompt, *spec.units[1:])
    monkeypatch.setitem(family.PIPELINES, "base", replace(spec, units=units))
    project(tmp_path)
    own, *others = weights_of(tmp_path / "model").values()
    second = copied_denoiser(tmp_path / "model", tmp_path / "model/transformer_2")
    flags = {"trainable_models": "dit2.blocks.0", "mixed_precision": "bf16"}
    paths = json.dumps([own, second, *others])
    train(tmp_path, max_steps=1, model_paths=paths, **flags)


TASKS = """
from dstrain import Task
from dstrain.plugin import hookimpl
api = 2
@hookimpl
def dstrain_tasks():
    return [Task.of(name, lambda predict: predict) for name in ("sft", "shared", "{own}")]
"""


def test_two_tasks_of_one_name_are_left_out(fake_plugin: Callable[..., Path]) -> None:
    for name in ("one", "two"):
        modules = {f"tasks_{name}": TASKS.format(own=name)}
        entries = {name: f"tasks_{name}"}
        fake_plugin(f"extra-{name}", entries, modules, group="dstrain")
    for name in ("one", "two", "sft"):
        run(TrainConfig(model="tiny", dry_run=True, task=name))
    with pytest.raises(UsageError, match=r"'shared'.* one, two") as caught:
        run(TrainConfig(model="tiny", dry_run=True, task="shared"))
    assert caught.value.where == "--task"
    one, two, both = caught.value.help_lines
    assert "extra-one" in one and "'sft'" in one
    assert "extra-two" in two and "'sft'" in two
    assert "extra-one" in both and "extra-two" in both and "'shared'" in both
    sft = Task.of("sft", lambda predict: predict)
    with pytest.raises(UsageError, match=r"tasks: .*'sft'"):
        run(TrainConfig(model="tiny", dry_run=True, task="sft"), tasks=[sft])
