"""Differential LoRA training: a preset LoRA is part of the weights, in each stage, in
keys, and in what is printed.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import DstrainError, GenerateConfig, StateError, UsageError, run
from dstrain.cli.main import main
from dstrain.config import with_run_options
from dstrain.generation.source import open_source
from dstrain.lora.export import export
from dstrain.models import component_digests
from dstrain.plugin import ExpertSchedule
from dstrain.runs.resolve import resolve
from dstrain.storage import CHECKSUM, Digests, read_tensors, sha256
from safetensors.torch import load_file, save_file

from tests.support import family
from tests.support.family import MODEL
from tests.support.runs import config, files, project, same, train, training_run

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return project(tmp_path)


def preset_for(here: Path, component: str, folder: Path) -> Path:
    """A LoRA of which no weight is zero, as a run saves it."""
    out = train(
        here,
        output_path=folder,
        lora_base_model=component,
        max_steps=1,
        learning_rate=0.3,
        lora_alpha=4.0,
    )
    (path,) = out.glob("*.safetensors")
    return path


def losses(folder: Path) -> list[str]:
    return [
        line.split(",")[2]
        for line in (folder / "logs/loss.csv").read_text().splitlines()[1:]
    ]


def test_the_weights_trained_on_are_those_with_the_preset(
    here: Path, tmp_path: Path
) -> None:
    path = preset_for(here, "dit", tmp_path / "first")
    plain, merged = (
        training_run(config(here)),
        training_run(config(here, preset_lora_path=path)),
    )
    weight, other = (
        one.module.pipeline.components["dit"].blocks[0].to_out.base_layer.weight
        for one in (plain, merged)
    )
    tensors = load_file(path)
    a, b = (tensors[f"transformer.blocks.0.to_out.lora_{x}.weight"] for x in "AB")
    # alpha / rank is part of B.
    assert torch.equal(other, weight + b @ a)
    assert not torch.equal(other, weight)
    state = {
        name: p
        for name, p in merged.module.trained.parameters.items()
        if "lora_B" in name
    }
    assert state
    assert not any(p.any() for p in state.values())


def test_it_takes_a_preset_in_any_naming(here: Path, tmp_path: Path) -> None:
    path = preset_for(here, "dit", tmp_path / "first")
    export(path, tmp_path / "kohya.safetensors", "kohya")
    one = train(here, output_path=tmp_path / "a", max_steps=2, preset_lora_path=path)
    other = train(
        here,
        output_path=tmp_path / "b",
        max_steps=2,
        preset_lora_path=tmp_path / "kohya.safetensors",
    )
    without = train(here, output_path=tmp_path / "c", max_steps=2)
    assert losses(one) == losses(other)
    assert losses(one) != losses(without)
    assert same(files(one), files(other))


@pytest.mark.parametrize("component", ["dit", "text_encoder"])
def test_both_stages_train_the_same_as_one(
    component: str, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = preset_for(here, component, tmp_path / "first")
    capsys.readouterr()
    flags: dict[str, Any] = {"preset_lora_path": path, "max_steps": 3}
    whole = train(here, output_path=tmp_path / "whole", **flags)
    cache = {"feature_cache": tmp_path / "store"}
    assert f"preset {path} merged into {component}\n" in capsys.readouterr().err
    run(config(here, task="sft:data_process", **cache, **flags))
    parts = train(
        here, output_path=tmp_path / "parts", task="sft:train", **cache, **flags
    )
    assert (
        capsys.readouterr().err.count(f"preset {path} merged into {component}\n") == 1
    )  # in the stage that loads it
    assert same(files(whole), files(parts))
    assert losses(whole) == losses(parts)
    assert losses(whole) != losses(
        train(here, output_path=tmp_path / "without", max_steps=3)
    )


def test_a_cache_made_with_another_preset_in_an_encoder_is_distinguished(
    here: Path, tmp_path: Path
) -> None:
    path = preset_for(here, "text_encoder", tmp_path / "first")
    dit = preset_for(here, "dit", tmp_path / "second")
    cache = {"feature_cache": tmp_path / "store", "max_steps": 1}
    run(config(here, task="sft:data_process", **cache))
    before = sum(1 for _ in (tmp_path / "store").rglob("*.safetensors"))
    with pytest.raises(
        StateError, match=r"contains no plan for this run\n.*--preset_lora_path"
    ):
        train(here, task="sft:train", preset_lora_path=path, **cache)
    run(config(here, task="sft:data_process", preset_lora_path=path, **cache))
    assert sum(1 for _ in (tmp_path / "store").rglob("*.safetensors")) > before
    train(
        here,
        task="sft:train",
        output_path=tmp_path / "a",
        preset_lora_path=path,
        **cache,
    )
    train(
        here,
        task="sft:train",
        output_path=tmp_path / "b",
        preset_lora_path=dit,
        **cache,
    )  # no stored value has it
    other = tmp_path / "other"
    run(
        config(
            here, task="sft:data_process", preset_lora_path=path, feature_cache=other
        )
    )
    with pytest.raises(StateError) as caught:
        train(here, task="sft:train", feature_cache=other)
    assert caught.value.help_lines[:2] == (
        f"--preset_lora_path: cache {sha256(path)} in text_encoder, this run nothing",
        "use the flags it was filled with, or fill it again",
    )


def test_a_resumed_run_has_the_same_preset(here: Path, tmp_path: Path) -> None:
    path = preset_for(here, "dit", tmp_path / "first")
    train(here, preset_lora_path=path, max_steps=1)
    moved = tmp_path / "moved.safetensors"
    moved.write_bytes(path.read_bytes())
    train(here, preset_lora_path=moved, max_steps=2, resume="auto")
    with pytest.raises(StateError, match="the saved run had different settings"):
        train(here, max_steps=3, resume="auto")


def test_the_recipe_of_what_is_trained_names_it(here: Path, tmp_path: Path) -> None:
    path = preset_for(here, "dit", tmp_path / "first")
    train(here, preset_lora_path=path, max_steps=1)
    _, header = read_tensors(here / "out/step-1.safetensors")
    assert json.loads(header["recipe"])["preset_lora"] == sha256(path)


def bare(path: Path, folder: Path) -> Path:
    """DiffSynth-Studio's names without a prefix: they do not say the component."""
    tensors = {
        key.partition(".")[2].replace(".weight", ".default.weight"): v
        for key, v in load_file(path).items()
    }
    save_file(tensors, folder / "bare.safetensors")
    return folder / "bare.safetensors"


