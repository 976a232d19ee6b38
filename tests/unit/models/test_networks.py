"""Networks load strictly, in the dtype asked for, without being initialized."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from dstrain import StateError
from dstrain.models.placing import set_dtype
from dstrain.plugin import CheckpointFormat, DiffusersNetwork, Files, KeyMap
from safetensors.torch import save_file
from torch import Tensor, nn

BUILT: list[str] = []
"""The devices of what was built."""


class Small(nn.Module):
    """A network with weights, a saved buffer of integers, and a computed one."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.second = nn.Linear(width, 2, bias=False)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("computed", torch.arange(width) / 3, persistent=False)
        BUILT.extend(str(weight.device) for weight in self.parameters())


def load(
    files: Files, kind: type = Small, dtype: torch.dtype = torch.float32, **config: Any
) -> Any:
    network = DiffusersNetwork(f"{__name__}:{kind.__name__}")
    return network.load(files, network.configure(config), dtype)


def kept(tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Without the names of which None is left."""
    return {name: one for name, one in tensors.items() if one is not None}


def saved(folder: Path, **changes: Tensor | None) -> Files:
    """Write a Small's state in two shards; a change of None leaves a name out."""
    torch.manual_seed(0)
    state = kept({**Small().state_dict(), **changes})
    names = sorted(state)
    paths = (folder / "model-1.safetensors", folder / "model-2.safetensors")
    for path, own in zip(paths, (names[:2], names[2:]), strict=True):
        save_file({name: state[name] for name in own}, path)
    return Files(paths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16], ids=str)
def test_shards_fill_one_network_in_the_dtype_asked_for(
    dtype: torch.dtype, stored: torch.dtype, tmp_path: Path
) -> None:
    """Its weights live in memory of their own, and are not built first."""
    torch.manual_seed(0)
    wanted = Small().state_dict()
    count = wanted.pop("count")
    in_file = {name: weight.to(stored) for name, weight in wanted.items()}
    files = saved(tmp_path, **in_file)
    BUILT.clear()
    network = load(files, dtype=dtype)
    assert set(BUILT) == {"meta"}
    for path in files.paths:
        path.write_bytes(b"\xff" * path.stat().st_size)
    state = network.state_dict()
    assert (state.pop("count"), count.dtype) == (count, torch.int64)
    assert state.keys() == wanted.keys()
    for name, weight in in_file.items():
        assert state[name].dtype == dtype
        assert torch.equal(state[name], weight.to(dtype))
    assert not network.training
    assert torch.equal(network.computed, torch.arange(3) / 3)


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
    """Write a Small of width 4 in the layout OLD; a change of None leaves a name out."""
    torch.manual_seed(0)
    small = Small(4)
    first = small.first.weight
    state = {
        "old.weight": torch.cat([first[2:], first[:2]]),
        "old.weights": small.first.bias.reshape(4, 1, 1),
        "old.second.weight": small.second.weight,
        "count": small.count,
        "optimizer.step": torch.zeros(1),
        **changes,
    }
    tensors = {f"net.{name}": weight.detach() for name, weight in kept(state).items()}
    path = folder / "old.safetensors"
    save_file({**tensors, "other.weight": torch.zeros(1)}, path)
    return Files((path,), prefix="net.", checkpoint_format=OLD), small


class InFull(Small):
    """A network that says in which dtype its weights are loaded."""

    weights_dtype = torch.float32


def test_a_network_may_say_in_which_dtype_its_weights_are(tmp_path: Path) -> None:
    """Without memory, as it is planned, too."""
    loaded = load(saved(tmp_path), InFull, torch.bfloat16)
    for network in (loaded, InFull().to("meta")):
        set_dtype(network, torch.bfloat16)
        assert {one.dtype for one in network.parameters()} == {torch.float32}


def test_misfits_of_another_layout_are_named_as_in_the_file(tmp_path: Path) -> None:
    changes = {
        "old.weight": torch.zeros(5, 2),
        "old.second.weight": None,
        "old.third": torch.zeros(1),
    }
    files, _ = old(tmp_path, **changes)
    with pytest.raises(StateError) as error:
        load(files, width=4)
    missing, unexpected, shaped = error.value.help_lines
    assert missing == "1 missing: net.old.second.weight"
    assert unexpected == "1 unexpected: net.old.third"
    parts = "net.old.weight + net.old.weight (expected (4, 2), found (5, 2))"
    assert shaped.startswith("1 ") and shaped.endswith(parts)


class Tied(nn.Module):
    """A network two of whose weights are one, as in transformers."""

    all_tied_weights_keys = MappingProxyType({"head.weight": "embed.weight"})

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)

    def tie_weights(self, missing_keys: set[str]) -> None:
        """Make them one where their values are equal."""
        if torch.equal(self.head.weight, self.embed.weight):
            self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("numbers", "is_one"),
    [
        ({"embed.weight": 1.0}, True),
        ({"head.weight": 1.0}, True),
        ({"embed.weight": 1.0, "head.weight": 0.0}, False),
        ({"other.weight": 1.0}, None),
    ],
)
def test_weights_that_are_one_may_be_in_the_files_once(
    numbers: dict[str, float], is_one: bool | None, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {name: torch.full((3, 2), one) for name, one in numbers.items()}
    save_file(tensors, path)
    if is_one is None:
        with pytest.raises(StateError, match=r"2 missing: embed\.weight, head\.weight"):
            load(Files((path,)), Tied)
        return
    network = load(Files((path,)), Tied)
    assert (network.head.weight is network.embed.weight) == is_one
    for name, tensor in tensors.items():
        assert torch.equal(network.get_parameter(name), tensor)


class Wider(nn.Linear):
    """A network that passes what it does not take itself to the class above."""

    def __init__(self, in_features: int, extra: int = 5, **others: Any) -> None:
        super().__init__(in_features, **others)
        self.extra = extra


class Likewise(Wider):
    """A network that takes what the class above takes."""


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("torch.nn:Linear", {}),
        (f"{__name__}:Wider", {"extra": 5}),
        (f"{__name__}:Likewise", {"extra": 5}),
    ],
)
def test_a_configuration_has_defaults_and_nothing_that_no_constructor_takes(
    name: str, own: dict[str, int]
) -> None:
    network = DiffusersNetwork(name)
    sizes = {"in_features": 2, "out_features": 3}
    configuration = network.configure({**sizes, "_version": "1", "old": 4})
    defaults = {"bias": True, "device": None, "dtype": None}
    assert vars(configuration) == {**sizes, **defaults, **own}
    assert network.build(configuration).weight.shape == (3, 2)
