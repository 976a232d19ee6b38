"""A training run made ready by dstrain itself, the bare PyTorch loop beside it, and how
the two are timed.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from dstrain import TrainConfig, TrainingModule
from dstrain.distributed import ProcessGroup
from dstrain.graph.noise_process import TRAIN_TIMESTEPS
from dstrain.runs import data_process, open_training_data, prepare
from dstrain.runs.checkpoints.outputs import RunDirectory
from dstrain.runs.loop import steps
from dstrain.runs.observers import Observers
from dstrain.runs.resolve import resolve
from dstrain.runs.start_training import observers_of
from dstrain.runs.training_run import TrainingRun
from dstrain.training.collate import collate
from torch import Tensor, nn
from torch.optim import AdamW

Step = Callable[[], object]
Predict = Callable[[nn.Module, Tensor, Tensor, dict[str, Any]], Tensor]


@dataclass(frozen=True)
class Timing:
    """Milliseconds a step of both loops takes, (median, least), and the median of the
    ratios of the pairs.
    """

    ours: tuple[float, float]
    bare: tuple[float, float]
    ratio: float

    def cells(self) -> tuple[str, str, str]:
        """Return the numbers for a table."""
        return f"{_pair(self.ours)}", f"{_pair(self.bare)}", f"{self.ratio:.3f}"


HEAD = (
    "workload",
    "dstrain, ms a step: median (least)",
    "bare loop, ms a step: median (least)",
    "median ratio",
)


@contextmanager
def training(config: TrainConfig) -> Iterator[tuple[TrainingRun, Step]]:
    """Fill the feature cache, make the run ready, and yield it with a function that
    makes its next step, logged.
    """
    processes = ProcessGroup(Accelerator(mixed_precision="no", cpu=True))
    data_process(resolve(replace(config, task="sft:data_process")), processes)
    setup = resolve(replace(config, task="sft:train"))
    directory = RunDirectory(setup, processes)
    with directory.opened():
        samples = open_training_data(setup)
        training_run = prepare(setup, processes, samples, TrainingModule)
        directory.load_state(training_run)
        directory.start(training_run)
        observers = observers_of(training_run)
        with observers.watching(bool):
            step = partial(logged_step, steps(training_run), observers)
            yield training_run, step


def logged_step(numbers: Iterator[Mapping[str, float]], observers: Observers) -> None:
    """Do what `dstrain.runs.loop.run_steps` does at every step but those that save."""
    observers.step(next(numbers))
    observers.agree()


def bare_step(training_run: TrainingRun, predict: Predict) -> Step:
    """One step of the loop one would write by hand: a copy of the denoiser, and one
    batch in memory.
    """
    dit = deepcopy(training_run.module.pipeline.components["dit"])
    trained = [parameter for parameter in dit.parameters() if parameter.requires_grad]
    optimizer = AdamW(trained, 1e-4, fused=True)
    _, batches = next(training_run.steps_of_batches())
    values = collate(
        [sample.values for sample in batches[0].samples], training_run.setup.spec.padded
    )
    latents = values["input_latents"]

    def step() -> float:
        noise = torch.randn_like(latents)
        sigma = torch.rand(len(latents))
        level = sigma.view(-1, 1, 1, 1, 1)
        noisy_latents = (1 - level) * latents + level * noise
        loss = nn.functional.mse_loss(
            predict(dit, noisy_latents, sigma * TRAIN_TIMESTEPS, values),
            noise - latents,
        )
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def pairs(ours: Step, bare: Step, count: int, block: int = 1) -> Timing:
    """Time `count` pairs of blocks of `block` steps, taking turns who is first."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(-max(2, count // 10), count):
        for which in (0, 1) if pair % 2 else (1, 0):
            taken = timed((ours, bare)[which], block)
            if pair >= 0:
                seconds[which].append(taken)
    ratios = [mine / floor for mine, floor in zip(*seconds, strict=True)]
    ours, bare = ((1e3 * statistics.median(part), 1e3 * min(part)) for part in seconds)
    return Timing(ours, bare, statistics.median(ratios))


def timed(step: Step, block: int) -> float:
    """Seconds that one step takes, over a block of them."""
    start = time.perf_counter()
    for _ in range(block):
        step()
    return (time.perf_counter() - start) / block


def _pair(milliseconds: tuple[float, float]) -> str:
    return "{:.3g} ({:.3g})".format(*milliseconds)
