"""Components are loaded weight by weight, each merged before it is stored."""

import weakref
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from dstrain import Pipeline, StateError, UsageError
from dstrain.config import LoraFile
from dstrain.graph.keeper import Keeper, WeightSize
from dstrain.graph.keepers import AS_LOADED, Keepers
from dstrain.models import Found
from dstrain.plugin import Component, DiffusersNetwork, Files
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.family import MODEL, build
from tests.support.runs import same
from tests.support.stored_weights import InRam, Storing

INT8 = Keepers((Storing(("net", "own")),))


class Deep(nn.Module):
    """Several equal layers, and a buffer that is computed."""

    def __init__(self, side: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(side, side, bias=False) for _ in range(depth)]
        )
        self.register_buffer("steps", torch.arange(3.0), persistent=False)


class Tied(nn.Module):
    """Two weights that are one, as those of transformers."""

    all_tied_weights_keys = MappingProxyType({"head.weight": "embed.weight"})

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)

    def tie_weights(self, missing_keys: set[str]) -> None:
        """Make them one where their values are equal."""
        if torch.equal(self.head.weight, self.embed.weight):
            self.head.weight = self.embed.weight


class LoadsItself:
    """A network as plugins wrote them before `load` had a place."""

    def build(self, configuration: Any) -> nn.Module:
        """Build it, its weights random."""
        return Deep(64, 2)

    def load(self, files: Files, configuration: Any, dtype: torch.dtype) -> nn.Module:
        """Load it as a whole; its last layer is its first."""
        network = Deep(64, 2)
        network.load_state_dict(torch.load(files.paths[0]))
        network.layers.append(network.layers[0])
        return network.to(dtype)


def component(name: str, network: Any) -> Component:
    return Component(name, network, name, ("*.weight",))


COMPONENTS = (
    component("net", DiffusersNetwork(f"{__name__}:Deep")),
    component("tied", DiffusersNetwork(f"{__name__}:Tied")),
    component("own", LoadsItself()),
)
FAMILY = replace(
    MODEL,
    components=f"{__name__}:COMPONENTS",
    default_trainable="net",
    lora_targets={"net": ("layers.*",), "tied": ("head",)},
    lora_prefixes={"net": "net", "tied": "tied"},
)


def written(folder: Path, module: nn.Module) -> Files:
    path = folder / "net.safetensors"
    save_file({name: one.clone() for name, one in module.state_dict().items()}, path)
    return Files((path,))


def deep(side: int, depth: int) -> Deep:
    torch.manual_seed(0)
    return Deep(side, depth)


def loaded(
    files: Files,
    name: str = "net",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    keepers: Keepers = AS_LOADED,
    **more: Any,
) -> Any:
    """Load the component of these files, a deep one of the sizes that they say."""
    side, depth = more.pop("sizes", (4, 2))
    config = {"side": side, "depth": depth} if name == "net" else {}
    found = Found({name: files}, {name: config}, keepers)
    place = torch.device(device)
    pipe = Pipeline.from_found(FAMILY, build("base"), found, place, dtype, **more)
    return pipe.components[name]


def watching(store: Any) -> Keepers:
    """Weights are stored by this function."""
    return Keepers((Storing(("net",), store),))


