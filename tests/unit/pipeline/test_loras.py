"""LoRA files go to the component that their keys name, and say how they were made."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import LoraConfig, StateError, save_lora
from dstrain.lora import inject
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.family import MODEL, build, write
from tests.support.runs import opened, project, train

pytestmark = pytest.mark.usefixtures("tiny")
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "text_encoder": (torch.tensor([[1, 2]]),),
    "dit": (
        torch.ones(1, 4, 2, 2),
        torch.ones(1),
        torch.ones(1, 3, 8),
        torch.ones(1, 3, dtype=torch.bool),
    ),
}


@pytest.mark.parametrize("component", MODEL.lora_prefixes)
def test_a_lora_goes_to_the_component_its_keys_name_and_a_second_adds_up(
    component: str, model: Path, tmp_path: Path
) -> None:
    source = opened(model).components[component]
    targets = tuple(MODEL.lora_targets[component])
    lora_config = LoraConfig(component, targets, 2, 4.0)
    inject(source, lora_config, {})
    for parameter in source.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    path = tmp_path / "lora.safetensors"
    save_lora(path, source, lora_config, MODEL.lora_prefixes[component], {})
    pipeline = opened(model)
    network = pipeline.components[component]
    arguments = ARGUMENTS[component]
    plain = network(*arguments)
    pipeline.load_lora(path, 1.0)
    wanted = source.eval()(*arguments)
    assert torch.equal(network(*arguments), wanted)
    assert not torch.equal(plain, wanted)
    pipeline.load_lora(path, -1.0)
    assert torch.allclose(network(*arguments), plain, atol=1e-5)
    for name in set(MODEL.lora_prefixes) - {component}:
        assert not hasattr(pipeline.components[name], "peft_config")


def test_what_a_lora_was_trained_for_and_on_is_reported_where_it_is_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = project(tmp_path)
    path = train(here, max_steps=1) / "step-1.safetensors"
    write(tmp_path / "further", seed=1)
    capsys.readouterr()
    opened(here / "model").load_lora(path, 1.0)
    assert capsys.readouterr().err == ""
    other = opened(tmp_path / "further")
    other.spec = build("other")
    other.load_lora(path, 1.0)
    variant, weights = capsys.readouterr().err.splitlines()
    assert str(path) in variant and "base" in variant and "other" in variant
    assert str(path) in weights and "model-1-of-2.safetensors" in weights


def test_a_header_tells_how_the_lora_was_made(tmp_path: Path) -> None:
    out = train(project(tmp_path), max_steps=1, lora_alpha=3.0)
    with safe_open(out / "step-1.safetensors", "pt") as file:
        header = file.metadata()
    made = {"family": "tiny", "variant": "base", "component": "dit"}
    made |= {"rank": "2", "alpha": "3.0", "targets": "to_out,to_q"}
    assert made.items() <= header.items()
    assert json.loads(header["config"]) == {"width": 8, "depth": 2, "dropout": 0.0}
    recipe = json.loads(header["recipe"])
    assert (recipe["steps"], recipe["learning_rate"]) == (1, 1e-2)
    decisive = """
        task batch_size gradient_accumulation_steps lr_warmup_steps max_grad_norm seed
        timestep_sampling loss_weighting min_timestep_boundary max_timestep_boundary
        frame_sampling frame_samples
    """
    assert recipe.keys() >= set(decisive.split())
    assert len(json.loads(header["base"])["digest"]) == 40


def test_a_lora_of_another_family_is_refused(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    tensors = {"transformer.x.lora_A.weight": torch.ones(1)}
    save_file(tensors, path, {"family": "other"})
    with pytest.raises(StateError, match=f"{path}: .* other, .* tiny"):
        opened(model).load_lora(path, 1.0)
