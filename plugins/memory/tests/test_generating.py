"""An image made with the memory flags of training is the one made without, bit for bit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import GenerateConfig, UsageError, generate
from dstrain.config import LoraFile, with_run_options
from dstrain.generation.pipeline_source import open_source

from tests.support import family
from tests.support.experts import copied_denoiser, let_tiny_have_experts
from tests.support.family import weights_of
from tests.support.generating import generation, pixels
from tests.support.poisoned_memory import poisoned_memory
from tests.support.runs import project, train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def lora(here: Path, tmp_path_factory: pytest.TempPathFactory) -> LoraFile:
    output = tmp_path_factory.mktemp("lora") / "out"
    train(here, output_path=output, max_steps=2, learning_rate=0.3)
    (path,) = output.glob("*.safetensors")
    return LoraFile(path)


@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize(
    "flags",
    [
        {"blocks_to_swap": 1},
        {"enable_model_cpu_offload": True, "offload_models": "text_encoder,vae"},
    ],
    ids=["one block", "everything"],
)
def test_an_image_is_the_same_wherever_weights_lie(
    flags: dict[str, Any], with_lora: bool, here: Path, lora: LoraFile, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"num_inference_steps": 2, "lora": (lora,) * with_lora}
    images = []
    for number, way in enumerate(({}, flags)):
        config = generation(here / "model", tmp_path / f"{number}.png", **more, **way)
        with poisoned_memory() as seen:
            generate(config)
        assert (seen.loads > 0, seen.now) == (bool(way), 0)
        images.append(pixels(config.output))
    assert images[0] == images[1]


def test_a_component_has_one_place(here: Path, tmp_path: Path) -> None:
    both: dict[str, Any] = {"blocks_to_swap": 1, "offload_models": "dit"}
    config = generation(here / "model", tmp_path / "a.png", **both)
    with pytest.raises(
        UsageError, match=r"--blocks_to_swap and --offload_models .*dit"
    ):
        generate(config)


def of_run(folder: Path, **changes: Any) -> GenerateConfig:
    given = {"output": folder / "a.png", "run": folder / "out", **changes}
    return GenerateConfig(model="tiny", prompt="dog", overwrite=True, **given)


def image_of(config: GenerateConfig, steps: int = 1) -> bytes:
    """The pixels of the image of these options."""
    generate(replace(config, num_inference_steps=steps))
    return pixels(config.output)


def test_the_expert_that_a_run_stored_is_the_one_that_is_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it has the denoiser's name; with both, that is the name of the other."""
    here = project(tmp_path)
    let_tiny_have_experts(monkeypatch)
    files = weights_of(here / "model")
    own = copied_denoiser(here / "model", here / "model/transformer_2")
    others = [files["text_encoder"], files["vae"]]
    alone, both = (json.dumps([*one, *others]) for one in ([own], [own, files["dit"]]))
    train(here, max_steps=1, fp8_models="dit", model_paths=alone)
    config = with_run_options(of_run(here, model_paths=both))
    with open_source(config, ["prompt"]) as source:
        (keeper,) = source.find().keepers.all
    assert [*keeper.components] == ["dit2"]
    # Each is on the device while it predicts.
    offloaded = replace(config, offload_models="dit,dit2")
    assert image_of(offloaded, 8) == image_of(config, 8)
    # An image needs no second denoiser.
    spec = replace(family.BASE, components=(*family.BASE.components, "dit2"))
    monkeypatch.setitem(family.PIPELINES, "base", spec)
    unused = generation(here / "model", here / "a.png", offload_models="dit2")
    with pytest.raises(UsageError) as caught, open_source(unused):
        pass
    assert caught.value.where == "--offload_models"
