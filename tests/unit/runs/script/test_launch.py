"""A script trains with an Accelerator, a dataset and a logger of its own; any number of
processes compute the same steps.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from dstrain import (
    Diverged,
    Pipeline,
    Sample,
    SampleKey,
    StepNumbers,
    Task,
    TrainingModule,
    UsageError,
    WeightsLogger,
    launch_training_task,
)
from PIL import Image
from safetensors.torch import load_file

from tests.support.forks import forget_accelerator
from tests.support.processes import in_processes
from tests.support.runs import configs, project, same

pytestmark = pytest.mark.usefixtures("tiny")
Row = dict[str, Any]
ROWS: list[Row] = [
    {"prompt": caption, "input_image": Image.new("RGB", size, colour)}
    for caption, size, colour in (
        ("dog", (16, 16), "red"),
        ("cat", (24, 16), "blue"),
        ("a", (16, 16), "green"),
    )
]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


@pytest.fixture(autouse=True)
def accelerators() -> Iterator[None]:
    """Forget the Accelerators of a test: another run in this process has its own."""
    yield
    forget_accelerator()


class Noting:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_step_end(self, module: TrainingModule, numbers: StepNumbers) -> None:
        self.told.append((numbers.step, numbers.epoch, numbers.loss))

    def on_epoch_end(self, module: TrainingModule, epoch: int) -> None:
        self.told.append(f"epoch {epoch}")

    def on_training_end(self, module: TrainingModule, step: int) -> None:
        self.told.append(f"end at {step}")


def module_of(here: Path, **trained: Any) -> TrainingModule:
    module = TrainingModule(
        Pipeline.from_pretrained("tiny", configs(here / "model"), device="cpu")
    )
    module.switch_to_training_mode(**({"lora_rank": 2} | trained))
    return module


def launched(
    module: TrainingModule, rows: Any = ROWS, steps: int = 1, **options: Any
) -> tuple[float, ...]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    rate = {} if "optimizer" in options else {"learning_rate": 1e-2}
    given: Any = {"num_epochs": 2, "logger": Noting()} | rate | options
    return launch_training_task(accelerator, rows, module, **given)


def test_a_logger_is_told_of_steps_and_epochs_and_the_losses_are_returned(
    here: Path,
) -> None:
    module, logger = module_of(here), Noting()
    before = [one.detach().clone() for one in module.trained_parameters]
    losses = launched(module, steps=2, logger=logger)
    assert logger.told == [
        (1, 0, losses[0]), (2, 0, losses[1]), "epoch 0",
        (3, 1, losses[2]), (4, 1, losses[3]), "epoch 1", "end at 4",
    ]  # fmt: skip
    assert not same(before, [one.detach() for one in module.trained_parameters])
    assert losses == launched(module_of(here), steps=2)
    assert losses != launched(module_of(here), steps=2, seed=1)


def test_rows_may_be_named_by_columns_and_images_tell_their_sizes(here: Path) -> None:
    by_column = [
        {"prompt": row["prompt"], "image": row["input_image"], "height": 16}
        for row in ROWS
    ]
    assert launched(module_of(here), by_column) == launched(module_of(here))


def descended(module: TrainingModule, rate: float, **options: Any) -> Any:
    """Train by plain gradient descent: a gradient of another size is another step."""
    optimizer = torch.optim.SGD(module.trained_parameters, lr=rate)
    return launched(module, optimizer=optimizer, max_grad_norm=None, **options)


def test_a_step_is_the_mean_of_its_samples_however_many_it_has(here: Path) -> None:
    alone = descended(module_of(here), 0.0, num_epochs=1)
    pairs = descended(module_of(here), 0.0, num_epochs=1, steps=2)
    assert pairs == pytest.approx((sum(alone[:2]) / 2, alone[2]))
    whole = module_of(here)
    before = [one.detach().clone() for one in whole.trained_parameters]
    descended(whole, 1.0, num_epochs=1, steps=3)
    moved = [
        then - one.detach()
        for then, one in zip(before, whole.trained_parameters, strict=True)
    ]
    gradients = [torch.zeros_like(one) for one in before]
    for row in range(len(ROWS)):
        module = module_of(here)
        values = {**ROWS[row], "height": 16, "width": ROWS[row]["input_image"].width}
        key = SampleKey(0, 0, 0, row)
        module.losses([Sample(values, frozenset(values))], [key]).mean().backward()
        for total, one in zip(gradients, module.trained_parameters, strict=True):
            assert one.grad is not None
            total += one.grad / len(ROWS)
    assert all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-7)
        for a, b in zip(moved, gradients, strict=True)
    )


def test_two_processes_train_as_one_that_accumulates(
    here: Path, tmp_path: Path
) -> None:
    """Three rows, so that one process has none in the last step of an epoch."""
    rows = [{**row, "input_image": ROWS[0]["input_image"]} for row in ROWS]
    single = module_of(here)
    losses = descended(single, 0.5, rows=rows, steps=2)

    def work(rank: int) -> None:
        module = module_of(here)
        logger = WeightsLogger(tmp_path / "out")
        found = descended(module, 0.5, rows=rows, logger=logger)
        (tmp_path / f"{rank}.json").write_text(json.dumps(found))

    ended = in_processes(2, work, tmp_path)
    assert ended.codes == (0, 0), ended.said
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == pytest.approx(losses, rel=1e-5)
    saved = load_file(tmp_path / "out/epoch-1.safetensors")
    WeightsLogger(tmp_path / "single").save(single, "last")
    wanted = load_file(tmp_path / "single/last.safetensors")
    assert saved.keys() == wanted.keys()
    assert all(
        torch.allclose(saved[name], wanted[name], rtol=1e-3, atol=1e-6)
        for name in wanted
    )


def test_what_cannot_be_trained_so_is_refused_in_words(here: Path) -> None:
    plain = TrainingModule(Pipeline.from_pretrained("tiny", configs(here / "model")))
    with pytest.raises(UsageError, match="call its switch_to_training_mode first"):
        launched(plain)
    module = module_of(here)
    with pytest.raises(UsageError, match="dataset: has no rows"):
        launched(module, [])
    with pytest.raises(UsageError, match=r"row 0: no input is named 'promt'.*'prompt'"):
        launched(module, [{"promt": "dog"}])
    odd = {"prompt": "dog", "input_image": Image.new("RGB", (17, 16))}
    for rows, message in (
        ([*ROWS, odd], "row 3: input_image: is 17 x 16"),
        ([{"prompt": "dog"}], r"row 0: .* needs input_latents"),
        ([*ROWS, {"prompt": "dog"}], r"row 3: .* needs input_latents"),
        ([("dog", odd)], "error: row 0: expected a mapping .*, got tuple"),
    ):
        with pytest.raises(UsageError, match=message):
            launched(module, rows)
    for options, message in (
        ({"num_epochs": 0}, "num_epochs: expected 1 or more, got 0"),
        ({"learning_rate": -1}, "learning_rate: expected 0 or more, got -1"),
        ({"logger": print}, "logger: .* has no method on_step_end"),
    ):
        with pytest.raises(UsageError, match=message):
            launched(module, **options)
    meta = module_of(here)
    meta.pipeline.device = torch.device("meta")
    with pytest.raises(UsageError, match="the pipeline is on meta"):
        launched(meta)

    class Rounding(Accelerator):
        mixed_precision = "bf16"

    with pytest.raises(UsageError, match="has mixed_precision='bf16'"):
        launch_training_task(Rounding(cpu=True), ROWS, module, Noting())


def test_a_loss_that_is_not_finite_ends_it_before_the_weights_change(
    here: Path,
) -> None:
    module = module_of(here)
    before = [one.detach().clone() for one in module.trained_parameters]

    def nothing(predict: Any, input_latents: Any) -> Any:
        found = predict(input_latents, torch.full((len(input_latents),), 500.0))
        return found.flatten(1).mean(1) * float("nan")

    module.task = Task.of("nothing", nothing)
    with pytest.raises(Diverged, match="step 1: loss nan"):
        launched(module)
    assert same(before, [one.detach() for one in module.trained_parameters])


def test_an_optimizer_and_a_schedule_of_ones_own_are_used(here: Path) -> None:
    module = module_of(here)
    optimizer = torch.optim.SGD(module.trained_parameters, lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    with pytest.raises(UsageError, match="lr_scheduler: has no effect"):
        launched(module, lr_scheduler=schedule)
    launched(module, optimizer=optimizer, lr_scheduler=schedule, num_epochs=1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 0.1**3)


@pytest.mark.parametrize("number", ["learning_rate", "weight_decay"])
def test_numbers_of_adamw_beside_an_optimizer_are_refused(
    number: str, here: Path
) -> None:
    module = module_of(here)
    optimizer = torch.optim.SGD(module.trained_parameters, lr=0.5)
    with pytest.raises(UsageError, match=f"{number}: has no effect: the optimizer"):
        launched(module, optimizer=optimizer, **{number: 0.0})
