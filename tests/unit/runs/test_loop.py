"""Steps and losses mean what they say; a stopped run resumes bit for bit."""

import math
import multiprocessing
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import Batch, Diverged, StateError, TrainingModule, UsageError, run
from dstrain.cache.in_use import readers
from dstrain.runs.loop import steps
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.runs import (
    PowerCut,
    changed,
    config,
    files,
    log,
    outcome,
    same,
    stop_at,
    train,
    train_in_two_stages,
    training_run,
)

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    ("flags", "factor"),
    [
        ({}, lambda k, n: 1.0),
        (
            {"lr_scheduler": "cosine"},
            lambda k, n: 0.5 * (1 + math.cos(math.pi * k / n)),
        ),
        (
            {"lr_scheduler": "linear", "lr_warmup_steps": 2},
            lambda k, n: k / 2 if k < 2 else (n - k) / (n - 2),
        ),
    ],
)
def test_the_schedule_counts_optimizer_steps_and_starts_where_it_should(
    flags: dict[str, Any],
    factor: Callable[[int, int], float],
    accumulation: int,
    here: Path,
    tmp_path: Path,
) -> None:
    given = {"gradient_accumulation_steps": accumulation, "dataset_repeat": 2, **flags}
    printed = log(train(here, output_path=tmp_path, num_epochs=2, **given))
    count = {1: 24, 3: 8}[accumulation]
    assert [row["step"] for row in printed] == [*range(1, count + 1)]
    rates = [1e-2 * factor(k, count) for k in range(count)]
    assert [row["learning_rate"] for row in printed] == pytest.approx(
        rates, rel=1e-5, abs=1e-9
    )


@pytest.mark.parametrize(
    "trained", [{"trainable_models": "dit"}, {"trainable_models": "dit.blocks.0"}, {}]
)
def test_small_steps_move_weights_in_bf16(trained: dict[str, Any], here: Path) -> None:
    given = {"learning_rate": 1e-5, "dataset_repeat": 9, "max_steps": 20, **trained}
    ready = training_run(config(here, mixed_precision="bf16", **given))
    parameters = ready.module.trained.parameters
    assert {parameter.dtype for parameter in parameters.values()} == {torch.float32}
    before = {}
    with torch.no_grad():
        for name, parameter in parameters.items():
            before[name] = parameter.normal_(0, 0.02).clone()
    assert len(list(steps(ready))) == 20
    moved = sum(int((parameters[name] != before[name]).sum()) for name in before)
    assert moved > 0.99 * sum(value.numel() for value in before.values())


