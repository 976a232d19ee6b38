"""Networks sharded between two processes, or on two machines of two each: whole tensors, norms and rows come out as
those of one process.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dstrain import LoraConfig, UsageError
from dstrain.distributed import Sharding
from dstrain.lora import inject
from dstrain.models import weight_files
from dstrain.models.networks import Place, keep, place_weights
from dstrain.pipeline.loading import Loader
from dstrain.plugin import Component, DiffusersNetwork, Files
from dstrain.storage import take_part, write_tensors
from dstrain.storage.safetensors import whole
from dstrain.training.optimizers import clip_gradients
from dstrain.training.sharded_networks import (
    Division,
    keeping_gradients,
    read_own_rows,
    sharded_networks,
)
from dstrain.training.trainables import TrainableModules
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.processes import in_processes

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


class Module(nn.Module):
    """What a TrainingModule has of networks."""

    def __init__(self, lora: bool, place: Place = keep) -> None:
        super().__init__()
        net = Net().requires_grad_(False)
        place_weights(net, place)
        self.bytes_loaded = memory(net)
        net.requires_grad_(True)
        self.networks = nn.ModuleDict({"dit": net})
        self.trained = TrainableModules(("dit",))
        if lora:
            layers = LoraConfig("dit", ("blocks.*",), 2, 2.0)
            inject(net, layers, {})
            self.trained.lora["dit"] = layers
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                self.trained.add("dit", net, name)


def memory(net: nn.Module) -> int:
    """Bytes that the parameters take."""
    return sum(one.untyped_storage().nbytes() for one in net.parameters())


def gradients(module: Any, samples: Sequence[float]) -> float:
    """Backward passes of these samples; the norm of the mean gradient, clipped."""
    for number, sample in enumerate(samples):
        prediction = module.networks["dit"](torch.full((1, 3), sample))
        prediction += 1  # a view's hook would be lost
        share = prediction.square().sum() / len(samples)
        if number + 1 < len(samples):
            with keeping_gradients(module):
                share.backward()
        else:
            share.backward()
    parameters = list(module.trained.parameters.values())
    return float(clip_gradients(parameters, 0.1))


def loaded(folder: Path, rank: int) -> int:
    """Read a file of the network as a run does, each process its rows; the bytes that
    this one read.
    """
    path = folder / f"net-{rank}.safetensors"
    save_file(Net().state_dict(), path)
    part = Component("dit", DiffusersNetwork(f"{__name__}:Net"), "dit", ("*.weight",))
    division = Division(Sharding(), torch.device("cpu"))
    read = 0
    reader_of = weight_files._reader

    @contextmanager
    def counted(path: Path) -> Iterator[weight_files.Reader]:
        def reading(name: str, rows: slice | None) -> Tensor:
            nonlocal read
            tensor = reader(name, rows)
            read += tensor.nbytes
            return tensor

        with reader_of(path) as reader:
            yield reading

    family: Any = None
    loader = Loader(family, part, Files((path,)), torch.device("cpu"), part=division)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files, "_reader", counted)
        net = loader.load(SimpleNamespace(), torch.float32)
    module: Any = SimpleNamespace(
        networks={"dit": net},
        trained=SimpleNamespace(components=("dit",), parameters={}),
    )
    division.divide(module)
    for name, parameter in Net().named_parameters():
        assert torch.equal(whole(net.get_parameter(name)), parameter)
    return read


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


def of_two(rank: int, folder: Path) -> dict[str, Any]:
    """What one of two processes finds."""
    found: dict[str, Any] = {}
    for name, lora, sharding in (
        ("full", False, Sharding()),
        ("kept whole", False, Sharding(reshard_after_forward=False, offload=True)),
        ("LoRA", True, Sharding()),
        ("hybrid", False, Sharding("hybrid")),
    ):
        if sharding.mode == "hybrid":
            os.environ["LOCAL_WORLD_SIZE"] = "1"
        division = Division(sharding, torch.device("cpu"))
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        place = division.keep_rows if name != "kept whole" else keep
        module: Any = Module(lora, place)
        before = module.trained.parameters
        division.divide(module)
        after = module.trained.parameters
        assert not any(after[name] is one for name, one in before.items())
        assert sharded_networks(module) == [module.networks["dit"]]
        found[name] = {
            "norm": gradients(module, SAMPLES[2:] if rank else SAMPLES[:2]),
            "grads": {k: whole(p.grad).tolist() for k, p in after.items()},
            "loaded": module.bytes_loaded,
            "rows": {k: len(p.to_local()) for k, p in after.items()},
        }
        with torch.no_grad():
            output = module.networks["dit"](torch.ones(1, 3))
            after["dit.last.bias" if not lora else next(iter(after))].add_(1.0)
            other = module.networks["dit"](torch.ones(1, 3))
        found[name]["moved"] = (other - output).item()
        if name in ("full", "hybrid"):
            write_and_read(folder / name, after, rank)
    low: Any = Module(False).bfloat16()
    with pytest.raises(UsageError, match="trained in fp32, not in bf16"):
        Division(Sharding(), torch.device("cpu")).divide(low)
    found["loaded"] = loaded(folder, rank)
    single = Net()
    single.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(UsageError, match="scale of Net is a single number"):
        # At the first weight that is read, whichever that is.
        Division(Sharding(), torch.device("cpu")).keep_rows(
            single, "first.weight", single.first.weight
        )
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    with pytest.raises(UsageError, match="2 processes do not make machines of 3 each"):
        Division(Sharding("hybrid"), torch.device("cpu"))
    return found


def of_four(rank: int, folder: Path) -> dict[str, Any]:
    """What one of two processes on each of two machines finds, with hybrid."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    division = Division(Sharding("hybrid"), torch.device("cpu"))
    module: Any = Module(False, division.keep_rows)
    division.divide(module)
    norm = gradients(module, SAMPLES[rank : rank + 1])
    parameters = module.trained.parameters
    write_and_read(folder / "hybrid", parameters, rank)
    return {
        "norm": norm,
        "grads": {k: whole(p.grad).tolist() for k, p in parameters.items()},
        "weights": {k: whole(p).tolist() for k, p in parameters.items()},
        "rows": {k: len(p.to_local()) for k, p in parameters.items()},
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two processes find."""
    return found_by(2, of_two, tmp_path_factory.mktemp("two"))


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


@pytest.mark.parametrize("kind", ["full", "kept whole", "LoRA", "hybrid"])
def test_gradients_and_their_norm_are_those_of_one_process(
    found: list[dict[str, Any]], kind: str
) -> None:
    assert_gradients_of_one([one[kind] for one in found], kind == "LoRA")


def assert_gradients_of_one(found: list[dict[str, Any]], lora: bool) -> None:
    """Norms and gradients that processes found are those of one with all samples."""
    alone = Module(lora)
    norm = gradients(alone, SAMPLES)
    for one in found:
        assert one["norm"] == pytest.approx(norm, rel=1e-5)
        for name, parameter in alone.trained.parameters.items():
            assert parameter.grad is not None
            torch.testing.assert_close(
                torch.tensor(one["grads"][name]),
                parameter.grad,
                rtol=1e-4,
                atol=1e-7,
            )


def test_two_machines_of_two_processes_shard_each_for_itself(tmp_path: Path) -> None:
    found = found_by(4, of_four, tmp_path)
    assert_gradients_of_one(found, lora=False)
    for name, rows in (("dit.first.weight", (3, 2)), ("dit.last.weight", (1, 0))):
        assert tuple(one["rows"][name] for one in found) == rows * 2
    for name, parameter in Module(False).trained.parameters.items():
        for one in found:
            assert one["weights"][name] == parameter.tolist()


@pytest.mark.parametrize("kind", ["full", "kept whole", "hybrid"])
def test_a_pass_without_gradient_sees_what_was_changed_since_the_last(
    found: list[dict[str, Any]], kind: str
) -> None:
    for one in found:
        assert one[kind]["moved"] == pytest.approx(1.0, abs=1e-5)


def test_each_process_has_its_rows_and_with_hybrid_each_machine_has_all(
    found: list[dict[str, Any]],
) -> None:
    for name, rows in (("dit.first.weight", (3, 2)), ("dit.last.weight", (1, 0))):
        assert tuple(one["full"]["rows"][name] for one in found) == rows
        assert tuple(one["hybrid"]["rows"][name] for one in found) == (sum(rows),) * 2
    assert found[0]["LoRA"]["rows"].keys() == Module(True).trained.parameters.keys()


def test_no_process_has_more_than_its_rows_once_they_are_loaded(
    found: list[dict[str, Any]],
) -> None:
    names = len(dict(Net().named_parameters()))
    assert Module(False).bytes_loaded == memory(Net()) > 4 * names
    for one in found:
        # One number for each parameter, in place of all.
        assert one["full"]["loaded"] == one["LoRA"]["loaded"] == 4 * names
        assert one["kept whole"]["loaded"] == memory(Net())


def test_each_process_reads_its_rows_of_a_file(found: list[dict[str, Any]]) -> None:
    own = [one["loaded"] for one in found]
    assert sum(own) == memory(Net())
    # Of five rows one has three, of one row one has it.
    assert own[0] == memory(Net()) - own[1] <= 0.7 * memory(Net())


def test_one_process_clips_as_torch_does() -> None:
    module, other = Module(False), Module(False)
    norm = gradients(module, [1.0, 2.0])
    for sample in (1.0, 2.0):
        output = other.networks["dit"](torch.full((1, 3), sample)) + 1
        (output.square().sum() / 2).backward()
    assert norm == float(nn.utils.clip_grad_norm_(other.parameters(), 0.1))
