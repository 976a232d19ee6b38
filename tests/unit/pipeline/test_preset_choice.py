"""A preset LoRA is part of the weights, in each stage, in keys, and in what is printed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import DstrainError, GenerateConfig, StateError, UsageError
from dstrain.cli.main import main
from dstrain.config import with_run_options
from dstrain.generation.pipeline_source import open_source
from dstrain.runs.resolve import resolve
from dstrain.storage import CHECKSUM, read_tensors, sha256, tensor_shapes
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.experts import copied_denoiser, let_tiny_have_experts
from tests.support.family import weights_of
from tests.support.runs import config, files, log, project, same, train, training_run

pytestmark = pytest.mark.usefixtures("tiny")


COMPONENTS = ("dit", "text_encoder")


@pytest.fixture(scope="module")
def here(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a LoRA of each component, of which no weight is zero."""
    folder = project(tmp_path_factory.mktemp("project"))
    for name in COMPONENTS:
        flags = {"lora_base_model": name, "learning_rate": 0.3, "lora_alpha": 4.0}
        train(folder, output_path=folder / name, max_steps=1, **flags)
    return folder


def preset(here: Path, component: str = "dit") -> Path:
    return here / component / "step-1.safetensors"


def weight_of(run: Any, name: str = "dit", layer: str = "blocks.0.to_out") -> Tensor:
    """The weight of a layer that a run trains LoRA on, or not."""
    module = run.module.pipeline.components[name].get_submodule(layer)
    weight: Tensor = getattr(module, "base_layer", module).weight
    return weight


def test_the_weights_trained_on_are_those_with_the_preset(here: Path) -> None:
    plain = weight_of(training_run(config(here)))
    run = training_run(config(here, preset_lora_path=preset(here)))
    tensors = load_file(preset(here))
    a, b = (tensors[f"transformer.blocks.0.to_out.lora_{x}.weight"] for x in "AB")
    # alpha / rank is part of B.
    assert torch.equal(weight_of(run), plain + b @ a)
    assert not torch.equal(weight_of(run), plain)
    trained = run.module.trained.parameters
    ups = [one for name, one in trained.items() if "lora_B" in name]
    assert ups and not any(one.any() for one in ups)


