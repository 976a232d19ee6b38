"""What a run promises, it promises for LoRA of every type: the split, resuming, starting
from a file, and a file that acts as what was trained.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from dstrain import SampleKey, StateError, UsageError
from dstrain.cli.main import main
from dstrain.config import LoraFile
from dstrain.lora import base_shapes, read_lora
from dstrain.runs.checkpoints.directory import states
from dstrain.runs.checkpoints.state import load_state
from dstrain.runs.resolve import resolve
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.support.family import MODEL
from tests.support.lora_family import merge_layers
from tests.support.runs import (
    PowerCut,
    config,
    files,
    opened,
    outcome,
    same,
    stop_at,
    train,
    train_in_two_stages,
    training_run,
)

pytestmark = pytest.mark.usefixtures("tiny")

Flags = Mapping[str, Any]
TYPES: Mapping[str, Flags] = MappingProxyType(
    {
        "ranks": {"lora_rank": "3,to_out=2", "lora_alpha": "blocks.1=4"},
        "dropout": {"lora_dropout": 0.3},
        "dora": {"lora_type": "dora", "lora_alpha": 3.0},
        "dora of ranks with dropout": {
            "lora_type": "dora",
            "lora_rank": "3,to_out=2",
            "lora_dropout": 0.3,
        },
        "lokr": {"lora_type": "lokr", "lora_rank": 1, "lora_alpha": 2.0},
        "lokr of factor 4": {
            "lora_type": "lokr",
            "lokr_factor": 4,
            "lora_rank": "2,to_out=1",
            "lora_alpha": 3.0,
        },
        "lokr with products in some layers": {
            "lora_type": "lokr",
            "lokr_factor": 2,
            "lora_rank": "4,to_out=1",
            "lora_alpha": 3.0,
        },
        "loha": {"lora_type": "loha", "lora_rank": "3,to_out=2", "lora_alpha": 2.0},
        "oft": {"lora_type": "oft", "lora_rank": 4},
    }
)
PROGRAMS = ("diffusers", "comfyui", "kohya")
ON_ENCODER: Flags = MappingProxyType(
    {"lora_base_model": "text_encoder", "lora_target_modules": "layer"}
)
of_each_type = pytest.mark.parametrize("name", TYPES)
in_each_programs_names = pytest.mark.parametrize(
    ("name", "program"),
    [
        *((name, one) for name in TYPES if name != "oft" for one in PROGRAMS),
        ("oft", "diffusers"),
    ],
)


@pytest.fixture(scope="module")
def trained(here: Path) -> Callable[[str], Path]:
    """Return a function from a type to what a run of three steps leaves, which is made
    once for all tests that only read it.
    """
    made: dict[str, Path] = {}

    def output(name: str) -> Path:
        if name not in made:
            place = here / f"trained {name}"
            made[name] = train(here, output_path=place, **steps_of(name))
        return made[name]

    return output


def steps_of(name: str) -> dict[str, Any]:
    """Flags of a run whose layers change much."""
    return {**TYPES[name], "learning_rate": 0.1, "max_steps": 3}


def exported(output: Path, program: str, file: Path) -> Path:
    weights = str(output / "step-3.safetensors")
    assert main(["export", "--format", program, weights, str(file)]) == 0
    return file


def trained_weights(output: Path) -> dict[str, Tensor]:
    """The layers as the newest state has them."""
    return load_state(states(output)[0]).trainable


def resumed(here: Path, output: Path, given: Flags) -> Any:
    """The pipeline of a run with the weights of its newest state."""
    module = training_run(config(here, **given)).module.eval()
    parameters = module.trained.parameters
    with torch.no_grad():
        for name, value in trained_weights(output).items():
            parameters[name].copy_(value)
    return module.pipeline


def merged(here: Path, *paths: Path) -> Any:
    """A pipeline with files merged into its weights."""
    pipeline = opened(here / "model")
    dit = pipeline.components["dit"]
    for path in paths:
        (lora,) = read_lora(LoraFile(path), MODEL, {"dit": base_shapes(dit)})
        merge_layers(dit, lora.layers)
    return pipeline


@torch.no_grad()
def prediction(pipeline: Any) -> Tensor:
    """What a denoiser makes of the same noise."""
    draw = torch.Generator().manual_seed(5)
    dit = pipeline.components["dit"].eval()
    noise = torch.randn(1, 4, 2, 3, generator=draw)
    text = torch.randn(1, 5, 8, generator=draw)
    mask = torch.ones(1, 5, dtype=torch.bool)
    found: Tensor = dit(noise, torch.tensor([300.0]), text, mask)
    return found


@pytest.mark.parametrize("place", ["dit", "text_encoder"])
@of_each_type
def test_a_run_in_two_stages_is_the_one_that_is_not_split(
    name: str, place: str, here: Path, tmp_path: Path
) -> None:
    given = {**TYPES[name], "max_steps": 4, "batch_size": 2}
    if place == "text_encoder":
        given |= ON_ENCODER
        if "=" in str(given.get("lora_rank")):
            given |= {"lora_rank": "2,layer=3", "lora_alpha": "layer=4"}
    whole = train(here, output_path=tmp_path / "whole", **given)
    split = train_in_two_stages(here, tmp_path, **given)
    assert same(outcome(whole), outcome(split))


@of_each_type
def test_a_resumed_run_is_the_one_that_did_not_stop(
    name: str, here: Path, tmp_path: Path
) -> None:
    given = {**TYPES[name], "max_steps": 4, "save_steps": 2, "ema_decay": 0.9}
    train(here, output_path=tmp_path / "whole", **given)
    with pytest.raises(PowerCut):
        train(here, stop_at(3), output_path=tmp_path / "cut", **given)
    train(here, output_path=tmp_path / "cut", resume="auto", **given)
    assert same(outcome(tmp_path / "whole"), outcome(tmp_path / "cut"))


@pytest.mark.parametrize(
    "saving",
    [
        {"use_gradient_checkpointing": True},
        {"use_gradient_checkpointing_offload": True},
        {"blocks_to_swap": 2},
    ],
    ids=" ".join,
)
@of_each_type
def test_saving_memory_changes_no_bit(
    name: str, saving: Flags, here: Path, trained: Callable[[str], Path], tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, **steps_of(name), **saving)
    assert same(files(trained(name)), files(tmp_path))


@in_each_programs_names
def test_training_goes_on_from_a_file_in_any_programs_names(
    name: str, program: str, here: Path, trained: Callable[[str], Path], tmp_path: Path
) -> None:
    file = exported(trained(name), program, tmp_path / "file.safetensors")
    more = {"learning_rate": 1e-30, "lora_checkpoint": file, "max_steps": 1}
    again = train(here, output_path=tmp_path / "more", **TYPES[name], **more)
    first, second = trained_weights(trained(name)), trained_weights(again)
    assert first.keys() == second.keys()
    for layer, value in first.items():
        assert torch.allclose(second[layer], value, rtol=1.2e-7, atol=0), layer


@in_each_programs_names
def test_what_is_saved_acts_as_what_was_trained(
    name: str, program: str, here: Path, trained: Callable[[str], Path], tmp_path: Path
) -> None:
    """As layers, merged into the weights, and in another program's names."""
    file = exported(trained(name), program, tmp_path / "file.safetensors")
    wanted = prediction(resumed(here, trained(name), steps_of(name)))
    plain = opened(here / "model")
    assert not torch.allclose(prediction(plain), wanted, atol=1e-2)
    plain.load_lora(file)
    assert torch.allclose(prediction(plain), wanted, atol=1e-6)
    assert torch.allclose(prediction(merged(here, file)), wanted, atol=1e-5)


