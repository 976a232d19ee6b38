"""Training: steps, learning rates and losses mean what they say, and a run that was
stopped resumes bit for bit.
"""

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
from dstrain.cache import readers
from dstrain.registry import Extensions
from dstrain.runs.build import total_steps
from dstrain.runs.checkpoints.state import states
from dstrain.runs.loop import steps, update
from dstrain.training import split_across_ranks
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from tests.support.runs import (
    PowerCut,
    changed,
    config,
    files,
    log,
    outcome,
    project,
    same,
    stop_at,
    train,
    training_run,
)

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project without dropout."""
    return project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose denoiser has dropout."""
    return project(tmp_path_factory.mktemp("dropping"), dropout=0.2)


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
    train(
        here,
        output_path=tmp_path,
        gradient_accumulation_steps=accumulation,
        dataset_repeat=2,
        num_epochs=2,
        **flags,
    )
    printed = log(tmp_path)
    assert len(printed) == {1: 24, 3: 8}[accumulation]
    assert [row["step"] for row in printed] == [*range(1, len(printed) + 1)]
    assert [row["learning_rate"] for row in printed] == pytest.approx(
        [1e-2 * factor(k, len(printed)) for k in range(len(printed))],
        rel=1e-5,
        abs=1e-9,
    )


@pytest.mark.parametrize(
    "trained", [{"trainable_models": "dit"}, {"trainable_models": "dit.blocks.0"}, {}]
)
def test_small_steps_move_weights_in_bf16_runs_too(
    trained: dict[str, Any], here: Path, tmp_path: Path
) -> None:
    ready = training_run(
        config(
            here,
            mixed_precision="bf16",
            learning_rate=1e-5,
            dataset_repeat=9,
            max_steps=20,
            **trained,
        )
    )
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
    "trained", [{"trainable_models": "dit"}, {"trainable_models": "dit,text_encoder"}]
)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_accumulation_gives_the_weights_of_a_batch_as_large(
    batch_size: int, trained: dict[str, Any], here: Path, tmp_path: Path
) -> None:
    """No dropout here: it is drawn per micro-batch."""
    common = {"dataset_repeat": 4, "learning_rate": 1e-3, **trained}
    still = changed(lambda module: module.eval())
    train(here, still, output_path=tmp_path / "batch", batch_size=4, **common)
    many = {"batch_size": batch_size, "gradient_accumulation_steps": 4 // batch_size}
    train(here, still, output_path=tmp_path / "accumulated", **many, **common)
    batch, accumulated = files(tmp_path / "batch"), files(tmp_path / "accumulated")
    for file, weights in batch.items():
        for name, weight in weights.items():
            assert (weight - accumulated[file][name]).abs().max() <= 1e-6, name
    for one, other in zip(
        log(tmp_path / "batch"), log(tmp_path / "accumulated"), strict=True
    ):
        assert one == pytest.approx(other, rel=1e-4)


def test_the_logged_loss_is_the_mean_over_the_whole_step(here: Path) -> None:
    ready = training_run(
        config(here, trainable_models="dit", gradient_accumulation_steps=3)
    )
    keys = next(iter(ready.order.global_batches(0)))
    assert len(keys) == 3
    alone = [
        ready.module.losses([ready.source.sample(key.row)], [key]).item()
        for key in keys
    ]
    numbers = next(steps(ready))
    assert len(set(alone)) == 3
    assert numbers["loss"] == pytest.approx(sum(alone) / 3, rel=1e-6)


def test_gradients_are_clipped_and_their_norm_is_logged_as_it_was(here: Path) -> None:
    ready = training_run(config(here, trainable_models="dit", max_grad_norm=1e-3))
    seen: list[Tensor] = []

    def look(*_: Any) -> None:
        seen.extend(
            p.grad.norm() for p in ready.module.trained_parameters if p.grad is not None
        )

    ready.optimizer.register_step_pre_hook(look)
    numbers = next(steps(ready))
    assert numbers["grad_norm"] > 1e-2
    assert torch.stack(seen).norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_a_limit_of_0_clips_no_gradient(here: Path) -> None:
    flags = {"trainable_models": "dit", "num_epochs": 1}
    unclipped = training_run(config(here, max_grad_norm=0, **flags))
    seen: list[Tensor] = []

    def look(*_: Any) -> None:
        seen.extend(
            p.grad.norm()
            for p in unclipped.module.trained_parameters
            if p.grad is not None
        )

    unclipped.optimizer.register_step_pre_hook(look)
    numbers = next(steps(unclipped))
    assert torch.stack(seen).norm().item() == pytest.approx(numbers["grad_norm"])


def test_two_runs_with_one_seed_are_equal_bit_for_bit_and_another_seed_differs(
    dropping: Path, tmp_path: Path
) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        train(
            dropping, output_path=tmp_path / name, seed=seed, batch_size=2, num_epochs=2
        )
    assert same(outcome(tmp_path / "a"), outcome(tmp_path / "b"))
    assert not same(files(tmp_path / "a"), files(tmp_path / "c"))


def test_each_epoch_and_each_repeat_draws_other_noise(
    here: Path, tmp_path: Path
) -> None:
    train(
        here, output_path=tmp_path, learning_rate=1e-30, dataset_repeat=3, num_epochs=2
    )
    losses = [row["loss"] for row in log(tmp_path)]
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
"""Calls of forward at which the run and the first resumed one are cut off, and the
flags.
"""


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_stopped_twice_ends_as_one_that_was_not(
    name: str, dropping: Path, tmp_path: Path
) -> None:
    first, second, flags = RUNS[name]
    train(dropping, output_path=tmp_path / "whole", **flags)
    with pytest.raises(PowerCut):
        train(dropping, stop_at(first), output_path=tmp_path / "cut", **flags)
    assert len(states(tmp_path / "cut")) > 0
    with pytest.raises(PowerCut):
        train(
            dropping,
            stop_at(second),
            output_path=tmp_path / "cut",
            resume="auto",
            **flags,
        )
    train(dropping, output_path=tmp_path / "cut", resume="auto", **flags)
    whole, cut = outcome(tmp_path / "whole"), outcome(tmp_path / "cut")
    for part in whole:
        assert same(whole[part], cut[part]), part
    assert [row["step"] for row in cut["log"]] == [*range(1, len(cut["log"]) + 1)]


def test_a_run_in_two_stages_resumes_too(dropping: Path, tmp_path: Path) -> None:
    flags = {"feature_cache": tmp_path / "cache", "num_epochs": 2, "save_steps": 4}
    train(dropping, output_path=tmp_path / "whole", **flags)
    run(config(dropping, task="sft:data_process", **flags))
    with pytest.raises(PowerCut):
        train(
            dropping,
            stop_at(7),
            task="sft:train",
            output_path=tmp_path / "cut",
            **flags,
        )
    train(
        dropping, task="sft:train", output_path=tmp_path / "cut", resume="auto", **flags
    )
    whole, cut = outcome(tmp_path / "whole"), outcome(tmp_path / "cut")
    assert same(whole, cut)


@pytest.mark.slow
def test_both_stages_with_processes_that_are_spawned_are_a_run_without(
    dropping: Path, tmp_path: Path
) -> None:
    flags = {"feature_cache": tmp_path / "cache", "max_steps": 4}
    train(dropping, output_path=tmp_path / "alone", **flags)
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        run(config(dropping, task="sft:data_process", dataset_num_workers=2, **flags))
        train(
            dropping,
            task="sft:train",
            output_path=tmp_path / "split",
            dataset_num_workers=2,
            **flags,
        )
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert same(outcome(tmp_path / "split"), outcome(tmp_path / "alone"))


def test_a_longer_run_can_resume_from_a_finished_one(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path / "whole", num_epochs=2)
    train(here, output_path=tmp_path / "cut", num_epochs=1)
    train(here, output_path=tmp_path / "cut", num_epochs=2, resume="auto")
    assert same(outcome(tmp_path / "whole"), outcome(tmp_path / "cut"))


def test_a_loss_that_is_not_a_number_ends_the_run_and_changes_no_weight(
    here: Path, tmp_path: Path
) -> None:
    class Diverging(TrainingModule):
        calls = 0

        def forward(self, batch: Batch) -> Tensor:
            self.calls += 1
            return super().forward(batch) * (float("nan") if self.calls > 4 else 1.0)

    ready = training_run(config(here, trainable_models="dit", max_steps=6), Diverging)
    printed = []
    with pytest.raises(Diverged, match="step 5: loss nan") as caught:
        for numbers in steps(ready):
            printed.append(numbers)
            before = [
                parameter.clone() for parameter in ready.module.trained_parameters
            ]
    assert caught.value.exit_code == 5
    assert len(printed) == ready.step == 4
    assert same(
        before, [parameter.detach() for parameter in ready.module.trained_parameters]
    )
    with pytest.raises(Diverged) as caught:
        train(here, Diverging, output_path=tmp_path, max_steps=6, save_steps=2)
    assert sorted(files(tmp_path)) == ["step-2.safetensors", "step-4.safetensors"]
    assert (
        caught.value.help_lines[0] == f"last good checkpoint: {tmp_path}/states/step-4"
    )
    assert re.search(
        r"check the samples of this step: metadata\.json:[1-6]$",
        caught.value.help_lines[1],
    )
    weights = tmp_path / "step-4.safetensors"
    again = caught.value.help_lines[2]
    assert again.startswith("or start again with a lower --learning_rate")
    assert f"--resume_from_checkpoint {weights}" in again
    assert f"--output_path {tmp_path}-2" in again
    assert "--learning_rate 0.001 " in again
    train(
        here,
        output_path=tmp_path / "again",
        max_steps=1,
        resume_from_checkpoint=weights,
    )
    with pytest.raises(Diverged) as caught:
        train(here, Diverging, output_path=tmp_path / "unsaved", max_steps=6)
    assert "--resume_from_checkpoint" not in caught.value.help_lines[2]
    assert caught.value.help_lines[2].endswith("--overwrite")
    assert [row["step"] for row in log(tmp_path)] == [1, 2, 3, 4]


def test_an_infinite_gradient_ends_the_run_too(here: Path) -> None:
    ready = training_run(config(here, trainable_models="dit"))
    ready.module.trained_parameters[0].register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(Diverged, match="gradient norm"):
        next(steps(ready))


def test_parameters_that_no_loss_reaches_are_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = training_run(config(here, trainable_models="dit"))
    ready.module.pipeline.components["dit"].proj_in.bias.requires_grad_(True)
    dit = ready.module.pipeline.components["dit"]
    dit.forgotten = torch.nn.Parameter(torch.zeros(1))
    ready.module.trained.add("dit", dit, "forgotten")
    next(steps(ready))
    assert "no gradient reaches 1 parameter: dit.forgotten" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "want"),
    [({}, 6), ({"num_epochs": 3}, 18), ({"max_steps": 4}, 4), ({"max_steps": 40}, 40),
     ({"num_epochs": 2, "max_steps": 40}, 12), ({"num_epochs": 2, "max_steps": 5}, 5)],
)  # fmt: skip
def test_the_smaller_of_epochs_and_steps_wins(
    flags: dict[str, Any], want: int, here: Path
) -> None:
    assert total_steps(config(here, **flags), 6) == want


