"""Networks sharded between processes come out as those of one process."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import LoraConfig, Pipeline, Trainables, TrainingModule, UsageError
from dstrain.distributed import Sharding
from dstrain.models import Found
from dstrain.plugin import Component, DiffusersNetwork, Files
from dstrain.storage import take_part, write_tensors
from dstrain.training.sharded_networks import Division, keeping_gradients, read_own_rows
from dstrain.training.updater import clip_gradients
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.family import MODEL, build
from tests.support.processes import in_processes

CPU = torch.device("cpu")
SAMPLES = (1.0, -1.0, 0.5, 1.5)
"""Those of a step, of all processes together."""


class Net(nn.Module):
    """Five rows, one row, and two blocks; returns a view."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.last = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.last(x).view(-1)


COMPONENTS = (
    Component("dit", DiffusersNetwork(f"{__name__}:Net"), "dit", ("*.weight",)),
)
FAMILY = replace(MODEL, components=f"{__name__}:COMPONENTS")
ALL = Trainables(("dit",))
LAYERS = Trainables((), (LoraConfig("dit", ("blocks.*",), 2, 2.0),))


def memory(net: nn.Module) -> int:
    return sum(one.untyped_storage().nbytes() for one in net.parameters())


def module_of(
    folder: Path, division: Division | None = None, trainables: Trainables = ALL
) -> TrainingModule:
    """A module that trains the network in a file, of which a process reads its rows."""
    found = Found({"dit": Files((folder / "net.safetensors",))}, {"dit": {}})
    parts: Mapping[str, Any] = {"dit": division} if division else {}
    given = (FAMILY, build("base"), found, CPU, torch.float32)
    module = TrainingModule(Pipeline.from_found(*given, parts=parts))
    module.switch_to_training_mode(trainables)
    module.networks["dit"] = module.pipeline.components["dit"]
    return module


def written(folder: Path) -> Path:
    save_file(Net().state_dict(), folder / "net.safetensors")
    return folder


def gradients(module: TrainingModule, samples: Sequence[float]) -> float:
    """Backward passes of these samples; the norm of the mean gradient, clipped."""
    for number, sample in enumerate(samples, 1):
        prediction = module.networks["dit"](torch.full((1, 3), sample))
        prediction += 1  # a view's hook would be lost
        share = prediction.square().sum() / len(samples)
        if number < len(samples):
            with keeping_gradients(module):
                share.backward()
        else:
            share.backward()
    return float(clip_gradients(module.trained_parameters, 0.1))


def whole(tensors: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: one.full_tensor().tolist() for name, one in tensors.items()}


def write_and_read(path: Path, parameters: dict[str, Any], rank: int) -> None:
    """Write a file of whole tensors; what this process reads of it are its rows."""
    (write_tensors(path, parameters, {}) if not rank else take_part(parameters))
    torch.distributed.barrier()
    read = read_own_rows(path, parameters.get)
    for key, parameter in parameters.items():
        back: Any = read[key]
        assert isinstance(back, DTensor)
        assert torch.equal(back.to_local(), parameter.to_local())
        assert back.placements == parameter.placements


def divided(
    rank: int,
    folder: Path,
    sharding: Sharding,
    samples: Sequence[float],
    trainables: Trainables = ALL,
    reads_all: bool = False,
) -> dict[str, Any]:
    division = Division(sharding, CPU)
    module = module_of(folder, None if reads_all else division, trainables)
    loaded = memory(module.networks["dit"])
    before = module.trained.parameters
    division.divide(module)
    after: dict[str, Any] = module.trained.parameters
    assert not any(after[name] is one for name, one in before.items())
    found = {"loaded": loaded, "weights": whole(after)}
    found["norm"] = gradients(module, samples)
    found["grads"] = whole({name: one.grad for name, one in after.items()})
    found["rows"] = {name: len(one.to_local()) for name, one in after.items()}
    if trainables == ALL:
        write_and_read(folder / sharding.mode, after, rank)
        with torch.no_grad():
            output = module.networks["dit"](torch.ones(1, 3))
            after["dit.last.bias"].add_(1.0)
            other = module.networks["dit"](torch.ones(1, 3))
        found["moved"] = (other - output).item()
    return found