def test_what_does_not_say_its_component_is_asked_for(
    here: Path, tmp_path: Path
) -> None:
    path = bare(preset_for(here, "dit", tmp_path / "first"), tmp_path)
    with pytest.raises(
        UsageError,
        match=r"--preset_lora_model: is required: .* may be for dit or text_encoder",
    ):
        resolve(config(here, preset_lora_path=path))
    assert (
        resolve(config(here, preset_lora_path=path, preset_lora_model="dit")).preset
        is not None
    )


def test_its_component_can_stand_before_it_and_its_scale_after_it(
    here: Path, tmp_path: Path
) -> None:
    """A run records both so that other commands read them wherever they run."""
    path = bare(preset_for(here, "dit", tmp_path / "first"), tmp_path)
    whole = training_run(config(here, preset_lora_path=path, preset_lora_model="dit"))
    half = training_run(config(here, preset_lora_path=Path(f"dit={path}:0.5")))
    plain = training_run(config(here))
    weights = [
        one.module.pipeline.components["dit"].blocks[0].to_out.base_layer.weight
        for one in (plain, half, whole)
    ]
    assert torch.allclose(weights[1], (weights[0] + weights[2]) / 2, atol=1e-6)
    assert not torch.equal(weights[1], weights[2])
    first, second = whole.setup.preset, half.setup.preset
    assert first is not None and second is not None
    assert first.digest == sha256(path)
    assert second.digest == f"{sha256(path)}:0.5"
    recorded = half.setup.recorded
    assert recorded.preset_lora_model == "dit"
    assert recorded.preset_lora_path == Path(f"{path}:0.5")