def test_a_weight_is_free_before_the_next_is_read(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def store(layer: nn.Linear, weight: Tensor) -> nn.Linear:
        assert all(one() is None for one in alive)
        alive.append(weakref.ref(weight))
        return nn.Linear(4, 4, bias=False, device="meta")

    loaded(written(tmp_path, deep(4, 3)), sizes=(4, 3), keepers=watching(store))
    assert len(alive) == 3


def test_everything_is_on_the_device_and_frozen(tmp_path: Path) -> None:
    files = written(tmp_path, deep(4, 2))
    network = loaded(files, device="meta", dtype=torch.bfloat16)
    tensors = [*network.parameters(), *network.buffers()]
    assert {str(one.device) for one in tensors} == {"meta"}
    assert not any(one.requires_grad for one in tensors)
    assert not network.training


def preset(folder: Path, **tensors: Tensor) -> LoraFile:
    """A LoRA file with these keys, whose dots are written as two underscores."""
    named = {name.replace("__", "."): one for name, one in tensors.items()}
    save_file(named, folder / "preset.safetensors")
    return LoraFile(folder / "preset.safetensors", alpha="rank")


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_preset_is_merged_in_fp32_before_a_weight_is_stored(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    down, up = noise(1, 2, 4), noise(2, 4, 2)
    file = preset(
        tmp_path, net__layers__1__lora_A__weight=down, net__layers__1__lora_B__weight=up
    )
    stored: list[Tensor] = []

    def store(layer: nn.Linear, weight: Tensor) -> nn.Linear:
        stored.append(weight.clone())
        return nn.Linear(4, 4, bias=False, device="meta")

    module = deep(4, 2)
    files = replace(written(tmp_path, module), preset=file)
    network = loaded(files, dtype=dtype)
    loaded(files, dtype=dtype, keepers=watching(store))
    wanted = [layer.weight.to(dtype) for layer in module.layers]
    wanted[1] = (wanted[1].float() + up @ down).to(dtype)
    for layer, weight, own in zip(network.layers, stored, wanted, strict=True):
        assert torch.equal(layer.weight, own)
        assert torch.equal(weight, own)


def test_a_preset_changes_weights_that_are_one_together(tmp_path: Path) -> None:
    pytest.importorskip("dstrain_formats")  # which reads the difference
    save_file({"embed.weight": torch.ones(4, 2)}, tmp_path / "net.safetensors")
    file = preset(
        tmp_path,
        tied__head__lora_A__weight=torch.ones(1, 2),
        tied__head__lora_B__weight=torch.ones(4, 1),
        tied__embed__diff=torch.ones(4, 2),
    )
    network = loaded(Files((tmp_path / "net.safetensors",), preset=file), "tied")
    assert network.head.weight is network.embed.weight
    assert torch.equal(network.head.weight, torch.full((4, 2), 3.0))


def test_a_network_that_loads_itself_is_kept_afterwards(tmp_path: Path) -> None:
    module = deep(64, 2)
    torch.save(module.state_dict(), tmp_path / "own.pth")
    own = Files((tmp_path / "own.pth",))
    placed = loaded(own, "own", device="meta")
    assert {str(one.device) for one in placed.parameters()} == {"meta"}
    assert placed.layers[2].weight is placed.layers[0].weight
    files = written(tmp_path, module)
    ours = loaded(own, "own", keepers=INT8)
    assert ours.layers[1].weight.dtype == torch.int8
    theirs = loaded(files, sizes=(64, 2), keepers=INT8)
    assert same(*(dict(one.layers[1].state_dict()) for one in (ours, theirs)))


@pytest.mark.parametrize("method", ["size", "bytes", "readable"])
def test_a_keeper_that_raises_is_named_by_its_plugin(method: str) -> None:
    keeper = Keeper()
    keeper.components = ("net",)
    setattr(keeper, method, lambda *_: 1 / 0)
    keepers = Keepers.checked([("plugin bad 1.0", keeper)])
    with pytest.raises(UsageError, match="ZeroDivisionError") as caught:
        keepers.bytes("net", [WeightSize("a", (2,), 8, False, -1)])
        keepers.readable()
    assert caught.value.where == "plugin bad 1.0"


def test_an_empty_network_is_compared_with_its_files(tmp_path: Path) -> None:
    files = written(tmp_path, deep(4, 2))
    network = loaded(files, empty=True)
    assert {str(one.device) for one in network.parameters()} == {"meta"}
    with pytest.raises(StateError, match=r"layers\.2\.weight"):
        loaded(files, sizes=(4, 3), empty=True)


@pytest.mark.parametrize("in_ram", [(), (1, 2), (0, 1, 2)], ids=str)
def test_weights_that_live_in_ram_are_never_put_on_the_device(
    in_ram: tuple[int, ...], tmp_path: Path
) -> None:
    module = deep(4, 3)
    files = written(tmp_path, module)
    keeper = InRam(("net",), *(f"layers.{number}." for number in in_ram))
    network = loaded(files, device="meta", sizes=(4, 3), keepers=Keepers((keeper,)))
    for number, layer in enumerate(network.layers):
        assert layer.weight.is_meta == (number not in in_ram)
        if number in in_ram:
            assert torch.equal(layer.weight, module.layers[number].weight)


@pytest.mark.parametrize("keepers", [AS_LOADED, INT8], ids=["as it is", "int8"])
def test_a_preset_comes_before_quantization(keepers: Keepers, tmp_path: Path) -> None:
    down, up = noise(0, 2, 64), noise(1, 64, 2)
    names = [f"net.layers.0.lora_{letter}.weight" for letter in "AB"]
    file = preset(tmp_path, **dict(zip(names, (down, up), strict=True)))
    module = deep(64, 2)
    files = replace(written(tmp_path, module), preset=replace(file, scale=0.5))
    network = loaded(files, sizes=(64, 2), keepers=keepers)
    with torch.no_grad():
        module.layers[0].weight += 0.5 * (up @ down)
    (tmp_path / "merged").mkdir()
    wanted = written(tmp_path / "merged", module)
    merged = loaded(wanted, sizes=(64, 2), keepers=keepers).state_dict()
    for name, weight in network.state_dict().items():
        torch.testing.assert_close(weight.float(), merged[name].float())
