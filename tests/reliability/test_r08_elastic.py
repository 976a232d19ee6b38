"""At one global batch, neither processes nor workers nor micro-batches change what is
trained on, nor the numbers.
"""

import hashlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dstrain import Batch, Pipeline, TrainingModule
from dstrain.runs import loop as train
from torch import Tensor

from tests.support.family import weights_of
from tests.support.processes import commands, in_processes, words
from tests.support.runs import files, log

pytestmark = [
    pytest.mark.promise(
        "R8", "processes, workers, micro-batches: the same samples, noise, timesteps"
    ),
    pytest.mark.usefixtures("tiny"),
]
GLOBAL = 16
COMBINATIONS = tuple(
    (processes, workers, micro) for processes in (1, 2, 4) for workers in (0, 2) for micro in (1, 2, 4)
)  # fmt: skip
"""Processes, workers each, samples in a micro-batch."""
STAGES = ("", "train")


@dataclass(frozen=True)
class Moved:
    """A run starts with one number of processes and resumes with another, in the middle of an epoch."""

    first: int
    second: int
    flags: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.first} to {self.second} processes, " + (
            ", ".join(map(str, self.flags.values())) or "LoRA"
        )


MOVED = (
    Moved(1, 2, {}),
    Moved(2, 1, {}),
    Moved(2, 4, {"trainable_models": "dit"}),
    Moved(4, 1, {"trainable_models": "dit", "lr_scheduler": "cosine"}),
    Moved(1, 4, {"trainable_models": "dit,text_encoder", "lr_scheduler": "linear"}),
    Moved(
        4,
        2,
        {"trainable_models": "text_encoder", "lora_base_model": "dit", "lora_rank": 2},
    ),
)


def flags(
    here: Path,
    output: Path,
    processes: int,
    workers: int = 0,
    micro: int = 1,
    **changes: Any,
) -> dict[str, Any]:
    """Flags of a run whose global batch has 16 samples."""
    return {
        "model": "tiny", "dataset_base_path": here / "data", "output_path": output, "learning_rate": 1e-2,
        "model_paths": json.dumps(list(weights_of(here / "model").values())), "dataset_repeat": 7, "batch_size": micro,
        "gradient_accumulation_steps": max(1, GLOBAL // (processes * micro)), "dataset_num_workers": workers, **changes,
    }  # fmt: skip


def noting(line: list[str], folder: Path) -> Callable[[int], int]:
    """The command line, in which every process notes what its model is given."""

    def work(rank: int) -> int:
        noted: list[Any] = []
        place = [0, 0]  # optimizer step, micro-batch of the step
        forward, predict = TrainingModule.forward, Pipeline.predict

        def noting_forward(self: TrainingModule, batch: Batch) -> Tensor:
            noted.append(
                [*place, rank, batch.micro_batch.keys, batch.micro_batch.weights]
            )
            loss = forward(self, batch)
            place[:] = (
                [place[0] + 1, 0]
                if batch.micro_batch.ends_step
                else [place[0], place[1] + 1]
            )
            return loss

        def noting_predict(
            self: Pipeline,
            values: Any,
            noisy_latents: Tensor,
            timestep: Tensor,
            branch: str = "positive",
        ) -> Tensor:
            noted[-1] += [
                [
                    hashlib.sha256(one.numpy().tobytes()).hexdigest()
                    for one in noisy_latents
                ],
                timestep.tolist(),
            ]
            return predict(self, values, noisy_latents, timestep, branch)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TrainingModule, "forward", noting_forward)
            patch.setattr(Pipeline, "predict", noting_predict)
            code = commands(line)(rank)
        (folder / f"noted-{rank}.json").write_text(json.dumps(noted))
        return code

    return work


def trained_on(folder: Path, processes: int) -> list[Any]:
    """Every sample that counted, in the order of the run: step, key, noisy latents,
    timestep.
    """
    noted = [
        entry
        for rank in range(processes)
        for entry in json.loads((folder / f"noted-{rank}.json").read_text())
    ]
    return [
        (step, *sample[:1], *sample[2:])
        for step, _, _, *lists in sorted(noted, key=lambda entry: entry[:3])
        for sample in zip(*lists, strict=True)
        if sample[1]
    ]


@pytest.fixture(scope="module")
def alone(here: Path) -> tuple[list[Any], list[dict[str, float]]]:
    """What one process without accumulation is trained on, and its log."""
    (here / "alone").mkdir()
    line = words(
        flags(here, here / "alone/out", 1, micro=GLOBAL, lora_rank=2, num_epochs=2)
    )
    assert in_processes(1, noting(line, here / "alone"), here).codes == (0,)
    return trained_on(here / "alone", 1), log(here / "alone/out")


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage or "in a single run")
@pytest.mark.parametrize(
    "combination",
    COMBINATIONS,
    ids=lambda c: f"{c[0]} processes x {c[1]} workers x {c[2]}",
)
def test_every_step_has_the_same_samples_noise_and_timesteps(
    combination: tuple[int, int, int],
    stage: str,
    here: Path,
    tmp_path: Path,
    alone: tuple[list[Any], list[Any]],
) -> None:
    processes = combination[0]
    given = flags(here, tmp_path / "out", *combination, lora_rank=2, num_epochs=2)
    if stage:
        cache = {"feature_cache": here / "cache"}
        filled = {**given, **cache, "task": "sft:data_process"}
        assert in_processes(1, commands(words(filled)), tmp_path).codes == (0,)
        given |= {**cache, "task": "sft:train"}
    ended = in_processes(processes, noting(words(given), tmp_path), tmp_path)
    assert ended.codes == (0,) * processes, ended.said
    want, logged = alone
    assert len(want) == 2 * 6 * 7
    assert trained_on(tmp_path, processes) == want
    for one, other in zip(log(tmp_path / "out"), logged, strict=True):
        assert one == pytest.approx(other, rel=2e-5)


def stopping(line: list[str], step: int) -> Callable[[int], int]:
    """The command line, which every process is asked to stop in this step."""

    def work(rank: int) -> int:
        update, calls = train.update, []

        def stopped(*arguments: Any) -> Any:
            calls.append(None)
            if len(calls) == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return update(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "update", stopped)
            return commands(line)(rank)

    return work


@pytest.mark.parametrize("case", MOVED, ids=str)
def test_a_run_resumes_with_other_numbers_of_processes(
    case: Moved, here: Path, tmp_path: Path
) -> None:
    """Micro-batches of four samples, then of one: the dropout of the text encoder, which
    runs in the training step, is drawn for each sample.
    """
    common = {
        "num_epochs": 2,
        "lora_rank": None if "trainable_models" in case.flags else 2,
        **case.flags,
    }
    whole = flags(here, tmp_path / "whole", 1, micro=4, **common)
    assert in_processes(1, commands(words(whole)), tmp_path).codes == (0,)
    first = flags(here, tmp_path / "cut", case.first, **common)
    stopped = in_processes(case.first, stopping(words(first), 3), tmp_path)
    assert stopped.codes == (75,) * case.first, stopped.said
    second = flags(here, tmp_path / "cut", case.second, **common, resume="auto")
    ended = in_processes(case.second, commands(words(second)), tmp_path)
    assert ended.codes == (0,) * case.second, ended.said
    for one, other in zip(log(tmp_path / "cut"), log(tmp_path / "whole"), strict=True):
        assert one == pytest.approx(other, rel=2e-5)
    made, wanted = files(tmp_path / "cut"), files(tmp_path / "whole")
    for name, weights in wanted.items():
        for key, weight in weights.items():
            assert (weight - made[name][key]).abs().max() <= 2e-5, f"{name}: {key}"
