"""A plan is shown as a page and as data."""

import json
from dataclasses import replace
from typing import Any, TypedDict

import pytest
from dstrain import Task
from dstrain.graph import Plan, as_text, make_plan
from dstrain.graph.render import as_data
from dstrain.plugin import Column, ExpertSchedule, FlowMatchSchedule, PipelineSpec
from PIL.Image import Image
from torch import Tensor


class Prompt(TypedDict):
    prompt_emb: Tensor


class Latents(TypedDict):
    input_latents: Tensor


class Hint(TypedDict):
    hint_emb: Tensor


class Unread(TypedDict):
    unread: Tensor


# The bodies of these are never called.
def encode_prompt(prompt: str, *, text_encoder: Any, device: Any) -> Prompt: ...
def encode_image(input_image: Image, *, vae: Any) -> Latents: ...
def encode_hint(hint: Image, *, vae: Any) -> Hint: ...
def encode_unread(prompt: str) -> Unread: ...
def predict(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    hint_emb: Tensor | None = None,
    *,
    dit: Any,
    vae_config: Any,
) -> Tensor: ...
def constrain(
    latents: Tensor, timestep: Tensor, noise: Tensor, input_latents: Tensor
) -> Any: ...
def shape(input_image: Image) -> tuple[int, ...]: ...
def guide(positive: Tensor, negative: Tensor, scale: float) -> Tensor: ...
def loss(predict: Any, input_latents: Tensor, *, rng: Any) -> Tensor: ...


class Denoising(FlowMatchSchedule):
    """It does not predict the velocity."""

    predicts: Any = "epsilon"


INPUTS = frozenset({"prompt", "negative_prompt", "input_image"})


def planned(trained: str) -> Plan:
    spec = PipelineSpec(
        family="toy",
        variant="base",
        components=("dit", "dit2", "text_encoder", "vae"),
        units=(encode_prompt, encode_image, encode_hint, encode_unread),
        model_fn=predict,
        decoders=(),
        inputs={
            "prompt": Column("prompt"),
            "negative_prompt": Column("negative_prompt"),
            "input_image": Column("image", "image"),
            "hint": Column("hint", "image"),
        },
        schedule=FlowMatchSchedule(shift=3.0),
        latent_shape=shape,
        apply_guidance=guide,
        constrain_latents=constrain,
        experts=ExpertSchedule("dit", {"dit": (500, 1000), "dit2": (0, 500)}),
        cfg_inputs={"prompt": "negative_prompt"},
    )
    task = Task.of("guided", loss, ("positive", "negative"))
    return make_plan(spec, INPUTS, task, (trained,))


@pytest.mark.parametrize("is_split", [True, False])
def test_the_page_shows_what_runs_is_loaded_and_stored(is_split: bool) -> None:
    plan = planned("text_encoder")
    kept = {"dit": "fp8", "text_encoder": "int8"}
    text = as_text(plan, kept, is_split)
    title, first, stored, second, idle, weights = text.split("\n\n")
    words = ("toy base", "guided", "text_encoder", "positive and negative")
    assert all(word in title for word in words)
    heading, unit = first.splitlines()
    assert heading.endswith("loads vae")
    assert unit.split("   uses ") == [
        "    encode_image(input_image) -> input_latents",
        "vae",
    ]
    assert stored.split()[-9:] == [
        *("=", "input_latents", "tensor"),
        *("=", "negative_prompt", "str"),
        *("=", "prompt", "str"),
    ]
    heading, *functions = second.splitlines()
    assert heading.endswith("loads dit, dit2, text_encoder, vae (configuration only)")
    assert [line.strip().split("   uses ") for line in functions] == [
        ["encode_prompt(prompt) -> prompt_emb", "text_encoder"],
        ["encode_prompt(negative_prompt) -> negative.prompt_emb", "text_encoder"],
        ["predict(noisy_latents, timestep, prompt_emb)", "dit or dit2, vae_config"],
        ["constrain(latents, timestep, noise, input_latents)"],
        ["loss(predict, input_latents) -> loss"],
    ]
    units = [line.split(":")[0].strip() for line in idle.splitlines()[1:]]
    assert units == ["encode_hint", "encode_unread"]
    assert weights.split()[-4:] == ["dit", "fp8", "text_encoder", "int8"]
    assert ("stage" in text) == is_split
    noisy = replace(plan, spec=replace(plan.spec, schedule=Denoising()))
    assert "    loss(predict, input_latents) -> loss of epsilon\n" in as_text(noisy)
    assert as_data(plan, kept)["kept"] == kept


def test_the_data_is_json_with_the_standard_names_in_a_stable_order() -> None:
    data = json.loads(json.dumps(as_data(planned("text_encoder"))))
    assert list(data) == [
        "family", "variant", "task", "branches", "inputs", "trainables",
        "data_process", "train", "cached_values", "components", "configs", "kept",
        "skipped", "idle",
    ]  # fmt: skip
    assert data["branches"] == ["positive", "negative"]
    assert data["inputs"] == sorted(INPUTS)
    assert data["train"][1] == {
        "unit": "encode_prompt",
        "version": 0,
        "branch": "negative",
        "inputs": {"prompt": "negative_prompt"},
        "outputs": {"prompt_emb": "negative.prompt_emb"},
        "components": ["text_encoder", "device"],
    }
    assert data["cached_values"]["input_latents"] == "tensor"
    assert data["components"]["data_process"] == ["vae"]
    assert data["components"]["unsplit"] == ["dit", "dit2", "text_encoder", "vae"]
    assert data["configs"]["train"] == ["vae"]
    assert list(data["skipped"]) == ["encode_hint"]
    assert data["idle"] == ["encode_unread"]
    assert data["kept"] == {}