@pytest.mark.parametrize("strength", [0.0, 0.4, 1.5])
@of_each_type
def test_strength_scales_the_change_of_the_weights(
    name: str, strength: float, here: Path, trained: Callable[[str], Path]
) -> None:
    """As ComfyUI has it: what DoRA changes in the lengths, too."""
    file = trained(name) / "step-3.safetensors"
    added = opened(here / "model")
    before = added.components["dit"].state_dict()
    before = {layer: weight.clone() for layer, weight in before.items()}
    added.load_lora(file, strength)
    scaled = merged(here, file)
    with torch.no_grad():
        for layer, weight in scaled.components["dit"].named_parameters():
            weight.copy_(before[layer] + strength * (weight - before[layer]))
    assert torch.allclose(prediction(added), prediction(scaled), atol=1e-5)


def test_dora_scale_is_what_rows_of_length_1_are_multiplied_with(
    here: Path, tmp_path: Path
) -> None:
    """So LyCORIS, whose name it is, computes (`apply_weight_decompose`, output axis)."""
    given = steps_of("dora")
    output = train(here, output_path=tmp_path / "out", lora_format="comfyui", **given)
    tensors = load_file(output / "step-3.safetensors")
    theirs = opened(here / "model")
    with torch.no_grad():
        for name, weight in theirs.components["dit"].named_parameters():
            key = f"diffusion_model.{name.removesuffix('.weight')}"
            if f"{key}.dora_scale" not in tensors:
                continue
            up = tensors[f"{key}.lora_up.weight"]
            down = tensors[f"{key}.lora_down.weight"]
            total = weight + up @ down * tensors[f"{key}.alpha"] / len(down)
            length = total.norm(dim=1, keepdim=True)
            weight.copy_(total * tensors[f"{key}.dora_scale"] / length)
    wanted = prediction(resumed(here, output, given))
    assert torch.allclose(prediction(theirs), wanted, atol=1e-5)


