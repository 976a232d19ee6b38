"""Networks load strictly from safetensors files, in the dtype asked for, without being
initialized.
"""

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from dstrain import StateError
from dstrain.models.networks import load_network
from dstrain.plugin import CheckpointFormat, DiffusersNetwork, Files, KeyMap, Tokenizer
from safetensors.torch import save_file
from torch import Tensor, nn


class Small(nn.Module):
    """A network with every kind of state: weights, a saved buffer of integers, and a
    computed one.
    """

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.second = nn.Linear(width, 2, bias=False)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("computed", torch.arange(width) / 3, persistent=False)


def saved(folder: Path, **changes: Tensor | None) -> tuple[Path, ...]:
    """Write a Small's state in two shards; a change of None leaves a name out."""
    torch.manual_seed(0)
    state = {
        name: weight
        for name, weight in {**Small().state_dict(), **changes}.items()
        if weight is not None
    }
    names = sorted(state)
    paths = (folder / "model-1.safetensors", folder / "model-2.safetensors")
    save_file({name: state[name] for name in names[:2]}, paths[0])
    save_file({name: state[name] for name in names[2:]}, paths[1])
    return paths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shards_fill_one_network_in_the_dtype_asked_for(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    wanted = Small().state_dict()
    network = load_network(Small, Files(saved(tmp_path)), dtype)
    state = network.state_dict()
    assert all(
        torch.equal(state[name], wanted[name].to(dtype))
        for name in wanted
        if name != "count"
    )
    assert {name: weight.dtype for name, weight in state.items()} == {
        name: torch.int64 if name == "count" else dtype for name in wanted
    }
    assert state["count"] == 7
    assert not network.training
    assert torch.equal(network.get_buffer("computed"), torch.arange(3) / 3)


def test_half_precision_files_load_in_full_precision(tmp_path: Path) -> None:
    halves = {
        name: weight.half()
        for name, weight in Small().state_dict().items()
        if weight.is_floating_point()
    }
    network = load_network(Small, Files(saved(tmp_path, **halves)), torch.float32)
    assert all(
        torch.equal(network.state_dict()[name], half.float())
        for name, half in halves.items()
    )
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


def test_building_draws_no_random_numbers_and_allocates_no_weights(
    tmp_path: Path,
) -> None:
    seen: list[str] = []

    def build() -> Small:
        network = Small()
        seen.extend({str(weight.device) for weight in network.parameters()})
        return network

    paths = saved(tmp_path)
    load_network(build, Files(paths), torch.float32)
    assert seen == ["meta"]


OLD = CheckpointFormat(
    key_patterns=("old.weight", "old.second"),
    rows=(
        KeyMap("first.weight", "old.weight", 1, 2, 2),
        KeyMap("first.weight", "old.weight", 0, 1, 2),
        KeyMap("first.bias", "old.weights", 0, 1, 1),
        KeyMap("second", "old.second"),
    ),
    ignored=("optimizer.*",),
)
"""Small's weights otherwise: halves swapped, a bias with axes of length 1."""


def old(folder: Path, **changes: Tensor | None) -> tuple[Files, Small]:
    """Write a Small of width 4 in the layout OLD, under a prefix; a change of None
    leaves a name out.
    """
    torch.manual_seed(0)
    small = Small(4)
    state = {
        "old.weight": torch.cat([small.first.weight[2:], small.first.weight[:2]]),
        "old.weights": small.first.bias.reshape(4, 1, 1),
        "old.second.weight": small.second.weight,
        "count": small.count,
        "optimizer.step": torch.zeros(1),
    }
    kept = {
        name: weight
        for name, weight in {**state, **changes}.items()
        if weight is not None
    }
    tensors = {f"net.{name}": weight.detach() for name, weight in kept.items()}
    save_file({**tensors, "other.weight": torch.zeros(1)}, folder / "old.safetensors")
    return Files(
        (folder / "old.safetensors",), prefix="net.", checkpoint_format=OLD
    ), small


def test_a_network_is_filled_from_another_layout_behind_a_prefix(
    tmp_path: Path,
) -> None:
    files, small = old(tmp_path)
    state = load_network(lambda: Small(4), files, torch.float32).state_dict()
    assert all(
        torch.equal(state[name], weight) for name, weight in small.state_dict().items()
    )
    assert all(weight.is_contiguous() for weight in state.values())


def test_misfits_of_another_layout_are_named_as_in_the_file(tmp_path: Path) -> None:
    changes = {
        "old.weight": torch.zeros(5, 2),
        "old.second.weight": None,
        "old.third": torch.zeros(1),
    }
    files, _ = old(tmp_path, **changes)
    with pytest.raises(StateError) as error:
        load_network(lambda: Small(4), files, torch.float32)
    text = str(error.value)
    assert "1 missing: net.old.second.weight\n" in text
    assert "1 unexpected: net.old.third\n" in text
    assert (
        "1 of a different shape: net.old.weight + net.old.weight (expected (4, 2), found (5, 2))"
        in text
    )
    assert "other.weight" not in text


def test_axes_of_length_1_make_no_difference_in_another_layout_alone(
    tmp_path: Path,
) -> None:
    paths = saved(tmp_path, **{"first.bias": torch.zeros(3, 1)})
    with pytest.raises(
        StateError, match=r"first.bias \(expected \(3,\), found \(3, 1\)\)"
    ):
        load_network(Small, Files(paths), torch.float32)


class Tied(nn.Module):
    """A network that declares two of its weights to be one, as those of transformers
    do.
    """

    all_tied_weights_keys = MappingProxyType({"head.weight": "embed.weight"})

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)

    def tie_weights(self, missing_keys: set[str]) -> None:
        """Make them one where their values are equal."""
        if torch.equal(self.head.weight, self.embed.weight):
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("present", ["embed.weight", "head.weight"])
def test_weights_that_are_one_may_be_in_the_files_once(
    present: str, tmp_path: Path
) -> None:
    save_file({present: torch.ones(3, 2)}, tmp_path / "x.safetensors")
    network = load_network(Tied, Files((tmp_path / "x.safetensors",)), torch.float32)
    assert network.get_parameter("head.weight") is network.get_parameter("embed.weight")
    assert torch.equal(network.get_parameter("head.weight"), torch.ones(3, 2))