@pytest.mark.parametrize("component", ["dit", "text_encoder"])
def test_both_stages_train_the_same_as_one(
    component: str, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: dict[str, Any] = {"max_steps": 3}
    without = train(here, output_path=tmp_path / "without", **flags)
    flags["preset_lora_path"] = preset(here, component)
    capsys.readouterr()
    whole = train(here, output_path=tmp_path / "whole", **flags)
    said = f"{preset(here, component)} merged into {component}\n"
    assert said in capsys.readouterr().err
    flags |= {"feature_cache": tmp_path / "store", "output_path": tmp_path / "parts"}
    train(here, task="sft:data_process", **flags)
    parts = train(here, task="sft:train", **flags)
    # In the stage that loads it.
    assert capsys.readouterr().err.count(said) == 1
    assert same(files(whole), files(parts))
    assert log(whole) == log(parts)
    assert log(whole) != log(without)


def test_a_cache_made_with_another_preset_in_an_encoder_is_distinguished(
    here: Path, tmp_path: Path
) -> None:
    path = preset(here, "text_encoder")

    def fill(**flags: Any) -> None:
        train(here, task="sft:data_process", **flags)

    def stored() -> int:
        shards = (tmp_path / "store/shards").glob("*.safetensors")
        return sum(len(tensor_shapes(path)) for path in shards)

    cache: dict[str, Any] = {"feature_cache": tmp_path / "store", "max_steps": 1}
    second = {"task": "sft:train", "output_path": tmp_path / "out", **cache}
    fill(**cache)
    before = stored()
    with pytest.raises(StateError, match="--preset_lora_path"):
        train(here, preset_lora_path=path, **second)
    fill(preset_lora_path=path, **cache)
    assert stored() > before
    train(here, preset_lora_path=path, **second)
    # No stored value has that of the denoiser.
    second["output_path"] = tmp_path / "other"
    train(here, preset_lora_path=preset(here), **second)
    second["feature_cache"] = tmp_path / "with preset"
    fill(preset_lora_path=path, feature_cache=tmp_path / "with preset")
    second["output_path"] = tmp_path / "third"
    with pytest.raises(StateError, match="--preset_lora_path"):
        train(here, preset_lora_path=f"{path}:0.5", **second)
    difference = f"--preset_lora_path: .*{sha256(path)} .*text_encoder"
    with pytest.raises(StateError, match=difference):
        train(here, **second)
    before = stored()
    fill(preset_lora_path=f"{path}:0.5", **cache)
    assert stored() > before


def test_a_resumed_run_has_the_preset_of_its_recipe(here: Path, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"output_path": tmp_path / "out", "resume": "auto"}
    train(here, preset_lora_path=preset(here), max_steps=1, **flags)
    _, header = read_tensors(tmp_path / "out/step-1.safetensors")
    assert json.loads(header["recipe"])["preset_lora"] == sha256(preset(here))
    moved = tmp_path / "moved.safetensors"
    moved.write_bytes(preset(here).read_bytes())
    train(here, preset_lora_path=moved, max_steps=2, **flags)
    with pytest.raises(StateError, match="--resume"):
        train(here, max_steps=3, **flags)


def bare(path: Path, folder: Path) -> Path:
    """DiffSynth-Studio's names without a prefix: they do not say the component."""
    tensors = {
        key.partition(".")[2].replace(".weight", ".default.weight"): one
        for key, one in load_file(path).items()
    }
    for key in [one for one in tensors if "lora_A" in one]:
        tensors[f"{key.partition('.lora_')[0]}.alpha"] = torch.tensor(4.0)
    save_file(tensors, folder / "bare.safetensors")
    return folder / "bare.safetensors"


def test_its_component_and_scale_may_be_beside_it(here: Path, tmp_path: Path) -> None:
    """A run records both so that other commands read them wherever they run."""
    path = bare(preset(here), tmp_path)
    with pytest.raises(UsageError, match=r"--preset_lora_model: .*dit or text_encoder"):
        resolve(config(here, preset_lora_path=path))
    save_file(load_file(path), tmp_path / "named", {"component": "dit"})
    named = resolve(config(here, preset_lora_path=tmp_path / "named")).preset
    assert named is not None and named.components == ("dit",)
    whole = training_run(config(here, preset_lora_path=path, preset_lora_model="dit"))
    beside = {"preset_lora_path": Path(f"dit={path}:0.5"), "preset_lora_model": "dit"}
    half = training_run(config(here, **beside))
    plain = training_run(config(here))
    weights = [weight_of(one) for one in (plain, half, whole)]
    assert torch.allclose(weights[1], (weights[0] + weights[2]) / 2, atol=1e-6)
    assert not torch.equal(weights[1], weights[2])
    digests = [one.setup.preset and one.setup.preset.digest for one in (whole, half)]
    assert digests == [sha256(path), f"{sha256(path)}:0.5"]
    recorded = half.setup.recorded
    assert recorded.preset_lora_model == "dit"
    assert recorded.preset_lora_path == Path(f"{path}:0.5")


def both(here: Path, folder: Path, **header: str) -> Path:
    """A file with layers of the denoiser and of the text encoder."""
    tensors = {}
    for name in COMPONENTS:
        for key, one in load_file(preset(here, name)).items():
            tensors[key] = one
            if "lora_A" in key:
                alpha = key.replace("lora_A.weight", "alpha")
                tensors[alpha] = torch.tensor(float(len(one)))
    save_file(tensors, folder / "both.safetensors", header)
    return folder / "both.safetensors"


@pytest.mark.parametrize(
    ("named", "header"),
    [
        (None, {}),
        ("text_encoder,dit", {}),
        # It names one of them, and the keys are those of both.
        (None, {"component": "dit"}),
    ],
)
def test_a_file_for_several_components_is_merged_into_each(
    named: str | None, header: dict[str, str], here: Path, tmp_path: Path
) -> None:
    file = both(here, tmp_path, **header)
    flags: dict[str, Any] = {"preset_lora_path": file, "preset_lora_model": named}
    merged, plain = training_run(config(here, **flags)), training_run(config(here))
    out = train(here, output_path=tmp_path / "out", max_steps=1, **flags)
    image = GenerateConfig(model="tiny", prompt="dog", output=out / "a.png", run=out)
    with open_source(with_run_options(image), ["prompt"]) as source:
        generating = source.load().components
    for name in COMPONENTS:
        layers = load_file(preset(here, name))
        key = next(key for key in layers if "lora_B" in key)
        layer = key.partition(".")[2].removesuffix(".lora_B.weight")
        change = layers[key] @ layers[key.replace("lora_B", "lora_A")]
        own, other = (weight_of(one, name, layer) for one in (plain, merged))
        assert torch.allclose(other, own + change, atol=1e-6)
        assert not torch.equal(other, own)
        after = merged.module.pipeline.components[name].state_dict()
        for key, weight in generating[name].state_dict().items():
            assert "lora_" in key or torch.equal(weight, after[key])
    flags |= {"trainable_models": "text_encoder", "output_path": tmp_path / "full"}
    full = replace(image, run=train(here, max_steps=1, **flags))
    with open_source(with_run_options(full), ["prompt"]) as source:
        assert list(source.presets) == ["dit"]


def test_layers_of_another_component_than_is_named_are_left_out_on_request_alone(
    here: Path, tmp_path: Path
) -> None:
    file = both(here, tmp_path)
    flags: dict[str, Any] = {"output_path": tmp_path / "out", "max_steps": 1}
    advice = f"text_encoder\n.*{file}@skip_missing"
    for given in (
        {"preset_lora_path": file, "preset_lora_model": "dit"},
        {"preset_lora_path": Path(f"dit={file}")},
    ):
        with pytest.raises(UsageError, match=advice):
            train(here, **given, **flags)
    given = {"preset_lora_path": f"{file}@skip_missing", "preset_lora_model": "dit"}
    found, encoder = (
        run.module.pipeline.components["text_encoder"].state_dict()
        for run in (training_run(config(here, **given)), training_run(config(here)))
    )
    assert same(dict(encoder), dict(found))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"preset_lora_model": "dit"}, "--preset_lora_model: .*--preset_lora_path"),
        ({"preset_lora_path": "FILE", "preset_lora_model": "dti"}, "'dti'.*'dit'"),
        (
            {"preset_lora_path": "FILE", "preset_lora_model": "text_encoder"},
            "FILE: .*dit, .*text_encoder",
        ),
        (
            {"preset_lora_path": "dit=FILE", "preset_lora_model": "text_encoder"},
            "--preset_lora_model: .*text_encoder.*dit=",
        ),
        ({"preset_lora_path": "nowhere"}, "nowhere: "),
        ({"preset_lora_path": "."}, r"\.: "),
        (
            {"preset_lora_path": "FILE@training_only", "trainable_models": "dit"},
            "--preset_lora_path: @training_only .*dit",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused(
    flags: dict[str, str], said: str, here: Path, tmp_path: Path
) -> None:
    path = str(preset(here))
    given = {name: value.replace("FILE", path) for name, value in flags.items()}
    with pytest.raises(DstrainError, match=said.replace("FILE", path)):
        train(here, output_path=tmp_path / "out", **given)
    assert not (tmp_path / "out/logs/loss.csv").exists()


@pytest.mark.parametrize("stage", ["", ":data_process", ":train"])
def test_a_preset_of_what_no_stage_loads_is_refused(
    stage: str, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_tiny_have_experts(monkeypatch)
    models = weights_of(here / "model")
    models["dit2"] = copied_denoiser(here / "model", tmp_path / "transformer_2")
    given: dict[str, Any] = {"model_paths": json.dumps(list(models.values()))}
    given |= {"preset_lora_path": preset(here), "lora_target_modules": "to_q"}
    given |= {"task": f"sft{stage}", "feature_cache": tmp_path / "cache"}
    with pytest.raises(UsageError, match=r"(?s)--preset_lora_path: .*dit, .*dit2"):
        resolve(config(here, lora_base_model="dit2", **given))
    assert resolve(config(here, lora_base_model="dit", **given)).preset is not None


def test_one_for_training_only_is_in_no_expert_that_previews_load_and_in_no_encoder(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = f"{preset(here, 'text_encoder')}@training_only"
    with pytest.raises(UsageError, match=r"--preset_lora_path: .*text_encoder"):
        resolve(config(here, preset_lora_path=encoder))
    pytest.importorskip("dstrain_watch")  # which makes the previews
    let_tiny_have_experts(monkeypatch)
    models = weights_of(here / "model")
    models["dit2"] = copied_denoiser(here / "model", tmp_path / "transformer_2")
    given: dict[str, Any] = {"model_paths": json.dumps(list(models.values()))}
    given |= {"lora_base_model": "dit2", "lora_target_modules": "to_q"}
    previews = []
    shown = {"preview_prompt": ("dog",), "preview_at_start": True}
    for number, mark in enumerate((None, "@training_only", "")):
        if mark is not None:
            given["preset_lora_path"] = f"{preset(here)}{mark}"
        output = {"output_path": tmp_path / str(number), "max_steps": 1}
        out = train(here, **shown, **output, **given)
        previews.append((out / "previews/step-000000-0.png").read_bytes())
    assert previews[0] == previews[1] != previews[2]


def test_a_preset_of_another_family_is_refused_and_a_dry_toy_needs_none(
    here: Path, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    save_file(load_file(preset(here)), path, {"family": "other"})
    with pytest.raises(StateError, match=f"{path}: .* other, .* tiny"):
        train(here, preset_lora_path=path, output_path=tmp_path / "out")
    words = ["--model", "tiny", "--toy", "--dry_run", "--preset_lora_path", "nowhere"]
    assert main(words) == 0


@pytest.mark.parametrize("flag", ["preset_lora_path", "lora_checkpoint"])
def test_a_lora_that_was_trained_for_another_variant_is_warned_of_once(
    flag: str, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, header = read_tensors(preset(here))
    path = tmp_path / "other.safetensors"
    header = {**header, "variant": "edit", "base": json.dumps({"digest": "another"})}
    header.pop(CHECKSUM, None)
    save_file(load_file(preset(here)), path, header)
    capsys.readouterr()
    given = {flag: path, "output_path": tmp_path / "out"}
    train(here, max_steps=1, lora_alpha=4.0, **given)
    lines = capsys.readouterr().err.splitlines()
    warnings = [line for line in lines if f"warning: {path}: " in line]
    variant, weights = warnings
    assert "edit" in variant and "base" in variant
    assert "dit" in weights
