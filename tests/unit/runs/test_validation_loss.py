"""The validation loss is the mean over rows that never train."""

import csv
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import Batch, Interrupted, StateError, TrainingModule, UsageError
from torch import Tensor

from tests.support import family
from tests.support.runs import (
    PowerCut,
    config,
    log,
    outcome,
    same,
    stop_at,
    train,
    train_in_two_stages,
    training_run,
    validation,
)
from tests.support.training_batches import means_of_parts

pytestmark = pytest.mark.usefixtures("tiny")
SPLIT: dict[str, Any] = {"validation_split": 0.3}
HELD_OUT = {1, 2, 3}
"""The rows that this chooses of six with the default seed: each by itself."""
QUARTERS = [f"validation_loss_q{number}" for number in (1, 2, 3, 4)]


def steps_in(folder: Path) -> list[float]:
    return [row["step"] for row in validation(folder)]


def test_rows_that_are_held_out_never_train_and_only_they_are_validated(
    dropping: Path, tmp_path: Path
) -> None:
    seen: dict[bool, set[int]] = {True: set(), False: set()}

    class Spied(TrainingModule):
        def losses(self, samples: Any, keys: Any) -> Tensor:
            seen[torch.is_grad_enabled()] |= {key.row for key in keys}
            return super().losses(samples, keys)

    train(dropping, Spied, output_path=tmp_path, num_epochs=2, **SPLIT)
    assert len(log(tmp_path)) == 2 * (6 - len(HELD_OUT))
    assert seen == {True: set(range(6)) - HELD_OUT, False: HELD_OUT}


def test_the_loss_is_the_mean_over_rows_and_four_parts_of_the_timesteps(
    dropping: Path, tmp_path: Path
) -> None:
    train(dropping, output_path=tmp_path, max_steps=3, validation_steps=2, **SPLIT)
    made = validation(tmp_path)
    assert [row["step"] for row in made] == [0, 2, 3]
    ready = training_run(config(dropping, **SPLIT))
    means = means_of_parts(ready, HELD_OUT)
    assert [made[0][name] for name in QUARTERS] == pytest.approx(means, rel=1e-5)
    assert made[0]["validation_loss"] == pytest.approx(sum(means) / 4, rel=1e-5)
    assert made[1]["validation_loss"] != made[0]["validation_loss"]
    with (tmp_path / "logs/validation.csv").open() as file:
        table = [*csv.DictReader(file)]
    assert [{name: float(one) for name, one in row.items()} for row in table] == made


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"trainable_models": "dit,text_encoder"},
        {"ema_decay": 0.9},
        {"batch_size": 2},
    ],
)
def test_training_is_the_same_however_often_it_is_computed(
    flags: dict[str, Any], dropping: Path, tmp_path: Path
) -> None:
    common = {"num_epochs": 2, "save_steps": 2, **SPLIT, **flags}
    made = []
    for every in (1, 100):
        place = {"output_path": tmp_path / str(every), "validation_steps": every}
        made.append(outcome(train(dropping, **place, **common)))
    assert len(steps_in(tmp_path / "1")) > len(steps_in(tmp_path / "100")) == 2
    assert same(*made)


def test_both_stages_are_one_bit_for_bit(dropping: Path, tmp_path: Path) -> None:
    flags = {"num_epochs": 2, "validation_steps": 3, **SPLIT}
    whole = train(dropping, output_path=tmp_path / "unsplit", **flags)
    split = train_in_two_stages(dropping, tmp_path, **flags)
    assert validation(split) == validation(whole)
    assert log(split) == log(whole)


def test_a_resumed_run_has_the_table_of_one_that_was_not_stopped(
    dropping: Path, tmp_path: Path
) -> None:
    flags = {"max_steps": 6, "save_steps": 2, "validation_steps": 1, **SPLIT}
    whole = train(dropping, output_path=tmp_path / "whole", **flags)
    cut = tmp_path / "cut"
    with pytest.raises(PowerCut):
        train(dropping, stop_at(5), output_path=cut, **flags)
    assert steps_in(cut)[-1] > 4
    train(dropping, output_path=cut, resume="auto", **flags)
    assert same(outcome(whole), outcome(cut))
    assert validation(whole) == validation(cut)
    assert steps_in(cut) == [*range(7)]