def test_what_an_encoder_computes_with_another_scale_has_another_key(
    here: Path, tmp_path: Path
) -> None:
    path = preset_for(here, "text_encoder", tmp_path / "first")
    digests = []
    for text in (f"{path}", f"{path}:1", f"{path}:0.5"):
        setup = resolve(config(here, preset_lora_path=Path(text)))
        found = setup.find([setup.plan(setup.all_inputs())])
        digests.append(component_digests(found, Digests(tmp_path / "digests.json")))
    assert digests[0] == digests[1]
    assert digests[0]["dit"] == digests[2]["dit"]
    assert digests[0]["text_encoder"] != digests[2]["text_encoder"]


def both(here: Path, folder: Path, header: dict[str, str] | None = None) -> Path:
    """A file with layers of the denoiser and of the text encoder."""
    tensors = {}
    for name in ("dit", "text_encoder"):
        own = load_file(preset_for(here, name, folder / name))
        alphas = {
            key.replace("lora_A.weight", "alpha"): torch.tensor(float(len(value)))
            for key, value in own.items()
            if "lora_A" in key
        }
        tensors |= own | alphas
    save_file(tensors, folder / "both.safetensors", header)
    return folder / "both.safetensors"


@pytest.mark.parametrize(
    ("named", "header"),
    [
        (None, None),
        ("text_encoder,dit", None),
        # It names one of them, and the keys are those of both.
        (None, {"component": "dit"}),
    ],
    ids=str,
)
def test_a_file_for_several_components_is_merged_into_each(
    named: str | None, header: dict[str, str] | None, here: Path, tmp_path: Path
) -> None:
    file = both(here, tmp_path, header)
    flags: dict[str, Any] = {"preset_lora_path": file, "preset_lora_model": named}
    merged, plain = training_run(config(here, **flags)), training_run(config(here))
    for name in ("dit", "text_encoder"):
        layers = load_file(tmp_path / f"{name}/step-1.safetensors")
        key = next(key for key in layers if "lora_B" in key)
        layer = key.partition(".")[2].removesuffix(".lora_B.weight")
        change = layers[key] @ layers[key.replace("lora_B", "lora_A")]
        own, other = (
            getattr(module, "base_layer", module).weight
            for module in (
                one.module.pipeline.components[name].get_submodule(layer)
                for one in (plain, merged)
            )
        )
        assert torch.allclose(other, own + change, atol=1e-6)
        assert not torch.equal(other, own)
    train(here, max_steps=1, **flags)
    with open_source(
        with_run_options(
            GenerateConfig(
                model="tiny", prompt="dog", output=here / "a.png", run=here / "out"
            )
        ),
        ["prompt"],
    ) as source:
        generating = source.load().components
        for name in ("dit", "text_encoder"):
            after = merged.module.pipeline.components[name].state_dict()
            for key, weight in generating[name].state_dict().items():
                if "lora_" not in key:
                    assert torch.equal(weight, after[key])


def test_layers_of_another_component_than_is_named_are_left_out_on_request_alone(
    here: Path, tmp_path: Path
) -> None:
    file = both(here, tmp_path)
    flags: dict[str, Any] = {"preset_lora_model": "dit", "max_steps": 1}
    with pytest.raises(UsageError, match="also has layers for text_encoder") as caught:
        train(here, preset_lora_path=file, **flags)
    with pytest.raises(UsageError) as named:
        train(here, preset_lora_path=Path(f"dit={file}"), max_steps=1)
    assert named.value.help_lines == caught.value.help_lines
    assert caught.value.help_lines == (
        f"to merge all: --preset_lora_path {file} --preset_lora_model dit,text_encoder",
        f"to leave them out: --preset_lora_path {file}@skip_missing --preset_lora_model dit",
    )
    ready = training_run(config(here, preset_lora_path=f"{file}@skip_missing", **flags))
    encoder = training_run(config(here)).module.pipeline.components["text_encoder"]
    found = ready.module.pipeline.components["text_encoder"].state_dict()
    assert same(dict(encoder.state_dict()), dict(found))


