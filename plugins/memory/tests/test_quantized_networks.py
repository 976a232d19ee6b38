"""Networks with quantized weights take presets, LoRA files and the options of a run as
others do, and are never whole in memory while they are loaded.
"""

import re
import weakref
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dstrain import GenerateConfig, Pipeline
from dstrain.cli.main import main
from dstrain.config import with_run_options
from dstrain.generation.pipeline_source import open_source
from dstrain.graph.keepers import Keepers
from dstrain.models import StoredLinear, components_of
from dstrain.pipeline.loading import Loader
from dstrain.plugin import Component, DiffusersNetwork, Files
from dstrain.registry import load_family
from dstrain_memory.quantization.keeper import Quantize
from dstrain_memory.quantization.known_methods import FP8, METHODS
from dstrain_memory.quantization.method import QuantizationMethod
from dstrain_memory.quantization.stored_layers import StoredComponent, StoredLayers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.family import MODEL
from tests.support.runs import config, same, train, training_run
from tests.support.toys import opened

pytestmark = pytest.mark.usefixtures("tiny")
LAYER = "blocks.0.to_out"


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


IN_BLOCKS = (
    ("flux dev dit", "blocks."),
    ("flux2 dev dit", "blocks.|_stream_modulation"),
    ("qwen_image base dit", "blocks."),
    ("sdxl base unet", "blocks?."),
    ("wan fun-camera dit", "blocks."),
    ("z_image omni dit", "(^layers|_refiner)."),
    ("z_image controlnet-union controlnet", "control_(layers|noise_refiner)."),
)
"""A component, and what the names of the layers of its blocks match."""


@pytest.mark.parametrize(("what", "in_blocks"), IN_BLOCKS)
def test_layers_that_are_not_in_blocks_are_not_quantized(
    what: str, in_blocks: str
) -> None:
    family, variant, name = what.split()
    patterns = components_of(load_family(family))[name].as_loaded
    for layer, module in opened(family, variant).components[name].named_modules():
        if isinstance(module, nn.Linear):
            is_kept = any(fnmatchcase(layer, one) for one in patterns)
            assert is_kept != bool(re.search(in_blocks, layer)), layer


@pytest.mark.parametrize(
    ("family", "variant", "image"),
    [("z_image", "omni", "edit_image"), ("flux", "redux", "flux_redux_image")],
)
def test_an_image_encoder_is_quantized(
    family: str, variant: str, image: str, tmp_path: Path
) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "cat.png")
    words = f"generate --model {family} --variant {variant} --toy --prompt cat"
    words += f" --height 32 --width 32 --num_inference_steps 1 --input {image}={tmp_path}/cat.png"
    words += f" --quant_options image_encoder:int8_block --output {tmp_path}/out.png"
    assert main(words.split()) == 0


class Deep(nn.Module):
    """Layers of the same size."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, False) for _ in range(depth))


@pytest.mark.parametrize("method", METHODS)
def test_a_network_is_never_whole_in_memory_while_it_is_quantized(
    method: str, tmp_path: Path
) -> None:
    known = METHODS[method]
    given: list[weakref.ref[Tensor]] = []

    def store(layer: nn.Linear, weight: Tensor) -> nn.Linear:
        # Those before it are gone.
        assert layer.weight.is_meta and all(one() is None for one in given)
        given.append(weakref.ref(weight))
        return known.store(layer, weight)

    path = tmp_path / "net.safetensors"
    weights = {f"layers.{n}.weight": torch.randn(64, 64) for n in range(5)}
    save_file(weights, path)
    watched = QuantizationMethod("watched", store, known.stored_bytes)
    keepers = Keepers((Quantize({"net": StoredComponent((StoredLayers(watched),))}),))
    component = Component("net", DiffusersNetwork(f"{__name__}:Deep"), "net", ("*",))
    cpu = torch.device("cpu")
    loader = Loader(MODEL, component, Files((path,)), cpu, keepers=keepers)
    network = loader.load(SimpleNamespace(depth=5), torch.float32)
    assert len(given) == 5 and all(one() is None for one in given)
    assert same([*network.state_dict()], [*weights])
    # Of no stored tensor the memory is that of a larger one.
    kept = [*network.parameters(), *network.buffers()]
    pieces = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept
    }
    assert sum(pieces.values()) <= 5 * known.stored_bytes((64, 64))