def test_weights_that_differ_in_the_files_are_not_made_one(tmp_path: Path) -> None:
    save_file(
        {"embed.weight": torch.ones(3, 2), "head.weight": torch.zeros(3, 2)},
        tmp_path / "x.safetensors",
    )
    network = load_network(Tied, Files((tmp_path / "x.safetensors",)), torch.float32)
    assert not torch.equal(
        network.get_parameter("head.weight"), network.get_parameter("embed.weight")
    )


def test_a_weight_that_is_one_with_none_in_the_files_is_missing(tmp_path: Path) -> None:
    save_file({"other.weight": torch.ones(3, 2)}, tmp_path / "x.safetensors")
    with pytest.raises(StateError, match=r"2 missing: embed.weight, head.weight"):
        load_network(Tied, Files((tmp_path / "x.safetensors",)), torch.float32)


def test_every_misfit_is_named_with_examples_and_counts(tmp_path: Path) -> None:
    surplus = {f"surplus.{i}": torch.zeros(1) for i in range(5)}
    paths = saved(
        tmp_path, **{"first.bias": None, "second.weight": torch.zeros(2, 9)}, **surplus
    )
    with pytest.raises(StateError) as error:
        load_network(Small, Files(paths), torch.float32)
    text = str(error.value)
    assert text.startswith(
        f"dstrain: error: {tmp_path}: these files do not fit Small, which has 4 weights"
    )
    assert "1 missing: first.bias" in text
    assert "5 unexpected: surplus.0, surplus.1, surplus.2, ..." in text
    assert (
        "1 of a different shape: second.weight (expected (2, 3), found (2, 9))" in text
    )


def test_a_configuration_has_defaults_filled_in_and_nothing_the_constructor_does_not_take(
    tmp_path: Path,
) -> None:
    linear = DiffusersNetwork("torch.nn:Linear")
    configuration = linear.configure(
        json.loads('{"in_features": 2, "out_features": 3, "_version": "1", "old": 4}')
    )
    assert vars(configuration) == {
        "in_features": 2,
        "out_features": 3,
        "bias": True,
        "device": None,
        "dtype": None,
    }
    save_file(
        {"weight": torch.ones(3, 2), "bias": torch.zeros(3)}, tmp_path / "x.safetensors"
    )
    network = linear.load(
        Files((tmp_path / "x.safetensors",)), configuration, torch.float32
    )
    assert torch.equal(network(torch.ones(2)), torch.full((3,), 2.0))


class Wider(nn.Linear):
    """A network that passes what it does not take itself to the class above."""

    def __init__(self, in_features: int, extra: int = 5, **others: Any) -> None:
        super().__init__(in_features, **others)
        self.extra = extra


def test_a_configuration_has_what_the_constructor_passes_on() -> None:
    wider = DiffusersNetwork(f"{__name__}:Wider")
    configuration = wider.configure({"in_features": 2, "out_features": 3, "old": 4})
    assert vars(configuration) == {
        "in_features": 2,
        "extra": 5,
        "out_features": 3,
        "bias": True,
        "device": None,
        "dtype": None,
    }
    assert wider.build(configuration).weight.shape == (3, 2)


class Words:
    """A processor of a family's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def from_pretrained(cls, folder: Path, *, local_files_only: bool) -> "Words":
        assert local_files_only
        return cls(folder)


def test_a_tokenizer_may_be_a_class_of_the_familys_own(tmp_path: Path) -> None:
    found = Tokenizer(f"{__name__}:Words").load(Files((tmp_path,)), None, torch.float32)
    assert isinstance(found, Words)
    assert found.folder == tmp_path
