"""A pipeline spec whose names do not fit is refused, naming the places that disagree."""

from collections.abc import Callable
from typing import Any, TypedDict

import pytest
from dstrain import Task, UsageError
from dstrain.graph import Input
from dstrain.plugin import (
    Column,
    EntryCount,
    ExpertSchedule,
    FlowMatchSchedule,
    Measured,
    PipelineSpec,
)
from torch import Tensor


class Prompt(TypedDict):
    prompt_emb: Tensor


class Joined(TypedDict):
    joined: Tensor


class Latents(TypedDict):
    input_latents: Tensor


class Overwritten(TypedDict):
    input_image: Tensor


def encode_prompt(prompt: str, *, text_encoder: Any) -> Prompt: ...
def encode_again(prompt: str, *, text_encoder: Any) -> Prompt: ...
def encode_image(input_image: Any, *, vae: Any) -> Latents: ...
def join(prompt_emb: Tensor, input_latents: Tensor | None = None) -> Joined: ...
def misspells(promt: str) -> Joined: ...
def borrows_unknown(prompt: str, *, text_encoders: Any) -> Joined: ...
def overwrites(prompt: str) -> Overwritten: ...
def predict(
    noisy_latents: Tensor, timestep: Tensor, prompt_emb: Tensor, *, dit: Any
) -> Tensor: ...
def predict_more(
    noisy_latents: Tensor, timestep: Tensor, prompt_embs: Tensor, *, dit: Any
) -> Tensor: ...
def backwards(timestep: Any, noisy_latents: Any, prompt_emb: Any) -> Any: ...
def shape() -> tuple[int, ...]: ...
def drawn_shape(*, rng: Any) -> tuple[int, ...]: ...
def hold(latents: Any, timestep: Any, noise: Any, input_image: Any) -> Any: ...
def hold_first(latents: Any, timestep: Any, noise: Any, first_latents: Any) -> Any: ...
def finish(latents: Tensor, joined: Tensor) -> Latents: ...
def paint(latents: Tensor, input_image: Any) -> Overwritten: ...
def decode_nothing(prompt: str) -> Joined: ...
def loss(predict: Any, prompt_emb: Tensor) -> Tensor: ...
def apply_guidance(positive: Tensor, negative: Tensor, scale: float) -> Tensor: ...


INPUTS: dict[str, Input] = {
    "prompt": Column("prompt"),
    "negative_prompt": Column("negative_prompt"),
    "input_image": Column("image", "image"),
}
MASK = Column("mask", "image", of="picture")
LOW = {"high": (875, 1000), "low": (0, 875)}


def build(*functions: Callable[..., Any], **changes: Any) -> PipelineSpec:
    """A toy variant of these units; `changes` replace fields of the pipeline spec."""
    fields: dict[str, Any] = {
        "family": "toy",
        "variant": "base",
        "components": ("dit", "text_encoder", "vae"),
        "units": functions or (encode_prompt,),
        "model_fn": predict,
        "decoders": (),
        "inputs": INPUTS,
        "schedule": FlowMatchSchedule(shift=3.0),
        "latent_shape": shape,
        "apply_guidance": apply_guidance,
    }
    return PipelineSpec(**(fields | changes))


