"""The validation loss is the mean over rows that never train, the same however a run is
made, and training never sees it.
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import Batch, SampleKey, StateError, TrainingModule, UsageError, run
from dstrain.runs.loop import steps
from dstrain.runs.trackers import Trackers
from dstrain.runs.training_run import TrainingRun
from dstrain.runs.validation_loss import COLUMNS, Validation, held_out_losses
from torch import Tensor

from tests.support.processes import commands, in_processes, words
from tests.support.runs import (
    PowerCut,
    config,
    log,
    outcome,
    same,
    stop_at,
    train,
    training_run,
    warm_project,
)

pytestmark = pytest.mark.usefixtures("tiny")
SPLIT: dict[str, Any] = {"validation_split": 0.3}
HELD_OUT = {1, 2, 3}
"""The rows that this chooses of six with the default seed: each by itself."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose denoiser has dropout, which validation must switch off."""
    return warm_project(tmp_path_factory.mktemp("project"), dropout=0.3)


def table(folder: Path) -> list[dict[str, float]]:
    with (folder / "logs/validation.csv").open() as file:
        return [
            {name: float(text) for name, text in row.items()}
            for row in csv.DictReader(file)
        ]


def split(here: Path, place: Path, **changes: Any) -> Path:
    for stage in ("data_process", "train"):
        train(
            here,
            task=f"sft:{stage}",
            feature_cache=place / "cache",
            output_path=place / "out",
            **changes,
        )
    return place / "out"


def test_rows_that_are_held_out_never_train_and_only_they_are_validated(
    here: Path,
) -> None:
    seen: dict[bool, set[int]] = {True: set(), False: set()}

    class Spied(TrainingModule):
        def losses(self, samples: Any, keys: Any) -> Tensor:
            seen[torch.is_grad_enabled()] |= {key.row for key in keys}
            return super().losses(samples, keys)

    ready = training_run(config(here, num_epochs=2, **SPLIT), Spied)
    assert len(list(steps(ready))) == 2 * (6 - len(HELD_OUT))
    held_out_losses(ready)
    assert seen == {True: set(range(6)) - HELD_OUT, False: HELD_OUT}


