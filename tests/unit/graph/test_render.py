"""A plan is printed as a page and as data, with everything that runs, is loaded and is
stored.
"""

import json
from collections.abc import Callable
from typing import Any, TypedDict

import pytest
from dstrain import Task
from dstrain.graph import Plan, as_text, make_plan
from dstrain.graph.render import as_data
from dstrain.plugin import Column, ExpertSchedule, FlowMatchSchedule, PipelineSpec, Unit
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


GUIDED = Task.of("guided", loss, ("positive", "negative"))
SPEC = PipelineSpec(
    family="toy",
    variant="base",
    components=("dit", "dit2", "text_encoder", "vae"),
    units=tuple(
        Unit(one) for one in (encode_prompt, encode_image, encode_hint, encode_unread)
    ),
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
INPUTS = frozenset({"prompt", "negative_prompt", "input_image"})
TEXT = """\
toy base, task guided, trains text_encoder, branches positive and negative

stage 1  guided:data_process   loads vae
    encode_image(input_image) -> input_latents   uses vae

    stored between the stages
    = input_latents    tensor
    = negative_prompt  str
    = prompt           str

stage 2  guided:train   loads dit, dit2, text_encoder, vae (configuration only)
    encode_prompt(prompt) -> prompt_emb   uses text_encoder
    encode_prompt(negative_prompt) -> negative.prompt_emb   uses text_encoder
    predict(noisy_latents, timestep, prompt_emb)   uses dit or dit2, vae_config
    constrain(latents, timestep, noise, input_latents)
    loss(predict, input_latents) -> loss

not run
    encode_hint: absent: hint
    encode_unread: nothing needs it
"""


@pytest.fixture
def planned() -> Callable[[str], Plan]:
    return lambda trained: make_plan(SPEC, INPUTS, GUIDED, (trained,))


def test_the_page_shows_what_runs_is_loaded_is_stored_and_does_not_run(
    planned: Callable[[str], Plan],
) -> None:
    assert as_text(planned("text_encoder")) == TEXT


def test_the_expert_that_is_trained_is_shown_by_its_name(
    planned: Callable[[str], Plan],
) -> None:
    text = as_text(planned("dit2"))
    assert (
        "predict(noisy_latents, timestep, prompt_emb)   uses dit2, vae_config" in text
    )
    assert "loads dit2, vae (configuration only)\n" in text


def test_how_weights_are_kept_is_shown_where_it_is_not_as_they_are_loaded(
    planned: Callable[[str], Plan],
) -> None:
    plan = planned("text_encoder")
    kept = {"dit": "fp8", "text_encoder": "int8"}
    end = "\nhow weights are kept\n    dit           fp8\n    text_encoder  int8\n"
    assert as_text(plan, kept) == TEXT + end
    assert as_data(plan, kept)["kept"] == kept
    assert as_data(plan)["kept"] == {}


def test_a_stage_without_steps_says_so() -> None:
    units = (Unit(encode_image),)
    spec = PipelineSpec(**{**vars(SPEC), "units": units, "model_fn": predict_image})
    task = Task.of("sft", loss)
    plan = make_plan(spec, frozenset({"input_image"}), task, ("vae",))
    assert "loads nothing\n    (nothing to do)\n" in as_text(plan)


def predict_image(noisy_latents: Tensor, timestep: Tensor, *, dit: Any) -> Tensor: ...


def test_the_data_is_json_with_the_standard_names_in_a_stable_order(
    planned: Callable[[str], Plan],
) -> None:
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
    assert data["skipped"] == {"encode_hint": "absent: hint"}
    assert data["idle"] == ["encode_unread"]


def test_a_run_that_is_not_split_has_no_stages(planned: Callable[[str], Plan]) -> None:
    split, whole = (
        as_text(planned("text_encoder"), None, way) for way in (True, False)
    )
    assert "stage" not in whole
    headings = {
        "stage 1  guided:data_process ": "each step, first ",
        "stage 2  guided:train ": "each step, then ",
        "stored between the stages": "what --feature_cache would store, to compute it once",
    }
    for of_stages, of_steps in headings.items():
        split = split.replace(of_stages, of_steps)
    assert split == whole
