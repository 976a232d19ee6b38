"""Components are loaded weight by weight: no second one is in RAM beside that which is
read, and a weight is merged before it is stored.
"""

import ctypes
import gc
import subprocess
import sys
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from dstrain import StateError
from dstrain.config import LoraFile
from dstrain.lora import Lora, merge_layers
from dstrain.lora.foreign.products import MergedLayer
from dstrain.lora.layers import LoraLayer
from dstrain.models import METHODS
from dstrain.models.execution import ALL_BLOCKS, AS_LOADED, Kept, StoredLayers
from dstrain.models.networks import keep, load_network
from dstrain.pipeline import loading
from dstrain.pipeline.loading import Loader
from dstrain.plugin import Component, DiffusersNetwork, Files, ModelFamily
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.loading_in_nf4 import anonymous_mib
from tests.support.runs import same

CPU = torch.device("cpu")
RECORD = ModelFamily(
    "fam", "", "", "", ("base",), "net", MappingProxyType({}), MappingProxyType({})
)
SIDE = 1 << 10
SIZE_MIB = SIDE * SIDE * 4 / 2**20


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


def component(network: Any) -> Component:
    return Component("net", network, "net", ("*.weight",))


def written(folder: Path, module: nn.Module) -> Files:
    path = folder / "net.safetensors"
    save_file({name: one.clone() for name, one in module.state_dict().items()}, path)
    return Files((path,))


def deep(folder: Path, side: int, depth: int) -> tuple[Files, Any]:
    torch.manual_seed(0)
    configuration = SimpleNamespace(side=side, depth=depth)
    return written(folder, Deep(side, depth)), configuration


NETWORK = DiffusersNetwork(f"{__name__}:Deep")