def test_one_place_says_the_component(here: Path, tmp_path: Path) -> None:
    path = preset_for(here, "dit", tmp_path / "first")
    flags: dict[str, Any] = {"preset_lora_path": Path(f"dit={path}")}
    with pytest.raises(UsageError, match=r"is text_encoder, and .* begins with dit="):
        resolve(config(here, preset_lora_model="text_encoder", **flags))
    assert resolve(config(here, preset_lora_model="dit", **flags)).preset is not None


@pytest.mark.parametrize(("flags", "match"), [
    ({"preset_lora_model": "dit"}, "--preset_lora_model: has no effect without --preset_lora_path"),
    ({"preset_lora_path": "FILE", "preset_lora_model": "dti"}, "has no component 'dti'.*did you mean 'dit'"),
    ({"preset_lora_path": "FILE", "preset_lora_model": "text_encoder"}, "is a LoRA for dit, not for text_"),
    ({"preset_lora_path": "nowhere"}, "nowhere: no such LoRA file"),
    ({"preset_lora_path": "."}, ".: no such LoRA file"),
])  # fmt: skip
def test_what_cannot_be_merged_is_refused(
    flags: dict[str, str], match: str, here: Path, tmp_path: Path
) -> None:
    path = preset_for(here, "dit", tmp_path / "first")
    given: dict[str, Any] = {
        n: path if v == "FILE" else Path(v) if "path" in n else v
        for n, v in flags.items()
    }
    with pytest.raises(DstrainError, match=match):
        train(here, **given)
    assert not (here / "out/logs/loss.csv").exists()


@pytest.mark.parametrize("stage", ["", ":data_process", ":train"])
def test_a_preset_of_what_no_stage_loads_is_refused_unless_a_preview_does(
    stage: str, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: dict[str, Any] = {
        "preset_lora_path": preset_for(here, "dit", tmp_path / "first"),
        "task": f"sft{stage}",
    }
    spec = replace(
        family.BASE,
        components=(*family.BASE.components, "dit2"),
        model_fn=replace(family.BASE.model_fn, components=("denoiser",)),
        experts=ExpertSchedule(
            "denoiser", {"dit": (500.0, 1000.0), "dit2": (0.0, 500.0)}
        ),
    )
    other = replace(spec, denoiser_config={"depth": 1})
    monkeypatch.setattr(family, "PIPELINES", {"base": spec, "other": other})
    with pytest.raises(
        UsageError,
        match=r"--preset_lora_path: has no effect: .* is for dit, .*\n  it loads .*dit2",
    ):
        resolve(
            config(here, lora_base_model="dit2", lora_target_modules="to_q", **flags)
        )
    for also in (
        {"lora_base_model": "dit"},
        {"lora_base_model": "dit2", "preview_prompt": ("dog",)},
    ):
        assert (
            resolve(config(here, lora_target_modules="to_q", **also, **flags)).preset
            is not None
        )


def test_a_preset_of_another_family_is_refused(here: Path, tmp_path: Path) -> None:
    save_file(
        load_file(preset_for(here, "dit", tmp_path / "first")),
        tmp_path / "x.safetensors",
        {"family": "other"},
    )
    with pytest.raises(StateError, match="is a LoRA for family other, not for tiny"):
        train(here, preset_lora_path=tmp_path / "x.safetensors")
    assert (
        main(["--model", "tiny", "--toy", "--dry_run", "--preset_lora_path", "nowhere"])
        == 0
    )
    assert MODEL.default_trainable == "dit"


@pytest.mark.parametrize("flag", ["preset_lora_path", "lora_checkpoint"])
def test_a_lora_that_was_trained_for_another_variant_is_warned_of_once(
    flag: str, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = preset_for(here, "dit", tmp_path / "first")
    _, header = read_tensors(trained)
    path = tmp_path / "other.safetensors"
    header = {**header, "variant": "edit", "base": json.dumps({"digest": "another"})}
    header.pop(CHECKSUM, None)
    save_file(load_file(trained), path, header)
    capsys.readouterr()
    train(here, max_steps=1, lora_alpha=4.0, **{flag: path})
    said = capsys.readouterr().err
    assert said.count(f"{path}: was trained for variant edit, not base\n") == 1
    assert said.count(f"{path}: was trained on other weights of dit") == 1