def test_the_loss_is_the_mean_over_rows_and_four_parts_of_the_timesteps(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, max_steps=3, validation_steps=2, **SPLIT)
    made = table(tmp_path)
    assert [row["step"] for row in made] == [0, 2, 3]
    assert tuple(made[0]) == COLUMNS
    ready = training_run(config(here, **SPLIT))
    module = ready.module.eval()
    module.timestep_sampler = module.timestep_sampler.stratified()
    expected = []
    for part in range(4):
        for row in sorted(HELD_OUT):
            key = SampleKey(0, -1, part, row)
            expected.append(module.losses([ready.source.sample(row)], [key]).item())
    means = [sum(expected[3 * part :][:3]) / 3 for part in range(4)]
    assert [made[0][name] for name in COLUMNS[2:]] == pytest.approx(means, rel=1e-5)
    assert made[0]["validation_loss"] == pytest.approx(sum(means) / 4, rel=1e-5)
    assert made[1]["validation_loss"] != made[0]["validation_loss"]
    lines = (tmp_path / "logs/validation.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == made


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"trainable_models": "dit,text_encoder"},
        {"ema_decay": 0.9},
        {"batch_size": 2, "validation_steps": 1},
    ],
)
def test_training_is_the_same_with_and_without_it(
    flags: dict[str, Any], here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {"num_epochs": 2, "save_steps": 2, **SPLIT, **flags}
    train(here, output_path=tmp_path / "with", **common)
    monkeypatch.setattr(Validation, "compute_if_due", lambda *_: None)
    train(here, output_path=tmp_path / "without", **common)
    assert len(table(tmp_path / "with")) > 1
    assert same(outcome(tmp_path / "with"), outcome(tmp_path / "without"))


def test_split_and_unsplit_are_equal_bit_for_bit(here: Path, tmp_path: Path) -> None:
    flags = {"num_epochs": 2, "validation_steps": 3, **SPLIT}
    train(here, output_path=tmp_path / "unsplit", **flags)
    out = split(here, tmp_path, **flags)
    for name in ("validation.csv", "validation.jsonl"):
        assert (out / "logs" / name).read_bytes() == (
            tmp_path / "unsplit/logs" / name
        ).read_bytes()
    assert log(out) == log(tmp_path / "unsplit")
    ready = training_run(
        config(here, task="sft:train", feature_cache=tmp_path / "cache", **SPLIT)
    )
    assert same(
        held_out_losses(ready), held_out_losses(training_run(config(here, **SPLIT)))
    )


def test_a_resumed_run_has_the_table_of_one_that_was_not_stopped(
    here: Path, tmp_path: Path
) -> None:
    flags = {"max_steps": 6, "save_steps": 2, "validation_steps": 1, **SPLIT}
    train(here, output_path=tmp_path / "whole", **flags)
    with pytest.raises(PowerCut):
        train(here, stop_at(5), output_path=tmp_path / "cut", **flags)
    assert table(tmp_path / "cut")[-1]["step"] > 4
    train(here, output_path=tmp_path / "cut", resume="auto", **flags)
    assert same(outcome(tmp_path / "whole"), outcome(tmp_path / "cut"))
    assert table(tmp_path / "whole") == table(tmp_path / "cut")
    assert [row["step"] for row in table(tmp_path / "cut")] == [*range(7)]


def test_another_split_is_refused_by_name_and_other_steps_are_not(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, max_steps=2, **SPLIT)
    for fraction in (0.9, None):
        with pytest.raises(StateError) as caught:
            train(
                *(here,), output_path=tmp_path, max_steps=3, validation_split=fraction,
                resume="auto",
            )  # fmt: skip
        given = fraction or "not given"
        words = f"--validation_split: saved 0.3, this run {given}"
        assert words in str(caught.value)
    train(
        *(here,), output_path=tmp_path, max_steps=3, validation_steps=1,
        resume="auto", **SPLIT,
    )  # fmt: skip
    assert [row["step"] for row in table(tmp_path)] == [0, 2, 3]


def test_two_processes_compute_what_one_does(here: Path, tmp_path: Path) -> None:
    given = vars(config(here))
    flags = {
        name: given[name]
        for name in ("model", "dataset_base_path", "model_paths", "lora_rank")
    }
    # No step moves the weights, which would differ by rounding.
    flags |= {"learning_rate": 1e-30, "max_steps": 1, "mixed_precision": "no"}
    flags |= {"validation_split": 0.3}
    one = {**flags, "output_path": tmp_path / "one", "batch_size": 2}
    two = {**flags, "output_path": tmp_path / "two"}
    ended = in_processes(1, commands(words(one)), tmp_path)
    assert ended.codes == (0,), ended.said
    ended = in_processes(2, commands(words(two)), tmp_path)
    assert ended.codes == (0, 0), ended.said
    assert len(table(tmp_path / "one")) == 2
    assert table(tmp_path / "one") == table(tmp_path / "two")


@pytest.fixture
def ready(here: Path) -> TrainingRun:
    return training_run(config(here, **SPLIT))


def test_nothing_is_changed_even_by_a_failure(ready: TrainingRun) -> None:
    module = ready.module
    before = torch.get_rng_state(), module.timestep_sampler
    modes = [part.training for part in module.modules()]
    assert any(modes)
    held_out_losses(ready)

    def fail(*_: Any, **__: Any) -> Iterator[None]:
        raise ZeroDivisionError

    module.pipeline.predict = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(ZeroDivisionError):
        held_out_losses(ready)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert module.timestep_sampler is before[1]
    assert [part.training for part in module.modules()] == modes
    assert torch.is_grad_enabled()


def test_it_uses_the_average_of_the_weights(here: Path, tmp_path: Path) -> None:
    flags = {"max_steps": 4, "validation_steps": 4, **SPLIT}
    train(here, output_path=tmp_path / "plain", **flags)
    train(here, output_path=tmp_path / "ema", ema_decay=0.999, **flags)
    plain, averaged = table(tmp_path / "plain"), table(tmp_path / "ema")
    assert plain[0] == averaged[0]
    assert plain[1] != averaged[1]
    average = tmp_path / "ema/step-4.ema.safetensors"
    assert average.exists()
    start = training_run(config(here, resume_from_checkpoint=average, **SPLIT))
    losses = held_out_losses(start)
    assert losses is not None
    assert losses.mean().item() == pytest.approx(averaged[1]["validation_loss"])


def test_a_run_that_is_asked_to_stop_leaves_it_to_the_resumed_one(
    here: Path, ready: TrainingRun
) -> None:
    assert held_out_losses(ready, lambda: True) is None


def test_a_row_that_cannot_be_used_is_named(here: Path, ready: TrainingRun) -> None:
    def refuse(*_: Any) -> Tensor:
        raise UsageError("prompt", "is bad").at(["metadata.json:1"])

    ready.module.losses = refuse  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"metadata\.json:1"):
        held_out_losses(ready)


def test_a_loss_that_draws_no_timesteps_has_none(here: Path) -> None:
    with pytest.raises(UsageError, match="draws no timesteps") as caught:
        run(config(here, task="direct_distill", **SPLIT))
    assert caught.value.where == "--validation_split"


def test_it_is_sent_to_trackers_and_said_at_the_end(
    here: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Worse(TrainingModule):
        """Steps go the wrong way."""

        def forward(self, batch: Batch) -> Tensor:
            return -super().forward(batch)

    sent: dict[int, float] = {}

    def note(_: Trackers, numbers: Any, step: int) -> None:
        if "validation_loss_q4" in numbers:
            sent[step] = numbers["validation_loss"]

    monkeypatch.setattr(Trackers, "log", note)
    train(here, Worse, output_path=tmp_path, max_steps=2, validation_steps=1, **SPLIT)
    said = capsys.readouterr().err
    made = table(tmp_path)
    assert sent == {
        row["step"]: pytest.approx(row["validation_loss"], rel=1e-5) for row in made
    }
    assert "validation: 3 samples of 3 rows, 4 timesteps each" in said
    assert f"validation loss {sent[1]:.4f} at step 1" in said
    assert f"lowest {sent[0]:.4g} at step 0" in said