def of_two(rank: int, folder: Path) -> dict[str, Any]:
    """What one of two processes finds."""
    samples = SAMPLES[2:] if rank else SAMPLES[:2]
    in_ram = Sharding(reshard_after_forward=False, offload=True)
    found = {
        "full": divided(rank, folder, Sharding(), samples),
        "kept whole": divided(rank, folder, in_ram, samples, reads_all=True),
        "LoRA": divided(rank, folder, Sharding(), samples, LAYERS),
    }
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    found["hybrid"] = divided(rank, folder, Sharding("hybrid"), samples)
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    with pytest.raises(UsageError, match=r"2 .* 3 "):
        Division(Sharding("hybrid"), CPU)
    low = module_of(folder)
    low.networks["dit"].bfloat16()
    with pytest.raises(UsageError, match="--trainable_dtype: "):
        Division(Sharding(), CPU).divide(low)
    single = Net()
    single.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(UsageError, match="scale of Net "):
        # At the first weight that is read, whichever that is.
        Division(Sharding(), CPU).keep_rows(single, "first.weight", torch.ones(1))
    return found


def of_four(rank: int, folder: Path) -> dict[str, Any]:
    """What one of two processes on each of two machines finds."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return divided(rank, folder, Sharding("hybrid"), SAMPLES[rank : rank + 1])


def found_by(
    count: int, of_one: Callable[[int, Path], dict[str, Any]], folder: Path
) -> list[dict[str, Any]]:
    """What each of so many processes finds, which meet."""

    def work(rank: int) -> None:
        torch.distributed.init_process_group("gloo")
        (folder / f"{rank}.json").write_text(json.dumps(of_one(rank, folder)))
        torch.distributed.destroy_process_group()

    ended = in_processes(count, work, folder)
    assert set(ended.codes) == {0}, ended.said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found_by(2, of_two, written(tmp_path_factory.mktemp("two")))


def assert_those_of_one(
    found: list[dict[str, Any]], folder: Path, trainables: Trainables = ALL
) -> None:
    """What processes found are the weights, norms and gradients of one with all samples."""
    alone = module_of(written(folder), trainables=trainables)
    weights = {name: one.tolist() for name, one in alone.trained.parameters.items()}
    norm = gradients(alone, SAMPLES)
    for one in found:
        assert one["weights"] == weights
        assert one["norm"] == pytest.approx(norm, rel=1e-5)
        for name, parameter in alone.trained.parameters.items():
            grad = torch.tensor(one["grads"][name])
            torch.testing.assert_close(grad, parameter.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", ["full", "kept whole", "LoRA", "hybrid"])
def test_gradients_and_their_norm_are_those_of_one_process(
    found: list[dict[str, Any]], kind: str, tmp_path: Path
) -> None:
    trainables = LAYERS if kind == "LoRA" else ALL
    assert_those_of_one([one[kind] for one in found], tmp_path, trainables)


ROWS = {"dit.first.weight": (3, 2), "dit.last.weight": (1, 0)}


def test_two_machines_of_two_processes_shard_each_for_itself(tmp_path: Path) -> None:
    found = found_by(4, of_four, written(tmp_path))
    assert_those_of_one(found, tmp_path)
    for name, rows in ROWS.items():
        assert tuple(one["rows"][name] for one in found) == rows * 2


def test_each_process_has_its_rows_and_with_hybrid_each_machine_has_all(
    found: list[dict[str, Any]],
) -> None:
    for name, rows in ROWS.items():
        assert tuple(one["full"]["rows"][name] for one in found) == rows
        assert tuple(one["hybrid"]["rows"][name] for one in found) == (sum(rows),) * 2


def test_no_process_has_more_than_its_rows_once_they_are_loaded(
    found: list[dict[str, Any]],
) -> None:
    """One number for each parameter, in place of all."""
    net = Net()
    alone = 4 * len(dict(net.named_parameters()))
    assert alone < memory(net)
    for one in found:
        assert one["full"]["loaded"] == alone
        assert one["kept whole"]["loaded"] == memory(net)