def spied(ready: Any) -> list[float]:
    """Collect the timesteps of every call of model_fn."""
    seen: list[float] = []
    predict = ready.module.pipeline.predict

    def look(
        values: Any, noisy_latents: Tensor, timestep: Tensor, branch: str = "positive"
    ) -> Tensor:
        seen.extend(timestep.tolist())
        return predict(values, noisy_latents, timestep, branch)

    ready.module.pipeline.predict = look
    return seen


def test_knobs_of_the_second_stage_act_there(here: Path, tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "feature_cache": tmp_path,
        "trainable_models": "dit",
        "max_steps": 6,
    }
    run(config(here, task="sft:data_process", **flags))
    plain = [
        numbers["loss"]
        for numbers in steps(training_run(config(here, task="sft:train", **flags)))
    ]
    low = training_run(
        config(here, task="sft:train", **flags, min_timestep_boundary=0.9)
    )
    timesteps = spied(low)
    assert len(list(steps(low))) == 6
    highest = 1000 * low.module.timestep_sampler.schedule.table[900].item()
    assert max(timesteps) <= highest < 300
    unweighted = [
        n["loss"]
        for n in steps(
            training_run(config(here, task="sft:train", **flags, loss_weighting="none"))
        )
    ]
    assert unweighted[0] != plain[0]
    checked = training_run(
        config(here, task="sft:train", **flags, use_gradient_checkpointing=True)
    )
    calls = 0
    network = checked.module.networks["dit"]
    function: Any = network.checkpoint

    def count(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return function(*arguments)

    network.checkpoint = count
    assert [numbers["loss"] for numbers in steps(checked)] == plain
    assert calls == 6 * 2


def test_every_process_gets_as_many_micro_batches_and_fillers_weigh_nothing(
    here: Path,
) -> None:
    """Three processes in turn, on one weight: their losses add up to that of one
    process.
    """
    ready = training_run(
        config(here, trainable_models="dit", gradient_accumulation_steps=3)
    )
    keys = next(iter(ready.order.global_batches(0)))[:2]
    parts = [list(split_across_ranks(keys, 1, rank, 3)) for rank in range(3)]
    assert [len(part) for part in parts] == [1, 1, 1]
    losses = [
        ready.module(
            Batch(micro, [ready.source.sample(key.row) for key in micro.keys])
        ).item()
        for part in parts
        for micro in part
    ]
    assert losses[2] == 0.0
    alone = [
        ready.module.losses([ready.source.sample(key.row)], [key]).item()
        for key in keys
    ]
    assert sum(losses) == pytest.approx(sum(alone) / 2, rel=1e-6)


def test_lora_training_continues_from_a_file_strictly(
    here: Path, tmp_path: Path
) -> None:
    first = train(here, output_path=tmp_path / "first", num_epochs=1)
    path = first / "epoch-0.safetensors"
    ready = training_run(config(here, lora_checkpoint=path))
    state = {
        name.partition(".")[2]: value
        for name, value in ready.module.trained.parameters.items()
    }
    saved = files(first)["epoch-0.safetensors"]
    assert {f"transformer.{name.replace('.default', '')}" for name in state} == set(
        saved
    )
    for name, value in state.items():
        assert torch.equal(value, saved[f"transformer.{name.replace('.default', '')}"])
        assert value.requires_grad
    assert any(
        value.abs().sum() > 0 for name, value in state.items() if "lora_B" in name
    )
    with pytest.raises(StateError, match="lora_rank 2"):
        training_run(config(here, lora_checkpoint=path, lora_rank=4))
    with pytest.raises(StateError, match="does not fit"):
        training_run(config(here, lora_checkpoint=path, lora_target_modules="to_q"))
    with pytest.raises(StateError):
        training_run(config(here, lora_checkpoint=path, lora_base_model="text_encoder"))
    with pytest.raises(StateError, match=r"nowhere\.safetensors"):
        training_run(config(here, lora_checkpoint=tmp_path / "nowhere.safetensors"))
    for text, match in (
        (f"{path}:0.5", "--lora_checkpoint: has no scale"),
        (f"text_encoder={path}", r"is for text_encoder, but LoRA on dit is trained"),
        (f"{path}@alpha=2", "--alpha: has no effect: .* states its own alpha"),
    ):
        with pytest.raises(UsageError, match=match):
            training_run(config(here, lora_checkpoint=Path(text)))
    bare = tmp_path / "bare.safetensors"
    save_file(saved, bare)
    with pytest.raises(StateError, match="rank and alpha are unknown"):
        training_run(config(here, lora_checkpoint=bare))
    training_run(config(here, lora_checkpoint=Path(f"{bare}@alpha=rank")))
    given = training_run(config(here, lora_checkpoint=Path(f"dit={path}@skip_missing")))
    assert all(
        torch.equal(value, state[name.removeprefix("dit.")])
        for name, value in given.module.trained.parameters.items()
    )


def test_an_update_leaves_no_gradient_behind(here: Path) -> None:
    ready = training_run(config(here, trainable_models="dit"))
    keys = next(iter(ready.order.global_batches(0)))
    (micro,) = split_across_ranks(keys, 1, 0, 1)
    update(ready, [Batch(micro, [ready.source.sample(key.row) for key in micro.keys])])
    assert all(parameter.grad is None for parameter in ready.module.trained_parameters)


def test_the_average_is_of_what_plugins_left(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halve(_: Extensions, __: int, model: Any, ___: Any) -> None:
        for parameter in model.trained_parameters:
            parameter.mul_(0.5)

    monkeypatch.setattr(Extensions, "modify_step", halve)
    ready = training_run(config(here, max_steps=1, ema_decay=0.05))
    trained = ready.module.trained.parameters
    start = {name: one.detach().clone() for name, one in trained.items()}
    assert len(list(steps(ready))) == 1
    for name, after in trained.items():
        mean = 0.05 * start[name] + 0.95 * after.detach()
        torch.testing.assert_close(ready.ema.tensors[name], mean)


def test_training_says_that_it_reads_the_cache_until_it_ends(
    here: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    seen = []

    class Watching(TrainingModule):
        def forward(self, *given: Any, **named: Any) -> Any:
            seen.append([mark.process_id for mark in readers(cache)])
            return super().forward(*given, **named)

    flags = {"feature_cache": cache, "max_steps": 1, "output_path": tmp_path / "out"}
    train(here, task="sft:data_process", **flags)
    train(here, Watching, task="sft:train", **flags)
    assert seen == [[os.getpid()]]
    assert readers(cache) == []


def test_progress_shows_the_mean_of_the_last_losses_and_of_how_many(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def note(bar: object, text: str, refresh: bool = True) -> None:
        shown.append(text)

    monkeypatch.setattr(tqdm, "set_postfix_str", note)
    train(here, output_path=tmp_path, dataset_repeat=4, max_steps=22)
    losses = [row["loss"] for row in log(tmp_path)]
    assert shown[0] == f"loss {losses[0]:.4f} (1 step) lr 0.01"
    for step in (2, 20, 21, 22):
        last = losses[max(0, step - 20) : step]
        mean = sum(last) / len(last)
        assert shown[step - 1] == f"loss {mean:.4f} ({len(last)} steps) lr 0.01"