def test_dora_is_not_added_above_another_lora_but_below_it(
    here: Path, tmp_path: Path, trained: Callable[[str], Path]
) -> None:
    given = {"learning_rate": 0.1, "max_steps": 2}
    lora = train(here, output_path=tmp_path / "lora", **given) / "step-2.safetensors"
    dora = trained("dora") / "step-3.safetensors"
    pipeline = opened(here / "model")
    pipeline.load_lora(lora)
    with pytest.raises(UsageError, match=r"4 layers .* dora"):
        pipeline.load_lora(dora)
    both = opened(here / "model")
    both.load_lora(dora)
    both.load_lora(lora)
    wanted = prediction(merged(here, dora, lora))
    assert torch.allclose(prediction(both), wanted, atol=1e-5)


@pytest.mark.parametrize(("before", "given"), [("dora", "lora"), ("lora", "dora")])
def test_another_type_than_that_of_the_file_is_refused(
    before: str, given: str, here: Path, tmp_path: Path
) -> None:
    output = train(here, output_path=tmp_path / "1", lora_type=before, max_steps=1)
    file = output / "step-1.safetensors"
    with pytest.raises(StateError, match=f"--lora_type {before}"):
        train(here, output_path=tmp_path / "2", lora_type=given, lora_checkpoint=file)
    with pytest.raises(StateError, match="another dataset: lora_type"):
        train(here, output_path=tmp_path / "1", lora_type=given, resume="auto")


def test_dropout_acts_in_training_alone(here: Path) -> None:
    module = training_run(config(here, lora_dropout=0.5, **ON_ENCODER)).module
    with torch.no_grad():
        for parameter in module.trained_parameters:
            parameter.fill_(0.3)
    layer: Any = module.pipeline.components["text_encoder"].get_submodule("layer")
    x = torch.ones(1, 3, 8)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("lora_type", ["lora", "dora"])
def test_dropout_of_a_live_unit_does_not_depend_on_the_batch(
    lora_type: str, here: Path
) -> None:
    given = {"lora_dropout": 0.5, "lora_type": lora_type, **ON_ENCODER}
    ready = training_run(config(here, **given))
    module = ready.module
    with torch.no_grad():
        for name, parameter in module.trained.parameters.items():
            if "lora_B" in name:
                parameter.fill_(0.3)
    samples = [ready.data.source.sample(row) for row in (0, 2, 4)]
    keys = [SampleKey(0, 0, 0, row) for row in (0, 2, 4)]
    together = module.losses(samples, keys)
    pairs = zip(samples, keys, strict=True)
    alone = torch.cat([module.losses([one], [key]) for one, key in pairs])
    assert (together - alone).abs().max() <= 1e-6
    others = module.losses(samples, [one._replace(repeat=1) for one in keys])
    assert not torch.equal(together, others)


def test_the_header_says_what_was_trained(here: Path, tmp_path: Path) -> None:
    heads = {}
    for name in ("plain", "dropout", "dora", "ranks"):
        flags = TYPES.get(name, {})
        output = train(here, output_path=tmp_path / name, max_steps=1, **flags)
        with safe_open(output / "step-1.safetensors", "pt") as file:
            heads[name] = file.metadata()
    assert not {"type", "dropout", "ranks", "alphas"} & heads["plain"].keys()
    assert heads["dropout"]["dropout"] == "0.3"
    assert heads["dora"]["type"] == "dora"
    assert heads["ranks"]["rank"] == "3"
    assert heads["ranks"]["ranks"] == '{"blocks.0.to_out": 2, "blocks.1.to_out": 2}'
    assert '"blocks.1.to_q": 4.0' in heads["ranks"]["alphas"]


@pytest.mark.parametrize(
    ("option", "flags"),
    [
        ("--lora_rank: 'to_k'", {"lora_rank": "to_k=4"}),
        ("--lora_alpha: 'to_q'", {"lora_alpha": "to_q=4,blocks=2"}),
        ("dora", {"lora_type": "dora", "lora_format": "diffsynth"}),
        ("lokr", {"lora_type": "lokr", "lora_format": "diffsynth"}),
        ("--lora_dropout", {"lora_type": "lokr", "lora_dropout": 0.1}),
        ("--lokr_factor", {"lokr_factor": 4}),
        ("--lora_type: .*--fp8_models", {"lora_type": "lokr", "fp8_models": "dit"}),
        ("--lora_dropout", {"lora_type": "oft", "lora_dropout": 0.1}),
        ("--lora_alpha", {"lora_type": "oft", "lora_alpha": 9}),
        ("--lora_rank: .*divide", {"lora_type": "oft", "lora_rank": 7}),
        ("--lora_rank", {"lora_rank": "to_q=0"}),
        ("--lora_dropout", {"lora_dropout": 1.0}),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_trained(
    option: str, flags: Flags, here: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=option):
        train(here, output_path=tmp_path / "out", **flags)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_lokr_goes_with_layers_of_which_others_are_quantized(
    here: Path, tmp_path: Path
) -> None:
    flags = {"lora_type": "lokr", "quant_options": "dit:int8_block/to_q"}
    resolve(config(here, output_path=tmp_path, **flags))
