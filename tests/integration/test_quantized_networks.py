"""Networks with quantized weights take presets, LoRA files and the options of a run as
others do, and are never whole in memory while they are loaded.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dstrain.config.options.generate import GenerateConfig
from dstrain.config.serialize import with_run_options
from dstrain.generation.source import open_source
from dstrain.graph.storing import QuantizationMethod
from dstrain.models.components import Component, Files
from dstrain.models.kept import Kept, StoredLayers
from dstrain.models.networks import DiffusersNetwork
from dstrain.models.quantization.linear import StoredLinear
from dstrain.models.quantization.methods import FP8, METHODS
from dstrain.pipeline.loading import Loader
from dstrain.pipeline.pipeline import Pipeline
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.family import MODEL
from tests.support.runs import config, project, same, train, training_run

pytestmark = pytest.mark.usefixtures("tiny")
LAYER = "blocks.0.to_out"


@pytest.fixture(scope="module")
def here(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def trained(here: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on quantized weights whose LoRA is far from zero."""
    output = tmp_path_factory.mktemp("trained") / "out"
    flags = {"quant_options": "dit:fp8;text_encoder:int8_block"}
    return train(here, output_path=output, max_steps=2, learning_rate=0.3, **flags)


def lora_of(run: Path) -> Path:
    (path,) = run.glob("*.safetensors")
    return path


def base_layer(pipeline: Pipeline) -> Any:
    layer = pipeline.components["dit"].get_submodule(LAYER)
    return getattr(layer, "base_layer", layer)


def test_a_preset_is_merged_before_weights_are_stored(
    here: Path, trained: Path
) -> None:
    path = lora_of(trained)
    preset = {"preset_lora_path": path}
    merged = training_run(config(here, **preset)).module.pipeline
    quantized = training_run(config(here, fp8_models="dit", **preset)).module.pipeline
    weight = base_layer(merged).weight.detach()
    want = FP8.store(nn.Linear(8, 8), weight)
    got = base_layer(quantized)
    assert isinstance(got, StoredLinear) and isinstance(want, StoredLinear)
    assert torch.equal(got.restored(), want.restored())
    plain = training_run(config(here)).module.pipeline
    assert not torch.equal(base_layer(plain).weight, weight)


@pytest.mark.parametrize("method", [None, *METHODS])
def test_a_lora_fits_networks_however_they_are_stored(
    method: str | None, here: Path, trained: Path
) -> None:
    options = None if method is None else f"dit:{method}"
    for flag in ("resume_from_checkpoint", "lora_checkpoint"):
        given = config(here, quant_options=options, **{flag: lora_of(trained)})
        run = training_run(given)
        saved = load_file(lora_of(trained))
        for name, parameter in run.module.trained.parameters.items():
            key = name.replace("dit.", "transformer.", 1).replace(".default", "")
            assert torch.equal(parameter, saved[key]), name


def test_generate_takes_the_runs_methods_and_other_ones(
    here: Path, trained: Path
) -> None:
    base = {"model": "tiny", "output": Path("x.png"), "run": trained, "prompt": "dog"}
    images = []
    for flags in ({}, {"quant_options": "dit:bitsandbytes_nf4"}):
        given = with_run_options(GenerateConfig(**{**base, **flags}))
        with open_source(given) as source:
            pipeline = source.load()
        assert isinstance(base_layer(pipeline), StoredLinear)
        layer = pipeline.components["text_encoder"].layer
        assert isinstance(layer, StoredLinear) == (not flags)
        images.append(pipeline(prompt="dog", num_inference_steps=2).tobytes())
    assert images[0] != images[1]


def test_a_damaged_weight_is_found_in_what_it_is_stored_as(here: Path) -> None:
    run = training_run(config(here, fp8_models="dit"))
    pipeline = run.module.pipeline
    assert pipeline.damaged(["dit"]) == []
    base_layer(pipeline).scale_0[3] = torch.nan
    (found,) = pipeline.damaged(["dit"])
    assert f"{LAYER}.base_layer.scale_0" in found


class Deep(nn.Module):
    """Layers of 4 MiB each."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, False) for _ in range(depth))


def anonymous_mib() -> float:
    """What this process holds in memory of its own."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.parametrize("method", ["fp8", "bitsandbytes_nf4"])
def test_a_network_is_never_whole_in_memory_while_it_is_quantized(
    method: str, tmp_path: Path
) -> None:
    whole, seen = 64 * 4, []
    known = METHODS[method]

    def store(layer: nn.Linear, weight: torch.Tensor) -> nn.Linear:
        stored = known.store(layer, weight)
        seen.append(anonymous_mib())
        return stored

    watched = QuantizationMethod("watched", store, known.stored_bytes)
    component = Component("net", DiffusersNetwork(f"{__name__}:Deep"), "net", ("*",))

    def load(depth: int) -> Any:
        path = tmp_path / f"{depth}.safetensors"
        layer = torch.randn(1024, 1024) * 0.02
        save_file({f"layers.{n}.weight": layer.clone() for n in range(depth)}, path)
        files = Files((path,), kept=Kept((StoredLayers(watched),)))
        before = anonymous_mib()
        loader = Loader(MODEL, component, files, torch.device("cpu"))
        network = loader.load(SimpleNamespace(depth=depth), torch.float32)
        return network, before

    load(2)  # what loading imports is no weight
    seen.clear()
    network, before = load(64)
    assert len(seen) == 64
    stored = 64 * known.stored_bytes((1024, 1024)) / 2**20
    # The allocator keeps a few freed weights, and one is in work in fp32.
    assert max(seen) - before < stored + 12 * 4 < whole / 2
    assert same([*network.state_dict()], [f"layers.{n}.weight" for n in range(64)])
