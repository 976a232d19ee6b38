"""Whole runs with other optimizers: what they save, log and resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import DstrainError, StateError, UsageError
from dstrain.runs.checkpoints.state import load_state, states
from dstrain.runs.resolve import resolve
from dstrain.runs.validation_loss import held_out_losses
from safetensors.torch import load_file, save_file

from tests.support.processes import in_processes
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

BF16 = {"trainable_dtype": "bf16", "mixed_precision": "bf16"}
FULL = {"trainable_models": "dit", "learning_rate": 1e-3}
CASES: tuple[dict[str, Any], ...] = (
    {"optimizer": "adamw8bit", "optimizer_args": ("min_8bit_size=1",)},
    {"optimizer": "schedulefree", "learning_rate": None},
    {"optimizer": "adamw8bit", "optimizer_args": ("min_8bit_size=1",), **FULL, **BF16},
    {"loraplus_lr_ratio": 4.0, **BF16},
    # A group for each component.
    {
        "trainable_models": "dit,text_encoder",
        "learning_rate": "dit=1e-2,text_encoder=1e-3",
    },
)


@pytest.fixture
def here(tiny: None, tmp_path: Path) -> Path:
    return project(tmp_path)


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one if not same(one[name], other[name])]


@pytest.mark.parametrize("flags", CASES, ids=lambda flags: "-".join(flags))
def test_a_run_that_was_cut_off_ends_as_one_that_was_not(
    here: Path, flags: dict[str, Any]
) -> None:
    common: dict[str, Any] = {"max_steps": 6, **flags}
    whole = train(here, output_path=here / "whole", save_steps=3, **common)
    with pytest.raises(PowerCut):
        train(here, stop_at(4), output_path=here / "cut", save_steps=3, **common)
    train(here, output_path=here / "cut", save_steps=3, resume="auto", **common)
    assert not differing(outcome(whole), outcome(here / "cut"))
    # A save, with its averages, changes nothing that is trained.
    once = train(here, output_path=here / "once", save_steps=6, **common)
    assert log(once) == log(whole)
    last = {name: one for name, one in files(whole).items() if "step-6" in name}
    assert last
    assert same(files(once), last)


def test_averaged_weights_are_saved_and_those_in_training_resumed(here: Path) -> None:
    out = train(
        here,
        trainable_models="dit",
        optimizer="schedulefree",
        max_steps=3,
        save_steps=3,
    )
    state = load_state(states(out)[0])
    saved = load_file(out / "step-3.safetensors")
    name = next(name for name in saved if f"dit.{name}" in state.trainable)
    assert not torch.equal(saved[name], state.trainable[f"dit.{name}"])
    assert state.optimizer["param_groups"][0]["train_mode"]


def test_the_rate_of_prodigy_is_the_one_it_found(here: Path) -> None:
    out = train(here, optimizer="prodigy", learning_rate=None, max_steps=4)
    rates = [row["learning_rate"] for row in log(out)]
    assert rates[0] == pytest.approx(1e-6)  # d0
    assert rates == sorted(rates) and rates[-1] > rates[0]


def test_files_and_states_of_bf16_weights(here: Path) -> None:
    out = train(here, output_path=here / "full", max_steps=1, **FULL, **BF16)
    saved = load_file(out / "step-1.safetensors")
    floats = {one.dtype for one in saved.values() if one.is_floating_point()}
    assert floats == {torch.bfloat16}
    state = load_state(states(out)[0])
    assert {one.dtype for one in state.trainable.values()} == {torch.bfloat16}
    # Files of LoRA are in fp32, whatever trained them.
    lora = train(here, output_path=here / "lora", max_steps=1, lora_alpha=3.0, **BF16)
    files = load_file(lora / "step-1.safetensors")
    assert {one.dtype for one in files.values()} == {torch.float32}


def test_each_component_learns_at_its_rate(here: Path) -> None:
    flags = {"trainable_models": "dit,text_encoder", "max_steps": 1}
    rates = "dit=1e-2,text_encoder=1e-3"
    run = training_run(config(here, learning_rate=rates, **flags))
    assert [group["lr"] for group in run.optimizer.param_groups] == [1e-2, 1e-3]
    assert run.learning_rate == 1e-2
    out = train(here, learning_rate=rates, **flags)
    assert [row["learning_rate"] for row in log(out)] == [1e-2]


def test_validation_and_previews_use_the_averages_and_leave_training_as_it_is(
    here: Path,
) -> None:
    flags: dict[str, Any] = {
        "optimizer": "schedulefree",
        "learning_rate": 1e-2,
        "trainable_models": "dit",
        "max_steps": 4,
        "save_steps": 2,
        "validation_split": 0.3,
    }
    shown = {"validation_steps": 1, "preview_prompt": ("dog",), "preview_steps": 1}
    plain = train(here, output_path=here / "plain", **flags)
    out = train(here, output_path=here / "out", **flags, **shown)
    assert log(out) == log(plain)
    for step in (2, 4):
        name = f"step-{step}.safetensors"
        assert same(load_file(out / name), load_file(plain / name))
    one, other = (load_state(states(folder)[0]) for folder in (out, plain))
    assert same(vars(one), vars(other))
    # What is saved is the average, so a run that starts from it shows the same.
    saved = {"resume_from_checkpoint": out / "step-4.safetensors", "max_steps": 1}
    start = training_run(config(here, **{**flags, **saved}))
    losses = held_out_losses(start)
    assert losses is not None
    rows = (out / "logs/validation.csv").read_text().splitlines()
    columns = rows[0].split(",")
    last = dict(zip(columns, map(float, rows[-1].split(",")), strict=True))
    assert last["step"] == 4
    assert losses.mean().item() == pytest.approx(last["validation_loss"], rel=1e-5)
    in_training = {
        name.removeprefix("dit."): value for name, value in one.trainable.items()
    }
    assert not same(load_file(out / "step-4.safetensors"), in_training)
    again = train(
        here, output_path=here / "again", preview_steps=2, preview_prompt=("dog",),
        **{**flags, **saved},
    )  # fmt: skip
    made = [folder / "previews" for folder in (out, again)]
    first, second = made[0] / "step-000004-0.png", made[1] / "step-000000-0.png"
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("flags", "where", "message"),
    [
        ({"learning_rate": "1,text_encoder=1"}, "--learning_rate", "'text_encoder' is not trained"),
        ({"trainable_dtype": "bf16", "mixed_precision": "no"}, "--trainable_dtype", "--mixed_precision bf16"),
        ({"optimizer": "prodigy", **BF16}, "--trainable_dtype", "all parameters together"),
        ({"optimizer": "pytorch_optimizer.ScheduleFreeAdamW", "ema_decay": 0.9}, "--ema_decay", "averages"),
        ({"optimizer": "torchao.optim.AdamW4bit"}, "--optimizer", "cannot be saved"),
        ({"optimizer": f"{__name__}.Keeping"}, "--optimizer", "of type function cannot be stored"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    here: Path, flags: dict[str, Any], where: str, message: str
) -> None:
    with pytest.raises(UsageError) as found:
        resolve(config(here, **flags))
    assert found.value.where == where
    assert message in str(found.value)


class Keeping(torch.optim.SGD):
    """Keeps what no file can hold."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Keep a function."""
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["function"] = print_it


