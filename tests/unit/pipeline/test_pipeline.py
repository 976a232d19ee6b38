"""Calls of a pipeline generate what was asked for; what is wrong with them, or with loading
it, is said in words.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import Pipeline, UsageError

pytestmark = pytest.mark.usefixtures("tiny")


def test_an_unknown_argument_is_refused_with_the_nearest(pipe: Pipeline) -> None:
    with pytest.raises(
        UsageError, match=r"pipe\(\): takes no argument 'promt'; did you mean 'prompt'"
    ):
        pipe(promt="dog")
    with pytest.raises(UsageError, match="needs prompt_emb"):
        pipe()


def test_several_prompts_give_one_image_each_as_if_alone(pipe: Pipeline) -> None:
    def made(**arguments: Any) -> Any:
        return pipe(num_inference_steps=2, height=16, width=16, **arguments)

    def pixels(image: Any) -> bytes:
        return image.tobytes()

    alone = [made(prompt="dog", seed=3), made(prompt="cat", seed=4)]
    both = made(prompt=["dog", "cat"], seed=[3, 4])
    assert [pixels(one) for one in both] == [pixels(one) for one in alone]
    same_seed = made(prompt=("dog", "cat"), seed=3)
    assert pixels(same_seed[0]) == pixels(alone[0])
    assert pixels(same_seed[1]) != pixels(alone[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": 3}, "prompt: expected text"),
        ({"prompt": ["dog", 3]}, "prompt: expected text"),
        ({"prompt": "dog", "height": "64"}, "height: expected a whole number"),
        ({"prompt": ["dog"], "seed": [1, 2]}, "seed: has 2 entries for 1 prompt"),
        ({"prompt": "dog", "num_inference_steps": 0}, "expected 1 or more"),
        ({"promt": "dog"}, "did you mean 'prompt'"),
        ({"prompt": "dog", "on_step": 3}, "on_step: expected a function"),
    ],
)
def test_an_argument_that_cannot_be_used_is_said_in_words(
    arguments: dict[str, Any], message: str, pipe: Pipeline
) -> None:
    with pytest.raises(UsageError, match=message):
        pipe(**arguments)


def test_an_input_of_another_variant_is_refused_with_that_one(pipe: Pipeline) -> None:
    with pytest.raises(UsageError, match="takes no argument 'mood'") as caught:
        pipe(prompt="dog", mood="calm")
    assert "an input of other; load it with variant=NAME" in str(caught.value)


@pytest.mark.parametrize(
    ("latents", "got"),
    [
        (torch.zeros(1, 16, 2, 3), r"\[1, 16, 2, 3\]"),
        (torch.zeros(4, 2, 3), r"\[4, 2, 3\]"),
        (torch.zeros(2, 4, 2, 3), r"\[2, 4, 2, 3\]"),
        ([0.0], "list"),
    ],
)
def test_latents_of_another_shape_are_refused_with_what_each_axis_is(
    latents: Any, got: str, pipe: Pipeline
) -> None:
    wanted = r"shape \[1, 4, 2, 3\] \(1, channels, height 16 / 8, width 24 / 8\)"
    with pytest.raises(UsageError, match=f"latents: .*{wanted}, got {got}"):
        pipe(prompt="dog", height=16, width=24, latents=latents)


def test_errors_of_loading_name_parameters(model: Path) -> None:
    def message(**given: Any) -> str:
        with pytest.raises(UsageError) as caught:
            Pipeline.from_pretrained(str(model), **given)
        return str(caught.value)

    said = message(variant="othr")
    assert "from_pretrained(variant=...): tiny has no variant 'othr'" in said
    said = message(tile_size=256)
    assert "from_pretrained(tile_size=...): has no effect without tiled=True" in said
    assert "from_pretrained(tiled=...): has no effect" in message(tiled=True)
    assert "hub: expected 'modelscope' or 'huggingface'" in message(hub="hf")
    for dtype in ("bf16", torch.int8):
        assert "torch_dtype: expected torch.float32" in message(torch_dtype=dtype)
    for device in ("cudaa", "cuda:99"):
        said = message(device=device)
        assert f"from_pretrained(device=...): {device!r} cannot be used here" in said


def test_a_lora_needs_a_file_and_a_number_as_scale(pipe: Pipeline) -> None:
    given: Any
    for given, words in (
        ((None,), "path: expected a file, got None"),
        (("a", "1"), "scale: expected a finite number, got '1'"),
        (("a", float("nan")), "scale: expected a finite number, got nan"),
    ):
        with pytest.raises(UsageError, match=rf"load_lora\(\): {words}"):
            pipe.load_lora(*given)
