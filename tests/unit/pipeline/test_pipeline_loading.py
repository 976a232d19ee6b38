"""What was found is loaded frozen, in the dtype asked for; LoRA files go where they
belong.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import LoraConfig, ModelConfig, Pipeline, StateError, UsageError, save_lora
from dstrain.lora import inject
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.family import COMPONENTS, FOLDERS, MODEL, build, weights_of, write
from tests.support.runs import configs, opened, project, same, train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write(tmp_path / "model")
    return tmp_path / "model"


def test_every_component_is_loaded_frozen_and_for_use(model: Path) -> None:
    pipeline = opened(model)
    assert set(pipeline.components) == {component.name for component in COMPONENTS}
    for name in FOLDERS:
        network = pipeline.components[name]
        assert not network.training
        assert not any(parameter.requires_grad for parameter in network.parameters())
        weights = {
            key: value
            for path in weights_of(model)[name]
            for key, value in load_file(path).items()
        }
        assert same(
            dict(sorted(network.state_dict().items())), dict(sorted(weights.items()))
        )


def test_a_file_of_a_fully_trained_component_is_loaded_by_itself(
    tmp_path: Path,
) -> None:
    here = project(tmp_path)
    flags = {"trainable_models": "dit,text_encoder", "max_steps": 2}
    train(here, output_path=here / "out", **flags)
    saved = {
        name: here / f"out/step-2.{name}.safetensors"
        for name in ("dit", "text_encoder")
    }
    for name, path in saved.items():
        given = [
            ModelConfig(path=str(path)),
            *(c for c in configs(here / "model") if FOLDERS[name] not in str(c.path)),
        ]
        pipeline = Pipeline.from_pretrained("tiny", given)
        assert same(
            dict(sorted(pipeline.components[name].state_dict().items())),
            load_file(path),
        )
        with safe_open(path, "pt") as file:
            assert json.loads(file.metadata()["config"])["width"] == 8
    given = [*saved.values(), *weights_of(here / "model")["vae"]]
    train(
        here,
        output_path=here / "again",
        model_paths=json.dumps([str(path) for path in given]),
        **flags,
    )


def test_a_lora_goes_to_the_component_its_keys_name(
    model: Path, tmp_path: Path
) -> None:
    for component, prefix in MODEL.lora_prefixes.items():
        source = opened(model).components[component]
        lora_config = LoraConfig(
            component, tuple(MODEL.lora_targets[component]), 2, 4.0
        )
        inject(source, lora_config, {})
        with torch.no_grad():
            for parameter in source.parameters():
                if parameter.requires_grad:
                    parameter.normal_()
        path = tmp_path / f"{component}.safetensors"
        save_lora(path, source, lora_config, prefix, {})
        pipeline = opened(model)
        pipeline.load_lora(path, 1.0)
        arguments = (torch.tensor([[1, 2]]),) if component == "text_encoder" else (
            torch.ones(1, 4, 2, 2), torch.ones(1), torch.ones(1, 3, 8), torch.ones(1, 3, dtype=torch.bool)
        )  # fmt: skip
        plain = opened(model).components[component](*arguments)
        wanted = source.eval()(*arguments)
        assert torch.equal(pipeline.components[component](*arguments), wanted)
        assert not torch.equal(plain, wanted)
        pipeline.load_lora(path, -1.0)  # a second one adds up
        assert torch.allclose(
            pipeline.components[component](*arguments), plain, atol=1e-5
        )
        others = set(MODEL.lora_prefixes) - {component}
        assert all(
            not hasattr(pipeline.components[name], "peft_config") for name in others
        )


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
    assert capsys.readouterr().err.splitlines() == [
        f"dstrain: warning: {path}: was trained for variant base, not other",
        f"dstrain: warning: {path}: was trained on other weights of dit (other files), not on "
        "model-1-of-2.safetensors",
    ]


def test_a_header_tells_how_the_lora_was_made(tmp_path: Path) -> None:
    here = project(tmp_path)
    with safe_open(
        train(here, max_steps=1, lora_alpha=3.0) / "step-1.safetensors", "pt"
    ) as file:
        header = file.metadata()
    assert {name: header[name] for name in ("family", "variant", "component", "rank", "alpha", "targets")} == {
        "family": "tiny", "variant": "base", "component": "dit", "rank": "2", "alpha": "3.0", "targets": "to_out,to_q",
    }  # fmt: skip
    assert json.loads(header["config"]) == {"width": 8, "depth": 2, "dropout": 0.0}
    recipe = json.loads(header["recipe"])
    assert recipe["steps"] == 1
    assert recipe["learning_rate"] == 1e-2
    decisive = {
        "task",
        "batch_size",
        "gradient_accumulation_steps",
        "lr_warmup_steps",
        "max_grad_norm",
        "seed",
    }
    decisive |= {
        "timestep_sampling",
        "loss_weighting",
        "min_timestep_boundary",
        "max_timestep_boundary",
    }
    assert decisive | {"frame_sampling", "frame_samples"} <= set(recipe)
    assert len(json.loads(header["base"])["digest"]) == 40


def test_a_lora_of_another_family_is_named_as_one(model: Path, tmp_path: Path) -> None:
    save_file(
        {"transformer.x.lora_A.weight": torch.ones(1)},
        tmp_path / "other.safetensors",
        {"family": "other"},
    )
    with pytest.raises(StateError, match="is a LoRA for family other, not for tiny"):
        opened(model).load_lora(tmp_path / "other.safetensors", 1.0)


def test_a_pipeline_is_opened_in_the_dtype_and_as_the_variant_asked_for(
    model: Path, tmp_path: Path
) -> None:
    pipeline = Pipeline.from_pretrained(
        "tiny", configs(model), torch_dtype=torch.bfloat16
    )
    assert {
        parameter.dtype for parameter in pipeline.components["dit"].parameters()
    } == {torch.bfloat16}
    assert pipeline.dtype == torch.bfloat16
    write(tmp_path / "other", "other")
    other = Pipeline.from_pretrained("tiny", configs(tmp_path / "other"), "other")
    assert other.spec.variant == "other"
    with pytest.raises(StateError, match="has depth 2; variant other takes 1"):
        Pipeline.from_pretrained("tiny", configs(model), "other")
    with pytest.raises(
        UsageError, match=r"tiny has no variant 'othr'.*did you mean 'other'"
    ):
        Pipeline.from_pretrained("tiny", configs(model), "othr")


@pytest.mark.parametrize("side", ["tile_size", "tile_stride"])
def test_sides_of_tiles_without_tiles_are_refused(model: Path, side: str) -> None:
    given: dict[str, Any] = {side: 64}
    with pytest.raises(UsageError, match=f"{side}=.*has no effect without tiled=True"):
        Pipeline.from_pretrained("tiny", configs(model), **given)
