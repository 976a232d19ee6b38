"""A generation's pipeline is chosen by its flags and inputs before anything is loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import GenerateConfig, StateError, UsageError
from dstrain.config import LoraFile, NamedInput, parse_lora
from dstrain.generation.inputs import SAMPLING, flag_values
from dstrain.generation.source import check_used, open_source

from tests.support.family import build
from tests.support.poisoned_memory import poisoned_memory

pytestmark = pytest.mark.usefixtures("tiny")


def config(**changes: Any) -> GenerateConfig:
    given = {"model": "tiny", "output": Path("x.png"), "prompt": "dog", "toy": True}
    return GenerateConfig(**{**given, **changes})


@pytest.mark.parametrize(
    ("inputs", "variant", "chosen"),
    [
        (("prompt",), None, "base"),
        (("prompt", "mood"), None, "other"),
        (("prompt",), "other", "other"),
    ],
)
def test_the_variant_is_the_one_named_or_the_one_that_uses_the_inputs(
    inputs: tuple[str, ...], variant: str | None, chosen: str
) -> None:
    with open_source(config(variant=variant), inputs) as source:
        assert source.spec.variant == chosen


def test_a_toy_is_in_a_folder_that_is_gone_afterwards() -> None:
    with open_source(config(), ("prompt",)) as source:
        files = [path for model in source.models for path in model.files().paths]
        assert files
        assert all(path.exists() for path in files)
        assert source.load().spec is source.spec
    assert not any(path.exists() for path in files)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16)]
)
def test_components_have_the_dtype_of_the_precision(
    precision: str, dtype: torch.dtype
) -> None:
    with open_source(config(mixed_precision=precision), ("prompt",)) as source:
        assert source.dtype == dtype


@pytest.mark.parametrize("names", ["text_encoder", "dit,text_encoder,vae"])
def test_offloaded_components_generate_the_same(names: str) -> None:
    pictures = []
    for offload in (None, names):
        with open_source(config(offload_models=offload)) as source:
            pipeline = source.load()
        with poisoned_memory() as seen:
            pictures.append(pipeline(prompt="dog", num_inference_steps=3).tobytes())
            # The denoiser stays for all steps.
            loads = len(names.split(",")) if offload else 0
            assert (seen.loads, seen.now) == (loads, 0)
    assert pictures[0] == pictures[1]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("text_encodr", "'text_encodr' is no component of tiny base"),
        ("tokenizer", "has no effect: tokenizer has no weights"),
    ],
)
def test_what_has_no_weights_cannot_be_offloaded(name: str, what: str) -> None:
    with (
        pytest.raises(UsageError) as caught,
        open_source(config(offload_models=name)) as source,
    ):
        source.load()
    assert f"--offload_models: {what}" in str(caught.value)


def test_a_lora_file_that_is_absent_is_named(tmp_path: Path) -> None:
    lora = LoraFile(tmp_path / "no.safetensors")
    with (
        pytest.raises(StateError, match=r"no\.safetensors: no such LoRA file"),
        open_source(config(lora=(lora,)), ("prompt",)),
    ):
        pass


def test_a_name_before_a_lora_file_that_is_no_component_is_told(tmp_path: Path) -> None:
    lora = parse_lora(f"dti={tmp_path}/no.safetensors")
    with (
        pytest.raises(StateError, match=r"'dti' is no component: .*dit") as caught,
        open_source(config(lora=(lora,)), ("prompt",)),
    ):
        pass
    assert f"dti={tmp_path}/no.safetensors: no such LoRA file" in str(caught.value)


def test_an_input_that_is_not_used_is_refused_by_the_flag_that_gives_it() -> None:
    spec = build("base")
    given = config(negative_prompt="cat", input=(NamedInput("mood", "calm"),))
    check_used(given, spec, {"prompt", "negative_prompt", "mood"})
    with pytest.raises(
        UsageError, match="--negative_prompt: has no effect: guidance is"
    ):
        check_used(given, spec, {"prompt", "mood"})
    given = replace(given, negative_prompt=None)
    with pytest.raises(UsageError, match=r"--input mood: .* base does not use it"):
        check_used(given, spec, {"prompt"})


def test_only_options_that_are_given_reach_the_sampler() -> None:
    assert flag_values(config(seed=3, guidance_scale=2.0), SAMPLING) == {
        "seed": 3,
        "guidance_scale": 2.0,
    }
    assert flag_values(config(num_inference_steps=4), SAMPLING) == {
        "seed": 0,
        "num_inference_steps": 4,
    }
