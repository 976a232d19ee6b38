"""Runs save and start from LoRA files of other programs and types."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from dstrain import LoraConfig, StateError, UsageError, WeightsLogger
from dstrain.cli.main import main
from dstrain.lora import inject, load_layers, lora_layers

from tests.support.lora_family import network, output, trained
from tests.support.runs import config, files, same, train, training_run

pytestmark = pytest.mark.usefixtures("tiny")
PREFIX = MappingProxyType({"remove_prefix_in_ckpt": "pipe.dit."})
LORA = LoraConfig("dit", ("to_q", "to_out.0"), 2, 3.0)
DORA, LOKR = replace(LORA, type="dora"), replace(LORA, type="lokr", rank=1)
PATH = Path("x.safetensors")


@pytest.mark.parametrize(
    ("flags", "first"),
    [
        ({}, "transformer.blocks.0."),
        (PREFIX, "blocks.0."),
        ({"remove_prefix_in_ckpt": "anything"}, "blocks.0."),
        ({"lora_format": "diffsynth"}, "blocks.0."),
        ({"lora_format": "reference"}, "blocks.0."),
        ({"lora_format": "comfyui"}, "diffusion_model.blocks.0."),
        ({**PREFIX, "lora_format": "diffusers"}, "transformer.blocks.0."),
        ({**PREFIX, "lora_format": "comfyui"}, "diffusion_model.blocks.0."),
    ],
)
def test_a_prefix_to_remove_or_a_format_decides_the_saved_names_of_a_lora_alone(
    flags: dict[str, Any], first: str, here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path / "lora", max_steps=1, **flags)
    assert min(files(tmp_path / "lora")["step-1.safetensors"]).startswith(first)
    flags = {**flags, "trainable_models": "dit", "max_steps": 1}
    full = train(here, output_path=tmp_path / "full", **flags)
    assert "blocks.0.to_q.bias" in files(full)["step-1.safetensors"]


@pytest.mark.parametrize("trained", ["lora_base_model", "trainable_models"])
def test_a_program_without_names_for_what_is_trained_is_refused(
    trained: str, here: Path, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {trained: "text_encoder", "lora_format": "comfyui"}
    with pytest.raises(UsageError, match="text_encoder") as caught:
        train(here, output_path=tmp_path, max_steps=1, **flags)
    assert caught.value.where == "--lora_format"
    assert not [*tmp_path.glob("*.safetensors")]


def test_a_preset_and_a_scripts_file_may_have_any_naming(
    here: Path, tmp_path: Path
) -> None:
    trained = train(here, output_path=tmp_path / "out", max_steps=1, learning_rate=0.3)
    preset, kohya = trained / "step-1.safetensors", tmp_path / "kohya.safetensors"
    assert main(["export", "--format", "kohya", str(preset), str(kohya)]) == 0
    runs = [training_run(config(here, preset_lora_path=p)) for p in (preset, kohya)]
    layers = [
        run.module.pipeline.components["dit"].blocks[0].to_out.base_layer.weight
        for run in runs
    ]
    assert torch.equal(*layers)
    logger = WeightsLogger(str(tmp_path / "own"), lora_format="diffsynth")
    logger.on_epoch_end(runs[0].module, 0)
    flags = {"lora_format": "diffsynth", "max_steps": 1}
    (known,) = files(train(here, output_path=tmp_path / "run", **flags)).values()
    assert files(tmp_path / "own")["epoch-0.safetensors"].keys() == known.keys()


@pytest.mark.parametrize(
    ("own", "given", "words"),
    [
        (LORA, DORA, "--lora_type dora"),
        (DORA, LOKR, "--lora_type lokr"),
        (
            LOKR,
            replace(LOKR, settings=(("factor", 3),)),
            r"blocks\.0\.\S+to_q.*\(3, 3\).*--lokr_factor",
        ),
    ],
)
def test_layers_of_another_type_are_refused_with_what_to_give(
    own: LoraConfig, given: LoraConfig, words: str
) -> None:
    with pytest.raises(StateError, match=f"(?s){words}"):
        load_layers(lora_layers(trained(own)), lora_layers(trained(given)), PATH)


@pytest.mark.parametrize("given", [DORA, LOKR, replace(LOKR, alpha=0.5)])
def test_layers_are_copied_into_the_memory_of_those_in_training(
    given: LoraConfig,
) -> None:
    """A LoKr of another scale keeps its effect."""
    source, module = trained(given), network()
    inject(module, replace(given, alpha=3.0), {})
    load_layers(lora_layers(module), lora_layers(source), PATH)
    assert torch.allclose(output(module), output(source), atol=1e-6)
    assert not torch.allclose(output(module), output(network()), atol=1e-3)
    assert {layer.alpha for layer in lora_layers(module).values()} == {3.0}


def test_a_layer_without_effect_that_no_loss_reaches_may_be_missing() -> None:
    optional = "blocks.1.attn.to_out.0"
    three = lora_layers(trained(replace(LOKR, targets=("to_q", "0.attn.to_out.0"))))
    four = lora_layers(trained(LOKR))
    four[optional].second[0].zero_()
    load_layers(three, four, PATH, [optional])


def test_the_names_of_diffsynth_studio_have_an_alias(
    here: Path, tmp_path: Path
) -> None:
    out = train(here, output_path=tmp_path / "out", max_steps=1)
    (source,) = out.glob("*.safetensors")
    for name in ("diffsynth", "reference"):
        (tmp_path / "to").mkdir(exist_ok=True)
        target = tmp_path / f"to/{name}.safetensors"
        assert main(["export", "--format", name, str(source), str(target)]) == 0
    one, other = files(tmp_path / "to").values()
    assert same(one, other)
