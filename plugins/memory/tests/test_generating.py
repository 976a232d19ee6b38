"""An image made with the memory flags of training is the one made without, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
from dstrain import UsageError, generate
from dstrain.config import LoraFile

from tests.support.generating import generation, pixels
from tests.support.poisoned_memory import poisoned_memory
from tests.support.runs import train

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
    flags: dict[str, Any],
    with_lora: bool,
    here: Path,
    lora: LoraFile,
    tmp_path: Path,
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