def test_a_run_that_is_asked_to_stop_leaves_it_to_the_resumed_one(
    dropping: Path, tmp_path: Path, ask_to_stop: Callable[[], None]
) -> None:
    class Asked(TrainingModule):
        calls = 0

        def losses(self, samples: Any, keys: Any) -> Tensor:
            self.calls += not torch.is_grad_enabled()
            # The first sample after the first step.
            if self.calls == 4 * len(HELD_OUT) + 1:
                self.calls += 1
                ask_to_stop()
            return super().losses(samples, keys)

    flags = {"max_steps": 3, "validation_steps": 1, **SPLIT}
    whole = train(dropping, output_path=tmp_path / "whole", **flags)
    cut = tmp_path / "cut"
    with pytest.raises(Interrupted):
        train(dropping, Asked, output_path=cut, **flags)
    assert steps_in(cut) == [0]
    train(dropping, output_path=cut, resume="auto", **flags)
    assert validation(cut) == validation(whole)


def test_another_split_is_refused_by_name_and_other_steps_are_not(
    dropping: Path, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"output_path": tmp_path, "max_steps": 3, "resume": "auto"}
    train(dropping, **flags | {"max_steps": 2, "resume": None}, **SPLIT)
    for fraction in (0.9, None):
        with pytest.raises(StateError, match=r"\"validation_split\": 0\.3"):
            train(dropping, validation_split=fraction, **flags)
    train(dropping, validation_steps=1, **flags, **SPLIT)
    assert steps_in(tmp_path) == [0, 2, 3]


def test_it_uses_the_average_of_the_weights(dropping: Path, tmp_path: Path) -> None:
    flags = {"max_steps": 4, "validation_steps": 4, **SPLIT}
    plain = validation(train(dropping, output_path=tmp_path / "plain", **flags))
    out = train(dropping, output_path=tmp_path / "ema", ema_decay=0.999, **flags)
    first, averaged = validation(out)
    assert plain[0] == first
    assert plain[1] != averaged
    start = {"resume_from_checkpoint": out / "step-4.ema.safetensors"}
    again = train(dropping, output_path=tmp_path / "again", **start, **flags)
    for name in QUARTERS:
        assert validation(again)[0][name] == pytest.approx(averaged[name], rel=1e-5)


def test_a_row_that_cannot_be_used_is_named(
    dropping: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode_prompt(
        prompt: str, *, text_encoder: Any, tokenizer: Any
    ) -> family.Prompt:
        if "bridge" in prompt:
            raise UsageError("prompt", "is bad")
        return family.encode_prompt(
            prompt, text_encoder=text_encoder, tokenizer=tokenizer
        )

    spec = replace(family.BASE, units=(encode_prompt, family.encode_image))
    monkeypatch.setitem(family.PIPELINES, "base", spec)
    family.write_data(tmp_path / "val", ("a bridge",), ((16, 16),))
    second = {"validation_dataset_base_path": tmp_path / "val"}
    rows = "metadata.json:3", "validation metadata.json:1"
    for flags, row in zip((SPLIT, second), rows, strict=True):
        with pytest.raises(UsageError) as caught:
            train(dropping, output_path=tmp_path, **flags)
        assert caught.value.where.startswith(row)


def test_losses_are_said_with_the_lowest_at_the_end_and_one_that_is_none_is_null(
    dropping: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Worse(TrainingModule):
        """Steps go the wrong way, and validation fails after the last."""

        steps = 0

        def forward(self, batch: Batch) -> Tensor:
            self.steps += 1
            return -super().forward(batch)

        def losses(self, samples: Any, keys: Any) -> Tensor:
            found = super().losses(samples, keys)
            is_last = self.steps == 3 and not torch.is_grad_enabled()
            return found * float("nan") if is_last else found

    flags = {"max_steps": 3, "validation_steps": 1, **SPLIT}
    train(dropping, Worse, output_path=tmp_path, **flags)
    lines = [one for one in capsys.readouterr().err.splitlines() if "validation" in one]
    *losses, last = [row["validation_loss"] for row in validation(tmp_path)]
    assert last is None
    assert losses[0] < losses[1] < losses[2]
    assert re.findall(r"\d+", lines[0]) == ["3", "3", "4"]
    for step, loss in enumerate(losses):
        assert f" {loss:.4f} at step {step}" in lines[1 + step]
    assert f" {losses[2]:.4g} at step 2, " in lines[-1]
    assert lines[-1].endswith(f" {losses[0]:.4g} at step 0")