@pytest.mark.parametrize(
    ("batch_size", "trained"), [(1, "dit"), (2, "dit"), (1, "dit,text_encoder")]
)
def test_accumulation_gives_the_weights_of_a_batch_as_large(
    batch_size: int, trained: str, here: Path, tmp_path: Path
) -> None:
    common = {"dataset_repeat": 4, "learning_rate": 1e-3, "trainable_models": trained}
    still = changed(lambda module: module.eval())
    batch = train(here, still, output_path=tmp_path / "batch", batch_size=4, **common)
    many = {"batch_size": batch_size, "gradient_accumulation_steps": 4 // batch_size}
    parts = train(here, still, output_path=tmp_path / "parts", **many, **common)
    accumulated = files(parts)
    for file, weights in files(batch).items():
        for name, weight in weights.items():
            assert (weight - accumulated[file][name]).abs().max() <= 1e-6, name
    for one, other in zip(log(batch), log(parts), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_the_logged_loss_is_the_mean_over_the_whole_step(here: Path) -> None:
    flags = {"trainable_models": "dit", "gradient_accumulation_steps": 3}
    ready = training_run(config(here, **flags))
    keys = next(iter(ready.order.global_batches(0)))
    alone = [
        ready.module.losses([ready.data.source.sample(key.row)], [key]).item()
        for key in keys
    ]
    assert len(set(alone)) == 3
    assert next(steps(ready))["loss"] == pytest.approx(sum(alone) / 3, rel=1e-6)


@pytest.mark.parametrize("limit", [1e-3, 0])
def test_gradients_are_clipped_to_a_limit_that_is_given_and_gone_after_the_step(
    limit: float, here: Path
) -> None:
    ready = training_run(config(here, trainable_models="dit", max_grad_norm=limit))
    seen: list[Tensor] = []

    def look(*_: Any) -> None:
        parameters = ready.module.trained_parameters
        seen.extend(one.grad.norm() for one in parameters if one.grad is not None)

    ready.optimizer.register_step_pre_hook(look)
    logged = next(steps(ready))["grad_norm"]
    assert logged > 1e-2
    assert torch.stack(seen).norm().item() == pytest.approx(limit or logged, rel=1e-3)
    assert all(one.grad is None for one in ready.module.trained_parameters)


def test_two_runs_with_one_seed_are_equal_bit_for_bit_and_another_seed_differs(
    dropping: Path, tmp_path: Path
) -> None:
    flags = {"batch_size": 2, "num_epochs": 2}
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        train(dropping, output_path=tmp_path / name, seed=seed, **flags)
    assert same(outcome(tmp_path / "a"), outcome(tmp_path / "b"))
    assert not same(files(tmp_path / "a"), files(tmp_path / "c"))


def test_each_epoch_and_repeat_draws_other_noise(here: Path, tmp_path: Path) -> None:
    flags = {"learning_rate": 1e-30, "dataset_repeat": 3, "num_epochs": 2}
    losses = [row["loss"] for row in log(train(here, output_path=tmp_path, **flags))]
    assert len(losses) == len(set(losses)) == 36


RUNS = {
    "LoRA": (7, 2, {"num_epochs": 3, "batch_size": 2}),
    "LoRA with accumulation and cosine": (
        8, 5,
        {"num_epochs": 3, "gradient_accumulation_steps": 2, "lr_scheduler": "cosine", "save_steps": 2},
    ),
    "full, warm-up, inside an epoch": (
        4, 3,
        {"max_steps": 10, "trainable_models": "dit", "lr_scheduler": "linear", "lr_warmup_steps": 3, "save_steps": 1},
    ),
    "dit and text encoder, repeats, workers": (
        8, 5,
        {"num_epochs": 1, "dataset_repeat": 3, "trainable_models": "dit,text_encoder", "save_steps": 3,
         "dataset_num_workers": 1},
    ),
    "LoRA and full": (
        8, 5,
        {"num_epochs": 2, "trainable_models": "text_encoder", "lora_base_model": "dit", "save_steps": 5},
    ),
}  # fmt: skip
"""Forward calls at which the run and the first resumed one are cut off; the flags."""


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_stopped_twice_ends_as_one_that_was_not(
    name: str, dropping: Path, tmp_path: Path
) -> None:
    first, second, flags = RUNS[name]
    train(dropping, output_path=tmp_path / "whole", **flags)
    cut = {"output_path": tmp_path / "cut", **flags}
    with pytest.raises(PowerCut):
        train(dropping, stop_at(first), **cut)
    assert any((tmp_path / "cut/states").iterdir())
    with pytest.raises(PowerCut):
        train(dropping, stop_at(second), resume="auto", **cut)
    train(dropping, resume="auto", **cut)
    left = outcome(tmp_path / "cut")
    for part, whole in outcome(tmp_path / "whole").items():
        assert same(whole, left[part]), part
    assert [row["step"] for row in left["log"]] == [*range(1, len(left["log"]) + 1)]


def test_both_stages_with_processes_that_are_spawned_are_a_run_without(
    dropping: Path, tmp_path: Path
) -> None:
    alone = train(dropping, output_path=tmp_path / "alone", max_steps=4)
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        flags = {"dataset_num_workers": 2, "max_steps": 4}
        split = train_in_two_stages(dropping, tmp_path, **flags)
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert same(outcome(split), outcome(alone))


class Diverging(TrainingModule):
    """A module whose fifth loss is not a number."""

    calls = 0

    def forward(self, batch: Batch) -> Tensor:
        self.calls += 1
        return super().forward(batch) * (float("nan") if self.calls > 4 else 1.0)


def test_a_loss_that_is_not_a_number_ends_the_run_and_changes_no_weight(
    here: Path,
) -> None:
    ready = training_run(config(here, trainable_models="dit", max_steps=6), Diverging)
    parameters = ready.module.trained_parameters
    with pytest.raises(Diverged) as caught:
        for _ in steps(ready):
            before = [parameter.detach().clone() for parameter in parameters]
    assert caught.value.exit_code == 5
    assert caught.value.where == "step 5"
    assert ready.step == 4
    assert same(before, [parameter.detach() for parameter in parameters])


def test_a_run_that_diverged_names_its_last_whole_state_and_its_samples(
    here: Path, tmp_path: Path
) -> None:
    with pytest.raises(Diverged) as caught:
        train(here, Diverging, output_path=tmp_path, max_steps=6, save_steps=2)
    assert sorted(files(tmp_path)) == ["step-2.safetensors", "step-4.safetensors"]
    assert [row["step"] for row in log(tmp_path)] == [1, 2, 3, 4]
    state, samples, _ = caught.value.help_lines
    assert state.endswith(f" {tmp_path}/states/step-4")
    (row,) = re.findall(r"metadata\.json:(\d+)", samples)
    assert 1 <= int(row) <= 6


def test_parameters_that_no_loss_reaches_are_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = training_run(config(here, trainable_models="dit"))
    dit = ready.module.pipeline.components["dit"]
    dit.forgotten = torch.nn.Parameter(torch.zeros(1))
    ready.module.trained.add("dit", dit, "forgotten")
    next(steps(ready))
    assert capsys.readouterr().err.endswith(" 1 parameter: dit.forgotten\n")


def test_flags_of_the_second_stage_act_there(here: Path, tmp_path: Path) -> None:
    cache: dict[str, Any] = {"feature_cache": tmp_path, "trainable_models": "dit"}
    run(config(here, task="sft:data_process", **cache))

    def losses(**flags: Any) -> list[float]:
        ready = training_run(config(here, task="sft:train", **cache, **flags))
        return [numbers["loss"] for numbers in steps(ready)]

    plain = losses()
    assert losses(loss_weighting="none")[0] != plain[0]
    assert losses(use_gradient_checkpointing=True) == plain
    low = training_run(
        config(here, task="sft:train", **cache, min_timestep_boundary=0.9)
    )
    seen: list[float] = []
    predict = low.module.pipeline.predict

    def look(values: Any, noisy: Tensor, timestep: Tensor, *branch: str) -> Tensor:
        seen.extend(timestep.tolist())
        return predict(values, noisy, timestep, *branch)

    low.module.pipeline.predict = look  # type: ignore[method-assign]  # looked into
    assert len(list(steps(low))) == len(seen) == 6
    highest = 1000 * low.module.timestep_sampler.schedule.table[900].item()
    assert max(seen) <= highest < 300


def test_lora_training_continues_from_its_file(here: Path, tmp_path: Path) -> None:
    first = train(here, output_path=tmp_path / "first", num_epochs=1)
    path = first / "epoch-0.safetensors"
    saved = files(first)["epoch-0.safetensors"]
    bare = tmp_path / "bare.safetensors"
    save_file(saved, bare)
    assert any(
        value.abs().sum() > 0 for name, value in saved.items() if "lora_B" in name
    )
    for text in (path, f"{bare}@alpha=rank", f"dit={path}@skip_missing"):
        ready = training_run(config(here, lora_checkpoint=Path(text)))
        state = {
            name.replace("dit.", "transformer.", 1).replace(".default", ""): value
            for name, value in ready.module.trained.parameters.items()
        }
        assert same(dict(sorted(state.items())), dict(sorted(saved.items())))
        assert all(value.requires_grad for value in state.values())
    absent = tmp_path / "nowhere.safetensors"
    for kind, text, flags, named in (
        (StateError, path, {"lora_rank": 4}, "lora_rank 2"),
        (StateError, path, {"lora_target_modules": "to_q"}, "to_out"),
        (StateError, path, {"lora_base_model": "text_encoder"}, "text_encoder"),
        (StateError, absent, {}, "nowhere.safetensors"),
        (StateError, bare, {}, "alpha"),
        (UsageError, f"{path}:0.5", {}, "--lora_checkpoint"),
        (UsageError, f"text_encoder={path}", {}, "text_encoder"),
        (UsageError, f"{path}@alpha=2", {}, "--alpha"),
    ):
        with pytest.raises(kind) as caught:
            training_run(config(here, lora_checkpoint=Path(text), **flags))
        assert named in str(caught.value)


def test_loras_of_several_components_continue_from_one_file_or_from_their_own(
    here: Path, tmp_path: Path
) -> None:
    flags = {"lora_base_model": "text_encoder,dit", "num_epochs": 1}
    first = train(here, output_path=tmp_path / "first", **flags)
    paths = [first / f"epoch-0.{name}.safetensors" for name in ("dit", "text_encoder")]
    joined, part = tmp_path / "joined.safetensors", tmp_path / "part.safetensors"
    save_file(load_file(paths[0]) | load_file(paths[1]), joined)
    save_file(load_file(paths[0]), part)
    both = ",".join(map(str, paths))
    states = []
    for start in (
        {"lora_checkpoint": Path(f"{joined}@alpha=rank")},
        {"resume_from_checkpoint": both},
    ):
        ready = training_run(config(here, **start, **flags))
        states.append(dict(ready.module.trained.parameters))
    assert same(*states)
    sums = {name: value.abs().sum() for name, value in states[0].items()}
    assert all(sums.values()) and len(sums) == len(load_file(joined))
    with pytest.raises(StateError) as caught:
        text = Path(f"{part}@alpha=rank")
        training_run(config(here, lora_checkpoint=text, **flags))
    assert "text_encoder" in str(caught.value)


HALVING = """
from dstrain.plugin import hookimpl
api = 2
@hookimpl
def dstrain_modify_step(step, model, optimizer):
    for parameter in model.trained_parameters:
        parameter.mul_(0.5)
"""


def test_averages_follow_plugins(here: Path, fake_plugin: Callable[..., Path]) -> None:
    flags = {"max_steps": 1, "ema_decay": 0.05}
    plain = training_run(config(here, **flags))
    fake_plugin("halving", {"halving": "halving"}, {"halving": HALVING}, "dstrain")
    ready = training_run(config(here, **flags))
    trained = ready.module.trained.parameters
    start = {name: one.detach().clone() for name, one in trained.items()}
    assert len(list(steps(ready))) == len(list(steps(plain))) == 1
    for name, after in trained.items():
        assert torch.equal(2 * after, plain.module.trained.parameters[name])
        mean = 0.05 * start[name] + 0.95 * after.detach()
        torch.testing.assert_close(ready.ema.tensors[name], mean)


def test_training_is_a_reader_until_it_ends(here: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    seen = []

    def watch(_: Any) -> None:
        seen.append([mark.process_id for mark in readers(cache)])

    flags = {"feature_cache": cache, "max_steps": 1, "output_path": tmp_path / "out"}
    train(here, task="sft:data_process", **flags)
    train(here, changed(watch), task="sft:train", **flags)
    assert seen == [[os.getpid()]]
    assert readers(cache) == []