def print_it() -> None:
    """Stand for a function."""


def test_a_vector_is_refused_where_matrices_are_optimized(here: Path) -> None:
    with pytest.raises(UsageError, match="takes matrices only"):
        train(here, trainable_models="dit", optimizer="torch.optim.Muon")
    out = train(here, optimizer="torch.optim.Muon", max_steps=1)
    assert (out / "step-1.safetensors").exists()


def test_a_run_resumes_with_its_optimizer_alone(here: Path) -> None:
    out = train(here, optimizer="adamw8bit", max_steps=1, save_steps=1)

    def again(**flags: Any) -> None:
        train(here, output_path=out, max_steps=2, save_steps=1, resume="auto", **flags)

    for other in (
        {"optimizer": "lion8bit"},
        {"optimizer": "adamw"},
        {"optimizer": "adamw8bit", "optimizer_args": ("betas=0.8,0.9",)},
        {"optimizer": "adamw8bit", "loraplus_lr_ratio": 2.0},
    ):
        with pytest.raises(StateError, match="different settings") as found:
            again(**other)
        assert any(f"--{name}" in str(found.value) for name in other)
    again(optimizer="paged_adamw8bit", optimizer_args=("betas=0.9,0.999",))
    assert len(log(out)) == 2


def test_the_default_run_is_what_it_was(here: Path) -> None:
    given = train(here, output_path=here / "a", max_steps=2)
    spelled = train(
        here,
        output_path=here / "b",
        max_steps=2,
        optimizer="adamw",
        optimizer_args=("betas=0.9,0.999", "fused=True"),
    )
    assert not differing(outcome(given), outcome(spelled))


def test_two_processes_round_alike(here: Path) -> None:
    flags: dict[str, Any] = {
        **FULL,
        **BF16,
        "max_steps": 4,
        "output_path": here / "two",
    }

    def work(rank: int) -> None:
        steps = []

        def note(module: Any) -> None:
            own = module.trained.parameters
            steps.append({name: one.detach().clone() for name, one in own.items()})

        train(here, changed(note), **flags)
        assert len(steps) == 4
        save_file(
            {
                f"{i}.{name}": one
                for i, own in enumerate(steps)
                for name, one in own.items()
            },
            here / f"rank-{rank}.safetensors",
        )

    ended = in_processes(2, work, here)
    assert ended.codes == (0, 0), ended.said
    one, other = (load_file(here / f"rank-{rank}.safetensors") for rank in (0, 1))
    drifted = [name for name in one if not torch.equal(one[name], other[name])]
    assert not drifted
    first, last = (
        [value for name, value in one.items() if name.startswith(f"{step}.")]
        for step in (0, 3)
    )
    assert not same(first, last)


def test_an_error_has_the_way_out(here: Path) -> None:
    with pytest.raises(DstrainError) as found:
        resolve(config(here, optimizer="adam8bit"))
    assert found.value.exit_code == 2
    assert "did you mean 'adamw8bit'" in str(found.value)