def anonymous_mib_at_rest() -> float:
    """The same, when the allocator has given back what was freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return anonymous_mib()


def test_only_the_weight_that_is_read_is_in_memory(tmp_path: Path) -> None:
    files, configuration = deep(tmp_path, 4, 1)  # what loading imports is no weight
    Loader(RECORD, component(NETWORK), files, CPU).load(configuration, torch.float32)
    files, configuration = deep(tmp_path, SIDE, 32)
    seen: list[float] = []

    def store(network: nn.Module, name: str, weight: Tensor) -> Tensor:
        seen.append(anonymous_mib())
        return weight.to("meta")  # as on a GPU: nothing of it is left here

    before = anonymous_mib_at_rest()
    Loader(RECORD, component(NETWORK), files, CPU, store=store).load(
        configuration, torch.float32
    )
    assert len(seen) == 32
    # The allocator keeps a few freed weights, however many there are.
    assert max(seen) - before < 8 * SIZE_MIB


@pytest.mark.drawn  # at full size, what the tests beside it show of small weights
def test_a_gib_in_nf4_is_loaded_with_half_a_gib_of_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.loading_in_nf4", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for path in tmp_path.iterdir():
        path.unlink()
    packed_mib = 1024 * 4.5 / 16
    assert packed_mib < float(done.stdout) < 512


def test_a_weight_is_free_before_the_next_is_read(tmp_path: Path) -> None:
    files, configuration = deep(tmp_path, 4, 3)
    alive: list[weakref.ref[Tensor]] = []

    def store(network: nn.Module, name: str, weight: Tensor) -> Tensor:
        assert all(one() is None for one in alive)
        alive.append(weakref.ref(weight))
        return torch.empty_like(weight, device="meta")

    Loader(RECORD, component(NETWORK), files, CPU, store=store).load(
        configuration, torch.float32
    )
    assert len(alive) == 3


def test_everything_is_on_the_device_and_frozen(tmp_path: Path) -> None:
    files, configuration = deep(tmp_path, 4, 2)
    network = Loader(RECORD, component(NETWORK), files, torch.device("meta")).load(
        configuration, torch.bfloat16
    )
    tensors = [*network.parameters(), *network.buffers()]
    assert {str(one.device) for one in tensors} == {"meta"}
    assert not any(one.requires_grad for one in tensors)
    assert not network.training


LAYERS: Mapping[str, LoraLayer] = MappingProxyType(
    {
        "layers.1": LoraLayer(
            torch.randn(2, 4, generator=torch.Generator().manual_seed(1)),
            torch.randn(4, 2, generator=torch.Generator().manual_seed(2)),
            3.0,
        )
    }
)


def given(monkeypatch: pytest.MonkeyPatch, layers: Mapping[str, LoraLayer]) -> None:
    """Let a preset file have these layers."""
    lora = Lora("net", layers, {})
    monkeypatch.setattr(loading, "read_lora", lambda *_, **__: [lora])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_preset_is_merged_before_a_weight_is_stored(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, configuration = deep(tmp_path, 4, 2)
    given(monkeypatch, LAYERS)
    files = Files(files.paths, preset=LoraFile(tmp_path / "preset.safetensors"))
    merged = load_network(lambda: Deep(4, 2), files, dtype)
    merge_layers(merged, LAYERS)
    stored: dict[str, Tensor] = {}

    def store(network: nn.Module, name: str, weight: Tensor) -> Tensor:
        stored[name] = weight.clone()
        return keep(network, name, weight)

    network = Loader(RECORD, component(NETWORK), files, CPU, store=store).load(
        configuration, dtype
    )
    for name, weight in merged.state_dict().items():
        assert torch.equal(stored[name], weight)
        assert torch.equal(network.state_dict()[name], weight)


@pytest.mark.parametrize("method", [None, "int8_block"])
def test_differences_and_layers_of_a_preset_are_scaled_and_come_before_quantization(
    method: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = written(tmp_path, Deep(64, 2))
    difference = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    loha = MergedLayer("LoHa", lambda: 2 * difference)
    lora = Lora("net", {}, {}, {"layers.0": loha}, {"layers.1.weight": difference})
    monkeypatch.setattr(loading, "read_lora", lambda *_, **__: [lora])
    kept = Kept((StoredLayers(METHODS[method]),)) if method else AS_LOADED
    preset = LoraFile(tmp_path / "preset.safetensors", 0.5)
    files = replace(files, kept=kept)
    configuration = SimpleNamespace(side=64, depth=2)
    loader = Loader(RECORD, component(NETWORK), replace(files, preset=preset), CPU)
    network = loader.load(configuration, torch.float32)
    wanted = load_network(lambda: Deep(64, 2), files, torch.float32)
    with torch.no_grad():
        wanted.layers[0].weight += difference
        wanted.layers[1].weight += 0.5 * difference
    if method:
        (tmp_path / "merged").mkdir()
        merged = replace(written(tmp_path / "merged", wanted), kept=kept)
        wanted = Loader(RECORD, component(NETWORK), merged, CPU).load(
            configuration, torch.float32
        )
    for name, weight in wanted.state_dict().items():
        assert torch.allclose(
            network.state_dict()[name].float(), weight.float(), atol=1e-6
        )


def test_a_preset_changes_weights_that_are_one_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"embed.weight": torch.ones(4, 2)}, tmp_path / "net.safetensors")
    layer = LoraLayer(torch.ones(1, 2), torch.ones(4, 1), 1.0)
    given(monkeypatch, {"head": layer})
    files = Files(
        (tmp_path / "net.safetensors",),
        preset=LoraFile(tmp_path / "preset.safetensors"),
    )
    tied = component(DiffusersNetwork(f"{__name__}:Tied"))
    network = Loader(RECORD, tied, files, CPU).load(SimpleNamespace(), torch.float32)
    assert network.head.weight is network.embed.weight
    assert torch.equal(network.head.weight, torch.full((4, 2), 2.0))


def test_a_network_that_loads_itself_is_placed_afterwards(tmp_path: Path) -> None:
    def load(files: Files, configuration: Any, dtype: torch.dtype) -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module[1].weight = module[0].weight
        return module.to(dtype)

    stored = []

    def store(network: nn.Module, name: str, weight: Tensor) -> Tensor:
        stored.append(name)
        return weight * 0

    files = Files((tmp_path / "any",))
    network = Loader(
        RECORD, component(SimpleNamespace(load=load)), files, CPU, store=store
    ).load(None, torch.float32)
    assert stored == ["0.weight", "0.bias", "1.bias"]
    assert network[1].weight is network[0].weight
    assert not network[0].weight.any()


def test_a_network_whose_load_takes_no_place_is_quantized_afterwards(
    tmp_path: Path,
) -> None:
    class Own:
        """As plugins wrote them before `load` had a place."""

        def build(self, configuration: Any) -> nn.Module:
            return Deep(64, 2)

        def load(self, files: Files, configuration: Any, dtype: torch.dtype) -> Any:
            return load_network(lambda: Deep(64, 2), files, dtype)

    files = written(tmp_path, Deep(64, 2))
    stored = StoredLayers(METHODS["int8_block"])
    files = replace(files, kept=Kept((stored,)))
    configuration = SimpleNamespace(side=64, depth=2)
    found = [
        Loader(RECORD, component(one), files, CPU).load(configuration, torch.float32)
        for one in (Own(), NETWORK)
    ]
    assert found[0].layers[1].weight.dtype == torch.int8
    assert same(*(dict(network.state_dict()) for network in found))


class Halves:
    """The first half of the rows of each weight."""

    def __init__(self) -> None:
        self.whole: list[str] = []
        self.taken: dict[str, Tensor] = {}

    def rows(self, network: nn.Module, name: str) -> slice | None:
        return slice(0, len(network.get_parameter(name)) // 2)

    def keep_rows(self, network: nn.Module, name: str, stored: Tensor) -> Tensor:
        self.whole.append(name)
        return stored

    def take_rows(self, network: nn.Module, name: str, rows: Tensor) -> Tensor:
        self.taken[name] = rows
        return rows


@pytest.mark.parametrize("form", ["safetensors", "pth"])
def test_rows_are_read_where_nothing_needs_the_whole(tmp_path: Path, form: str) -> None:
    module = Deep(4, 2)
    path = tmp_path / f"net.{form}"
    tensors = {name: one.clone() for name, one in module.state_dict().items()}
    save_file(tensors, path) if form == "safetensors" else torch.save(tensors, path)
    configuration = SimpleNamespace(side=4, depth=2)
    part = Halves()
    files = Files((path,))
    Loader(RECORD, component(NETWORK), files, CPU, part=part).load(
        configuration, torch.bfloat16
    )
    assert part.whole == []
    for name, weight in module.state_dict().items():
        assert same(part.taken[name], weight[:2].bfloat16())
    part = Halves()
    files = replace(files, kept=Kept((StoredLayers(METHODS["int8_block"]),)))
    Loader(RECORD, component(NETWORK), files, CPU, part=part).load(
        configuration, torch.bfloat16
    )
    assert len(part.whole) == 2
    assert part.taken == {}


def test_an_empty_network_is_compared_with_its_files_and_reads_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, _ = deep(tmp_path, 4, 2)
    monkeypatch.setattr("dstrain.models.weight_files._reader", None)
    loader = Loader(RECORD, component(NETWORK), files, CPU)
    network = loader.build_empty({"side": 4, "depth": 2})
    assert network is not None
    assert {str(one.device) for one in network.parameters()} == {"meta"}
    with pytest.raises(StateError, match=r"1 missing: layers\.2\.weight"):
        loader.build_empty({"side": 4, "depth": 3})


META = torch.device("meta")


@pytest.mark.parametrize(
    ("kept", "in_ram"),
    [
        (Kept(), []),
        (Kept(swapped_blocks=2), [1, 2]),
        (Kept(swapped_blocks=ALL_BLOCKS), [0, 1, 2]),
        (Kept(offloaded=True), [0, 1, 2]),
    ],
    ids=str,
)
def test_weights_that_live_in_ram_are_never_put_on_the_device(
    kept: Kept, in_ram: list[int], tmp_path: Path
) -> None:
    files, configuration = deep(tmp_path, 4, 3)
    files = Files(files.paths, kept=kept)
    network = Loader(RECORD, component(NETWORK), files, META).load(
        configuration, torch.float32
    )
    wanted = load_network(lambda: Deep(4, 3), files, torch.float32)
    for number, layer in enumerate(network.layers):
        assert layer.weight.is_meta == (number not in in_ram)
        if number in in_ram:
            assert torch.equal(layer.weight, wanted.layers[number].weight)
