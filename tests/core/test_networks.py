"""Networks load strictly from safetensors files, in the dtype asked for, without being initialised."""

import json
from pathlib import Path

import pytest
import torch
from dstrain.components import Files
from dstrain.errors import StateError
from dstrain.networks import Network, find_weights, load_network
from safetensors.torch import save_file
from torch import Tensor, nn


class Small(nn.Module):
    """A network with every kind of state: weights, a saved buffer of integers, and a computed one."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.second = nn.Linear(width, 2, bias=False)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("computed", torch.arange(width) / 3, persistent=False)


def saved(folder: Path, **changes: Tensor | None) -> tuple[Path, ...]:
    """Write a Small's state in two shards; a change of None leaves a name out."""
    torch.manual_seed(0)
    state = {name: weight for name, weight in {**Small().state_dict(), **changes}.items() if weight is not None}
    names = sorted(state)
    paths = (folder / "model-1.safetensors", folder / "model-2.safetensors")
    save_file({name: state[name] for name in names[:2]}, paths[0])
    save_file({name: state[name] for name in names[2:]}, paths[1])
    return paths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shards_fill_one_network_in_the_dtype_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    wanted = Small().state_dict()
    network = load_network(Small, Files(saved(tmp_path)), dtype)
    state = network.state_dict()
    assert all(torch.equal(state[name], wanted[name].to(dtype)) for name in wanted if name != "count")
    assert {name: weight.dtype for name, weight in state.items()} == {
        name: torch.int64 if name == "count" else dtype for name in wanted
    }
    assert state["count"] == 7
    assert not network.training
    assert torch.equal(network.get_buffer("computed"), torch.arange(3) / 3)


def test_half_precision_files_load_in_full_precision(tmp_path: Path) -> None:
    halves = {name: weight.half() for name, weight in Small().state_dict().items() if weight.is_floating_point()}
    network = load_network(Small, Files(saved(tmp_path, **halves)), torch.float32)
    assert all(torch.equal(network.state_dict()[name], half.float()) for name, half in halves.items())
    assert network.first.weight.dtype == torch.float32


def test_weights_live_in_memory_of_their_own(tmp_path: Path) -> None:
    paths = saved(tmp_path)
    network = load_network(Small, Files(paths), torch.float32)
    before = network.first.weight.clone()
    for path in paths:
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.write(b"\xff" * size)
    assert torch.equal(network.first.weight, before)


def test_building_draws_no_random_numbers_and_allocates_no_weights(tmp_path: Path) -> None:
    seen: list[str] = []

    def build() -> Small:
        network = Small()
        seen.extend({str(weight.device) for weight in network.parameters()})
        return network

    paths = saved(tmp_path)
    load_network(build, Files(paths), torch.float32)
    assert seen == ["meta"]


def test_names_are_translated_before_they_are_compared(tmp_path: Path) -> None:
    paths = saved(tmp_path, **{"first.bias": None, "old.bias": torch.ones(3)})
    network = load_network(Small, Files(paths), torch.float32, lambda name: name.replace("old.", "first."))
    assert torch.equal(network.first.bias, torch.ones(3))


def test_every_misfit_is_named_with_examples_and_counts(tmp_path: Path) -> None:
    surplus = {f"surplus.{i}": torch.zeros(1) for i in range(5)}
    paths = saved(tmp_path, **{"first.bias": None, "second.weight": torch.zeros(2, 9)}, **surplus)
    with pytest.raises(StateError) as error:
        load_network(Small, Files(paths), torch.float32)
    text = str(error.value)
    assert text.startswith(f"dstrain: error: {tmp_path}: these files do not fit Small, which has 4 weights")
    assert "1 missing: first.bias" in text
    assert "5 unexpected: surplus.0, surplus.1, surplus.2, ..." in text
    assert "1 of another shape: second.weight (want (2, 3), have (2, 9))" in text


def test_a_damaged_or_absent_file_is_named(tmp_path: Path) -> None:
    whole = saved(tmp_path)[0]
    (tmp_path / "torn.safetensors").write_bytes(whole.read_bytes()[:-3])
    for name in ("torn.safetensors", "absent.safetensors"):
        with pytest.raises(StateError, match=f"{name}: cannot be read as safetensors"):
            find_weights([tmp_path / name])


def test_a_weight_in_two_files_is_refused(tmp_path: Path) -> None:
    first, second = saved(tmp_path)
    (tmp_path / "copy.safetensors").write_bytes(first.read_bytes())
    with pytest.raises(StateError, match=r"copy.safetensors: 'count' is also in model-1.safetensors"):
        find_weights([first, second, tmp_path / "copy.safetensors"])


def test_headers_tell_where_each_weight_lies(tmp_path: Path) -> None:
    paths = saved(tmp_path)
    places = find_weights(paths, lambda name: f"model.{name}")
    assert places["model.second.weight"] == (paths[1], "second.weight", (2, 3))


def test_a_configuration_has_defaults_filled_in_and_nothing_the_constructor_does_not_take(tmp_path: Path) -> None:
    linear = Network("torch.nn:Linear")
    configuration = linear.configure(json.loads('{"in_features": 2, "out_features": 3, "_version": "1", "old": 4}'))
    assert vars(configuration) == {"in_features": 2, "out_features": 3, "bias": True, "device": None, "dtype": None}
    save_file({"weight": torch.ones(3, 2), "bias": torch.zeros(3)}, tmp_path / "x.safetensors")
    network = linear.load(Files((tmp_path / "x.safetensors",)), configuration, torch.float32)
    assert torch.equal(network(torch.ones(2)), torch.full((3,), 2.0))
