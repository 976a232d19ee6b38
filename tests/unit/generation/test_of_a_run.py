"""`dstrain generate --run` takes the options and newest weights of a training run."""

import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import GenerateConfig, StateError, UsageError, generate
from dstrain.cli.main import main
from dstrain.config import LoraFile, with_run_options
from dstrain.generation.pipeline_source import open_source

from tests.support.experts import copied_denoiser, let_tiny_have_experts
from tests.support.family import weights_of
from tests.support.generating import generation, pixels, texts
from tests.support.runs import config as config_of, project, train, training_run

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return project(tmp_path)


def of_run(here: Path, **changes: Any) -> GenerateConfig:
    given = {"output": here / "a.png", "run": here / "out", **changes}
    return GenerateConfig(model="tiny", prompt="dog", overwrite=True, **given)


def image_of(config: GenerateConfig, steps: int = 1) -> bytes:
    """The pixels of the image of these options."""
    generate(replace(config, num_inference_steps=steps, overwrite=True))
    return pixels(config.output)


def test_a_run_gives_model_files_variant_and_its_newest_lora(here: Path) -> None:
    train(here, max_steps=2, save_steps=1)
    newer, older = (LoraFile(here / f"out/step-{step}.safetensors") for step in (2, 1))
    config = generation(here / "model", here / "a.png", lora=(newer,))
    by_files = image_of(config)
    assert image_of(of_run(here)) == by_files
    assert image_of(replace(config, lora=(older,))) != by_files


def test_a_run_gives_its_model_in_one_word_and_a_new_one_replaces_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    train(here, max_steps=1, model_paths=None, model_id="model")
    line = "generate --run out --prompt dog --num_inference_steps 1 --output"
    words = shlex.split(line)
    assert main([*words, "a.png"]) == 0
    shutil.copytree("model", "copy")
    assert main([*words, "b.png", "--model_id", "copy"]) == 0
    assert pixels(Path("a.png")) == pixels(Path("b.png"))
    shutil.rmtree("model")
    given = json.dumps(list(weights_of(Path("copy")).values()))
    options = ["--model_paths", given, "--tokenizer_path", "copy/tokenizer"]
    assert main([*words, "c.png", *options]) == 0
    assert pixels(Path("a.png")) == pixels(Path("c.png"))


def test_components_trained_in_full_take_the_place_of_their_files(here: Path) -> None:
    train(here, max_steps=1, trainable_models="dit,text_encoder")
    files = weights_of(here / "model")
    for name in ("dit", "text_encoder"):
        files[name] = [str(here / f"out/step-1.{name}.safetensors")]
    config = generation(
        here / "model",
        here / "a.png",
        model_paths=json.dumps(list(files.values())),
        family_options={"tokenizer_path": str(here / "model/tokenizer")},
    )
    assert image_of(of_run(here)) == image_of(config)


@pytest.mark.parametrize(
    ("trained", "loras", "presets"),
    [
        ({}, 1, ["dit"]),
        ({"trainable_models": "dit"}, 0, []),
        ({"trainable_models": "text_encoder"}, 0, ["dit"]),
    ],
)
def test_a_preset_is_in_the_weights_as_in_training_unless_it_was_trained(
    trained: dict[str, Any], loras: int, presets: list[str], here: Path
) -> None:
    train(here, max_steps=1, learning_rate=0.3, output_path=here / "first")
    preset = here / "first/step-1.safetensors"
    given = {"preset_lora_path": preset, "max_steps": 1}
    train(here, **given, **trained)
    image_of(of_run(here))
    with open_source(with_run_options(of_run(here)), ["prompt"]) as source:
        assert len(source.config.lora) == loras
        assert list(source.presets) == presets
        generating = source.load().components["dit"]
    if presets:
        run = training_run(config_of(here, **given, **trained))
        parts = (generating, run.module.pipeline.components["dit"])
        ours, theirs = (one.blocks[0].to_out for one in parts)
        if loras:
            ours, theirs = ours.base_layer, theirs.base_layer
        assert torch.equal(ours.weight, theirs.weight)


def test_an_option_of_a_plugin_that_is_gone_is_refused_where_it_changes_the_image(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adds = {"options": {"mist": None, "swap": None, "grain": 1}, "generate": {}}
    adds["generate"] = {"mist": "", "grain": ""}
    monkeypatch.setattr("dstrain.installed._absent", lambda: {"gone": adds})
    train(here, max_steps=1)
    place = here / "out/logs/config.json"
    recorded = json.loads(place.read_text())
    words = ["generate", "--run", str(here / "out"), "--prompt", "dog", "--overwrite"]
    words += ["--output", str(here / "a.png"), "--num_inference_steps", "1"]
    for mist, code in ((None, 0), ("dit:fp8", 2)):
        own = {"mist": mist, "swap": 3, "grain": 1}
        place.write_text(json.dumps({**recorded, **own}))
        assert main(words) == code
    said = " ".join(capsys.readouterr().err.split())
    assert "config.json:mist: no such option is installed" in said
    assert "./plugins/gone" in said


def test_a_folder_without_a_run_and_another_family_are_refused(here: Path) -> None:
    for name in ("data", "nothing"):
        with pytest.raises(StateError, match=str(here / name)):
            generate(of_run(here, run=here / name))
    train(here, max_steps=1)
    with pytest.raises(UsageError, match=r"other, .*out .* tiny"):
        generate(replace(of_run(here), model="other"))
    for path in [*(here / "out").glob("*.safetensors"), here / "out/run.json"]:
        path.unlink()
    with pytest.raises(StateError, match=str(here / "out")):
        generate(of_run(here))


def test_the_newest_step_whose_files_all_exist_is_taken(here: Path) -> None:
    trained = {"trainable_models": "dit,text_encoder"}
    out = train(here, max_steps=2, save_steps=1, **trained)
    newest = "step-2.dit.safetensors, step-2.text_encoder.safetensors"

    def taken() -> str:
        image_of(of_run(here))
        return texts(here / "a.png")["model"].removeprefix("tiny base, ")

    assert taken() == newest
    (out / "step-2.text_encoder.safetensors").unlink()
    assert taken() == newest.replace("-2", "-1")
    (out / "step-1.dit.safetensors").unlink()
    gone = "step-2.text_encoder.safetensors, step-1.dit.safetensors"
    with pytest.raises(StateError, match=gone) as caught:
        taken()
    (advice,) = caught.value.help_lines
    assert main(shlex.split(advice.partition("dstrain ")[2])) == 0
    assert taken() == newest


@pytest.mark.parametrize("trained", [("dit",), ("dit2",), ("dit", "dit2")])
def test_a_trained_expert_takes_the_place_of_its_own_files(
    trained: Sequence[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_tiny_have_experts(monkeypatch)
    files = weights_of(here / "model")
    own = {name: copied_denoiser(here / "model", here / name) for name in ("a", "b")}
    given = json.dumps([own["a"], own["b"], files["text_encoder"], files["vae"]])
    tokenizer = {"tokenizer_path": str(here / "model/tokenizer")}
    names = {"trainable_models": ",".join(trained), "model_paths": given}
    train(here, max_steps=1, family_options=tokenizer, **names)
    with open_source(with_run_options(of_run(here)), ["prompt"]) as source:
        found = source.find().files
    for name, place in (("dit", own["a"]), ("dit2", own["b"])):
        want = [Path(path) for path in place]
        if name in trained:
            suffix = f".{name}" if len(trained) > 1 else ""
            want = [here / f"out/step-1{suffix}.safetensors"]
        assert list(found[name].paths) == want
