"""A script with a loop of its own computes the same steps in any number of processes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from dstrain import (
    Pipeline,
    Sample,
    SampleKey,
    StateError,
    StepNumbers,
    TrainingModule,
    UsageError,
    WeightsLogger,
    launch_training_task,
)
from PIL import Image
from torch import nn

from tests.support.forks import forget_accelerator
from tests.support.processes import in_processes
from tests.support.runs import configs, files, opened, same, train

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
        self.numbers = numbers

    def on_epoch_end(self, module: TrainingModule, epoch: int) -> None:
        self.told.append(f"epoch {epoch}")

    def on_training_end(self, module: TrainingModule, step: int) -> None:
        self.told.append(f"end at {step}")


class Steep(TrainingModule):
    """A module of large gradients, that notes epoch, row and size of each sample."""

    seen: list[tuple[int, ...]]

    def losses(self, samples: Any, keys: Any) -> torch.Tensor:
        size = [samples[0].values[name] for name in ("height", "width")]
        self.seen.append((keys[0].epoch, keys[0].row, *size))
        return 1000 * super().losses(samples, keys)


def module_of(
    here: Path, kind: type[TrainingModule] = TrainingModule, **trained: Any
) -> TrainingModule:
    module = kind(
        Pipeline.from_pretrained("tiny", configs(here / "model"), device="cpu")
    )
    module.switch_to_training_mode(**(trained or {"lora_rank": 2}))
    return module


def launched(
    module: TrainingModule, rows: Any = ROWS, steps: int = 1, **options: Any
) -> tuple[float, ...]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    rate = {} if "optimizer" in options else {"learning_rate": 1e-2}
    given: Any = {"num_epochs": 2, "logger": Noting()} | rate | options
    return launch_training_task(accelerator, rows, module, **given)


def test_a_logger_is_told_of_steps_epochs_and_losses(here: Path) -> None:
    module, logger = module_of(here), Noting()
    before = [one.detach().clone() for one in module.trained_parameters]
    losses = launched(module, steps=2, logger=logger)
    assert logger.told == [
        (1, 0, losses[0]), (2, 0, losses[1]), "epoch 0",
        (3, 1, losses[2]), (4, 1, losses[3]), "epoch 1", "end at 4",
    ]  # fmt: skip
    assert not same(before, [one.detach() for one in module.trained_parameters])
    assert logger.numbers.total_steps == 4
    assert losses == launched(module_of(here), steps=2)
    assert losses != launched(module_of(here), steps=2, seed=1)


def descended(module: TrainingModule, rate: float, **options: Any) -> Any:
    """Train by plain gradient descent: a gradient of another size is another step."""
    optimizer = torch.optim.SGD(module.trained_parameters, lr=rate)
    return launched(module, optimizer=optimizer, max_grad_norm=None, **options)


def test_a_step_is_the_mean_of_its_samples_however_many_it_has(here: Path) -> None:
    Steep.seen = []
    twice = descended(module_of(here, Steep), 0.0, num_epochs=6)
    assert len(set(twice)) == 6 * 3  # of each epoch, other noise
    rows = [row for _, row, *_ in Steep.seen]
    assert len({tuple(rows[start : start + 3]) for start in range(0, 18, 3)}) > 1
    other = descended(module_of(here, Steep), 0.0, num_epochs=6, seed=1)
    assert [row for _, row, *_ in Steep.seen[18:]] != rows
    assert not {*other} & {*twice}
    alone = twice[:3]
    pairs = descended(module_of(here, Steep), 0.0, num_epochs=1, steps=2)
    assert pairs == pytest.approx((sum(alone[:2]) / 2, alone[2]))
    whole = module_of(here, Steep)
    before = [one.detach().clone() for one in whole.trained_parameters]
    descended(whole, 1.0, num_epochs=1, steps=3)
    module = module_of(here, Steep)
    for row, given in enumerate(ROWS):
        values = {**given, "height": 16, "width": given["input_image"].width}
        sample = Sample(values, frozenset(values))
        loss = module.losses([sample], [SampleKey(0, 0, 0, row)]).mean()
        (loss / len(ROWS)).backward()
    pairs = zip(whole.trained_parameters, module.trained_parameters, strict=True)
    for start, (end, one) in zip(before, pairs, strict=True):
        torch.testing.assert_close(start - end, one.grad, rtol=1e-4, atol=1e-4)
    grads = [one.grad for one in module.trained_parameters if one.grad is not None]
    assert nn.utils.get_total_norm(grads) > 1  # which by default would be clipped


def test_two_processes_train_as_one_accumulating(here: Path, tmp_path: Path) -> None:
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
    WeightsLogger(tmp_path / "single").save(single, "last")
    saved = files(tmp_path / "out")["epoch-1.safetensors"]
    wanted = files(tmp_path / "single")["last.safetensors"]
    torch.testing.assert_close(saved, wanted, rtol=1e-3, atol=1e-6)


ODD = {"prompt": "dog", "input_image": Image.new("RGB", (17, 16))}


@pytest.mark.parametrize(
    ("rows", "where", "named"),
    [
        ([{"promt": "dog"}], "row 0", "'prompt'"),
        ([*ROWS, ODD], "row 3", "17 x 16"),
        ([{"prompt": "dog"}], "row 0", "input_latents"),
        ([*ROWS, {"prompt": "dog"}], "row 3", "input_latents"),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_named(
    rows: Any, where: str, named: str, here: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        launched(module_of(here), rows)
    assert caught.value.where.startswith(where)
    assert named in str(caught.value)


def test_options_without_effect_are_refused(here: Path) -> None:
    module = module_of(here)
    optimizer = torch.optim.SGD(module.trained_parameters, lr=0.1)
    for options in ({"num_epochs": 0}, {"optimizer": optimizer, "learning_rate": 0.1}):
        with pytest.raises(UsageError) as caught:
            launched(module, **options)
        assert caught.value.where == next(iter(options))


def test_a_module_or_an_accelerator_that_cannot_train_so_is_refused(here: Path) -> None:
    plain = TrainingModule(Pipeline.from_pretrained("tiny", configs(here / "model")))
    with pytest.raises(UsageError, match="switch_to_training_mode") as caught:
        launched(plain)
    assert caught.value.where == "module"
    module = module_of(here)

    class Rounding(Accelerator):
        mixed_precision = "bf16"

    class Sharding(Accelerator):
        distributed_type = DistributedType.FSDP

    for kind in (Rounding, Sharding):
        with pytest.raises(UsageError) as caught:
            launch_training_task(kind(cpu=True), ROWS, module, Noting())
        assert caught.value.where == "accelerator"
        forget_accelerator()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def numbers(step: int) -> StepNumbers:
    return StepNumbers(step, 5, 0, 1.0, 1.0, 1.0, 1.0, 0.0)


def test_a_file_has_the_names_that_a_run_gives_and_loads_in_a_pipeline(
    here: Path, tmp_path: Path
) -> None:
    module = module_of(here, lora_rank=2)
    with torch.no_grad():
        for one in module.trained_parameters:
            one.normal_()
    logger = WeightsLogger(str(tmp_path / "own"))
    logger.on_epoch_end(module, 0)
    (file,) = logger.weights
    train(here, output_path=tmp_path / "run", max_steps=1)
    (known,) = files(tmp_path / "run").values()
    assert list(files(tmp_path / "own")["epoch-0.safetensors"]) == list(known)
    pipe = opened(here / "model")
    plain = pipe(prompt="dog", num_inference_steps=1).tobytes()
    pipe.load_lora(str(file))
    assert pipe(prompt="dog", num_inference_steps=1).tobytes() != plain


def test_files_are_saved_by_steps_or_by_epochs(here: Path, tmp_path: Path) -> None:
    module = module_of(here)
    by_steps = WeightsLogger(tmp_path / "steps", save_steps=2)
    by_epochs = WeightsLogger(tmp_path / "epochs")
    for logger in (by_steps, by_epochs):
        for step in range(1, 6):
            logger.on_step_end(module, numbers(step))
        logger.on_epoch_end(module, 0)
        logger.on_training_end(module, 5)
    steps = [f"step-{step}.safetensors" for step in (2, 4, 5)]
    assert names(tmp_path / "steps") == steps
    assert names(tmp_path / "epochs") == ["epoch-0.safetensors"]
    wrong: dict[str, Any] = {"save_steps": 0, "lora_format": "xx"}
    for name, value in wrong.items():
        with pytest.raises(UsageError) as caught:
            WeightsLogger(tmp_path, **{name: value})
        assert caught.value.where == name


def test_weights_that_are_there_are_kept_unless_they_may_be_replaced(
    here: Path, tmp_path: Path
) -> None:
    (tmp_path / "epoch-0.safetensors").write_text("mine")
    with pytest.raises(StateError, match=r"epoch-0\.safetensors"):
        WeightsLogger(tmp_path)
    assert (tmp_path / "epoch-0.safetensors").read_text() == "mine"
    WeightsLogger(tmp_path, overwrite=True).on_epoch_end(module_of(here), 0)
    assert (tmp_path / "epoch-0.safetensors").stat().st_size > 4