@pytest.mark.parametrize(
    ("functions", "named"),
    [
        ((encode_prompt, encode_again), "encode_prompt encode_again 'prompt_emb'"),
        ((encode_prompt, overwrites), "overwrites 'input_image'"),
        ((encode_prompt, join, encode_image), "join 'input_latents'"),
        ((encode_prompt, misspells), "misspells 'promt' 'prompt'"),
        ((encode_prompt, borrows_unknown), "borrows_unknown 'text_encoder'"),
        ((encode_prompt, encode_image, encode_image), "encode_image"),
        ((shape,), "test_spec.shape TypedDict"),
    ],
    ids=[
        "a second maker of a value",
        "an input that is made",
        "a read before its maker, though optional",
        "an unknown input, with the nearest",
        "an unknown component, with the nearest",
        "two units of one name",
        "a function that is no unit",
    ],
)
def test_units_that_do_not_fit_are_refused_by_name(
    functions: tuple[Callable[..., Any], ...], named: str
) -> None:
    with pytest.raises(UsageError) as caught:
        build(*functions)
    assert [word for word in named.split() if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("'prompt_embs'", {"model_fn": predict_more}),
        ("noisy_latents, timestep", {"model_fn": backwards}),
        ("'first_latents'", {"constrain_latents": hold_first}),
        ("latents, timestep, noise", {"constrain_latents": shape}),
        ("latents: ", {"decoders": (decode_nothing,)}),
        ("finish: 'joined'", {"decoders": (paint, finish)}),
        ("<lambda>: 'rng'", {"model_fn": lambda noisy_latents, timestep, *, rng: 0}),
        ("'rng'", {"constrain_latents": lambda latents, timestep, noise, *, rng: 0}),
        ("drawn_shape: 'rng'", {"latent_shape": drawn_shape}),
        ("cfg_inputs: 'unprompt'", {"cfg_inputs": {"prompt": "unprompt"}}),
        ("padded: 'prompt_embs'", {"padded": {"prompt_embs": 1}}),
        ("defaults: 'guidance'", {"defaults": {"guidance": 2.0}}),
        ("unused_parameters: 'te'", {"unused_parameters": {"te": ("head.*",)}}),
        ("'video'", {"inputs": {**INPUTS, "height": Measured("video", "height")}}),
        ("'picture'", {"inputs": {**INPUTS, "mask": MASK}}),
        (
            "mask: 'picture'",
            {"inputs": {**INPUTS, "picture": Column("picture"), "mask": MASK}},
        ),
        (
            "mask: 'picture'",
            {"inputs": {**INPUTS, "mask": MASK, "picture": Column("a", "image")}},
        ),
        (
            "frames: 'prompts'",
            {
                "inputs": {
                    **INPUTS,
                    "frames": Column("a", "images", entries=EntryCount("prompts")),
                }
            },
        ),
        ("'high'", {"experts": ExpertSchedule("dit", LOW)}),
        (
            "'beside'",
            {
                "experts": ExpertSchedule(
                    "dit", {"dit": (0, 1000)}, {"adapter": {"dit": "beside"}}
                )
            },
        ),
        ("test_spec.predict: padded", {"family": "", "padded": {"prompt_embs": 1}}),
    ],
)
def test_a_field_of_nothing_is_refused(named: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=named):
        build(**changes)


def test_functions_ask_for_the_expert_and_what_acts_beside_it_by_one_name() -> None:
    assert build(
        components=("high", "low", "text_encoder"), experts=ExpertSchedule("dit", LOW)
    )
    experts = ExpertSchedule(
        "dit", LOW, {"adapter": {"high": "adapter_1", "low": "adapter_2"}}
    )
    assert experts.roles == {
        "dit": ("high", "low"),
        "adapter": ("adapter_1", "adapter_2"),
    }
    assert experts.component("adapter", "low") == "adapter_2"
    assert experts.component("dit", "low") == "low"
    assert experts.expert_of("adapter_2") == experts.expert_of("low") == "low"
    assert experts.expert_of("vae") == ""
    assert [experts.choose(at) for at in (1000, 875, 874, 0)] == [
        *("high", "high", "low", "low")
    ]


def test_the_inputs_of_a_task_join_the_variants_table_unless_both_differ() -> None:
    seed = Column("seed", "integer")
    task = Task.of("distill", loss, inputs={"seed": seed})
    joined = build().with_task_inputs(task)
    assert joined.inputs == {**INPUTS, "seed": seed}
    assert joined.with_task_inputs(task) == joined
    other = Task.of("distill", loss, inputs={"prompt": Column("prompt", "number")})
    with pytest.raises(UsageError, match=r"distill: .*'prompt'.* toy base"):
        build().with_task_inputs(other)


def test_a_variant_has_no_input_that_nothing_uses() -> None:
    spec = build(cfg_inputs={"prompt": "negative_prompt"})
    with pytest.raises(UsageError, match=r"toy base: .*'input_image'"):
        spec.named("toy", "base")
    height = {"height": Measured("input_image", "height")}
    reader: dict[str, Any]
    for reader in (
        {"units": (encode_prompt, encode_image)},
        {"constrain_latents": hold},
        {"latent_shape": lambda input_image: ()},
        {"decoders": (paint,)},
        {"inputs": INPUTS | height, "latent_shape": lambda height: ()},
    ):
        whole = build(**reader, cfg_inputs=spec.cfg_inputs)
        assert whole.named("toy", "base").where == "toy base"
