"""Whole runs with other optimizers: what they save, log and resume."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import StateError, UsageError
from dstrain.runs.checkpoints.directory import states
from dstrain.runs.checkpoints.state import load_state
from dstrain.runs.resolve import resolve
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


@pytest.mark.parametrize("flags", CASES, ids=lambda flags: "-".join(flags))
def test_a_run_that_was_cut_off_ends_as_one_that_was_not(
    here: Path, flags: dict[str, Any]
) -> None:
    common: dict[str, Any] = {"max_steps": 6, "save_steps": 3, **flags}
    whole = train(here, output_path=here / "whole", **common)
    with pytest.raises(PowerCut):
        train(here, stop_at(4), output_path=here / "cut", **common)
    train(here, output_path=here / "cut", resume="auto", **common)
    assert same(outcome(whole), outcome(here / "cut"))
    # A save, with its averages, changes nothing that is trained.
    once = train(here, output_path=here / "once", **{**common, "save_steps": 6})
    assert log(once) == log(whole)
    last = {name: one for name, one in files(whole).items() if "step-6" in name}
    assert last
    assert same(files(once), last)


def test_averaged_weights_are_saved_and_those_in_training_resumed(here: Path) -> None:
    flags = {"trainable_models": "dit", "optimizer": "schedulefree"}
    out = train(here, max_steps=3, save_steps=3, **flags)
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
    """Files of LoRA are in fp32, whatever trained them."""
    out = train(here, output_path=here / "full", max_steps=1, **FULL, **BF16)
    lora = train(here, output_path=here / "lora", max_steps=1, lora_alpha=3.0, **BF16)
    saved, layers = (load_file(one / "step-1.safetensors") for one in (out, lora))
    state = load_state(states(out)[0])
    dtypes = [
        {one.dtype for one in tensors.values() if one.is_floating_point()}
        for tensors in (saved, state.trainable, layers)
    ]
    assert dtypes == [{torch.bfloat16}, {torch.bfloat16}, {torch.float32}]


def validation(folder: Path, row: int) -> dict[str, str]:
    with (folder / "logs/validation.csv").open() as file:
        return list(csv.DictReader(file))[row]


def test_validation_and_previews_use_the_averages_alone(here: Path) -> None:
    """What is saved is the average, so a run that starts from it shows the same."""
    flags: dict[str, Any] = {"optimizer": "schedulefree", "trainable_models": "dit"}
    flags |= {"max_steps": 4, "save_steps": 2, "validation_split": 0.3}
    shown = {"validation_steps": 1, "preview_prompt": ("dog",), "preview_steps": 1}
    shown["preview_at_start"] = True
    plain = train(here, output_path=here / "plain", **flags)
    out = train(here, output_path=here / "out", **flags, **shown)
    assert log(out) == log(plain)
    assert same(files(out), files(plain))
    one, other = (load_state(states(folder)[0]) for folder in (out, plain))
    assert same(vars(one), vars(other))
    flags |= {"resume_from_checkpoint": out / "step-4.safetensors", "max_steps": 1}
    again = train(here, output_path=here / "again", **flags, **shown)
    last, first = validation(out, -1), validation(again, 0)
    assert (last.pop("step"), first.pop("step")) == ("4", "0")
    for name, value in last.items():
        assert float(first[name]) == pytest.approx(float(value), rel=1e-5)
    images = (out / "previews/step-000004-0.png", again / "previews/step-000000-0.png")
    assert images[0].read_bytes() == images[1].read_bytes()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"learning_rate": "1,text_encoder=1"}, "--learning_rate: 'text_encoder'"),
        (
            {"trainable_dtype": "bf16", "mixed_precision": "no"},
            "--trainable_dtype: .*--mixed_precision bf16",
        ),
        ({"optimizer": "prodigy", **BF16}, "--trainable_dtype: .*prodigy"),
        (
            {"optimizer": "pytorch_optimizer.ScheduleFreeAdamW", "ema_decay": 0.9},
            "--ema_decay: ",
        ),
        ({"optimizer": "torchao.optim.AdamW4bit"}, "--optimizer: torchao"),
        ({"optimizer": f"{__name__}.Keeping"}, "--optimizer: .*function"),
        ({"optimizer": "adam8bit"}, "--optimizer: .*'adamw8bit'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    here: Path, flags: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        resolve(config(here, **flags))


class Keeping(torch.optim.SGD):
    """Keeps what no file can hold."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch has it in two forms
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["function"] = print_it


def print_it() -> None:
    """Stand for a function."""


def test_a_run_resumes_with_its_optimizer_alone(here: Path) -> None:
    out = train(here, optimizer="adamw8bit", max_steps=1, save_steps=1)
    again: dict[str, Any] = {"max_steps": 2, "save_steps": 1, "resume": "auto"}
    for other in (
        {"optimizer": "lion8bit"},
        {"optimizer": "adamw"},
        {"optimizer": "adamw8bit", "optimizer_args": ("betas=0.8,0.9",)},
        {"optimizer": "adamw8bit", "loraplus_lr_ratio": 2.0},
    ):
        with pytest.raises(StateError, match=f"dataset: .*{[*other][-1]}"):
            train(here, **again, **other)
    equal = {"optimizer": "paged_adamw8bit", "optimizer_args": ("betas=0.9,0.999",)}
    train(here, **again, **equal)
    assert len(log(out)) == 2


def test_two_processes_round_alike(here: Path) -> None:
    flags: dict[str, Any] = {"max_steps": 4, "output_path": here / "two"}

    def work(rank: int) -> None:
        seen: dict[str, torch.Tensor] = {}
        steps = iter("0123")

        def note(module: Any) -> None:
            number = next(steps)
            for name, one in module.trained.parameters.items():
                seen[f"{number}.{name}"] = one.detach().clone()

        train(here, changed(note), **flags, **FULL, **BF16)
        assert not list(steps)
        save_file(seen, here / f"rank-{rank}.safetensors")

    ended = in_processes(2, work, here)
    assert ended.codes == (0, 0), ended.said
    one, other = (load_file(here / f"rank-{rank}.safetensors") for rank in (0, 1))
    assert same(one, other)
    names = [name.removeprefix("0.") for name in one if name.startswith("0.")]
    assert not any(torch.equal(one[f"0.{name}"], one[f"3.{name}"]) for name in names)
