"""Which layers are stored follows from patterns; each is stored as soon as it is read.
Methods are found by name, and those that cannot be had are refused.
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from dstrain import Pipeline, UsageError, run
from dstrain.graph.keepers import Keepers
from dstrain.models import Found, StoredLinear
from dstrain.plugin import Component, DiffusersNetwork, Files
from dstrain_memory.quantization.keeper import Quantize
from dstrain_memory.quantization.known_methods import METHODS
from dstrain_memory.quantization.stored_layers import StoredComponent, StoredLayers
from safetensors.torch import save_file
from torch import nn

from tests.support.family import MODEL
from tests.support.runs import config

FP8, BLOCKS = METHODS["fp8"], METHODS["int8_block"]
ENDS = ("proj_in", "head")
INNER = ["blocks.0.to_q", "blocks.0.mod", "blocks.1.to_q", "blocks.1.mod"]


class Net(nn.Module):
    """Two blocks between an embedder and a final layer."""

    def __init__(self, bias: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.proj_in = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"to_q": nn.Linear(8, 8, bias), "mod": nn.Linear(8, 16)})
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)
        self.conv = nn.Conv2d(3, 3, 1)
        if tied:
            names = ("blocks.0.to_q.weight", "blocks.1.to_q.weight")
            self.all_tied_weights_keys = MappingProxyType({names[0]: names[1]})

    def tie_weights(self, missing_keys: set[str]) -> None:
        """Nothing: their values differ."""


NETWORK = DiffusersNetwork(f"{__name__}:Net")
COMPONENTS = (Component("dit", NETWORK, "dit", ("head.weight",), as_loaded=ENDS),)
FAMILY = replace(MODEL, components=f"{__name__}:COMPONENTS")


def loaded(
    folder: Path, *entries: StoredLayers, backwards: bool = False, **config: bool
) -> tuple[Net, nn.Module]:
    """A network, and what is loaded from its file."""
    torch.manual_seed(0)
    source = Net(**config).requires_grad_(False)
    state = list(source.state_dict().items())
    path = folder / "net.safetensors"
    save_file(dict(reversed(state) if backwards else state), path)
    stored = StoredComponent(entries, ENDS)
    keepers = Keepers((Quantize({"dit": stored}),) if entries else ())
    found = Found({"dit": Files((path,))}, {"dit": config}, keepers)
    spec: Any = SimpleNamespace(unused_parameters={}, variant="base")
    cpu = torch.device("cpu")
    pipeline = Pipeline.from_found(FAMILY, spec, found, cpu, torch.float32)
    network: nn.Module = pipeline.components["dit"]
    return source, network


def stored(folder: Path, *entries: StoredLayers, **config: bool) -> list[str]:
    _, network = loaded(folder, *entries, **config)
    modules = network.named_modules()
    return [name for name, one in modules if isinstance(one, StoredLinear)]


@pytest.mark.parametrize(
    ("entries", "wanted"),
    [
        ([], []),
        ([StoredLayers(FP8)], INNER),
        ([StoredLayers(FP8, (), ("head",))], INNER),
        ([StoredLayers(FP8), StoredLayers(FP8, ("mod",))], INNER),
        ([StoredLayers(FP8, ("blocks.*.to_q",), ("blocks.1.to_q",))], INNER[:1]),
    ],
)
def test_patterns_choose_layers_but_not_those_that_the_record_leaves(
    entries: list[StoredLayers], wanted: list[str], tmp_path: Path
) -> None:
    assert stored(tmp_path, *entries) == wanted


def test_a_weight_that_is_also_anothers_stays(tmp_path: Path) -> None:
    assert stored(tmp_path, StoredLayers(FP8), tied=True) == INNER[1::2]


def test_a_layer_that_the_record_leaves_cannot_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--fp8_models: .*dit:fp8@head: 'head'"):
        stored(tmp_path, StoredLayers(FP8, ("head",), flag="--fp8_models"))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("backwards", [True, False])
def test_weights_are_stored_in_whatever_order_they_are_read(
    bias: bool, backwards: bool, tmp_path: Path
) -> None:
    entries = StoredLayers(FP8, (), ("mod",)), StoredLayers(BLOCKS, ("mod",))
    source, network = loaded(tmp_path, *entries, backwards=backwards, bias=bias)
    assert not any(one.is_meta for one in network.parameters())
    assert list(network.state_dict()) == list(source.state_dict())
    for name, plain in source.named_modules():
        if not isinstance(plain, nn.Linear):
            continue
        layer: Any = network.get_submodule(name)
        assert isinstance(layer, StoredLinear) == (name not in ENDS)
        weight = layer.restored() if name not in ENDS else layer.weight
        assert torch.allclose(weight, plain.weight, atol=0.02)
        if name not in ENDS:
            # The methods differ in what their scales are of.
            assert layer.stored[1].ndim == 2 + name.endswith("mod")
        assert (layer.bias is None) == (plain.bias is None)
        assert plain.bias is None or torch.equal(layer.bias, plain.bias)


def planned(here: Path, *methods: str, of: str = "dit") -> None:
    options = ";".join(f"{of}:{name}" for name in methods)
    run(config(here, quant_options=options, dry_run=True))


TORCHAO = (
    *("int8_w8a16", "int4_w4a16", "fp8_w8a16", "int8_w8a8", "fp8_w8a8", "int4_w4a8"),
    *("mxfp8_w8a8", "mxfp4_w4a4", "nvfp4_w4a4", "nvfp4_w4a16"),
)
THEIRS = (
    *(f"bitsandbytes_{kind}" for kind in ("nf4", "fp4")),
    *(f"torchao_{kind}" for kind in TORCHAO),
    *(f"comfy_kitchen_{kind}_w8a8" for kind in ("int8", "fp8")),
)
"""The methods of DiffSynth-Studio."""


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", THEIRS)
def test_every_method_of_diffsynth_studio_is_known_or_refused_with_what_to_use(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a package that is not installed is refused, too."""
    if name not in METHODS:
        with pytest.raises(UsageError, match=f"--quant_options: {name} ") as caught:
            planned(here, name)
        assert caught.value.what.rpartition("use ")[2] in METHODS
        return
    planned(here, name)
    package = name.partition("_")[0]
    monkeypatch.setitem(sys.modules, package, None)
    planned(here, "int8_block")
    with pytest.raises(UsageError, match=f"--quant_options: {name} .*{package}") as one:
        planned(here, name)
    assert one.value.help_lines == (f"pip install {package}",)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("NF4", "bitsandbytes_nf4"),
        ("bitsandbytes_fp5", "bitsandbytes_fp4"),
        ("int8", "int8_block"),
    ],
)
def test_an_unknown_method_is_refused_with_the_nearest(
    typed: str, meant: str, here: Path
) -> None:
    with pytest.raises(UsageError, match=f"'{typed}'.*'{meant}'") as caught:
        planned(here, typed)
    assert ", ".join(METHODS) in caught.value.help_lines[0]
