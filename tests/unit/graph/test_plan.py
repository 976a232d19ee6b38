"""A plan says what runs, is loaded and is cached in which stage, or why it cannot be."""

from dataclasses import replace
from typing import Any, TypedDict

import pytest
from dstrain import Task, UsageError, split_units
from dstrain.graph import Plan, Step, make_plan
from dstrain.graph.unit import Unit
from dstrain.plugin import (
    Column,
    ExpertSchedule,
    FlowMatchSchedule,
    InferenceOnly,
    Measured,
    PipelineSpec,
)
from PIL.Image import Image
from torch import Tensor


class Text(TypedDict):
    text_emb: Tensor


class Hint(TypedDict):
    hint_emb: Tensor


class Prompt(TypedDict):
    prompt_emb: Tensor


class Latents(TypedDict):
    input_latents: Tensor


class Jitter(TypedDict):
    jittered: Tensor


class Ids(TypedDict):
    ids: Tensor


class Unread(TypedDict):
    unread: Tensor


# The bodies of these are never called.
def encode_text(prompt: str, *, text_encoder: Any, tokenizer: Any) -> Text: ...
def encode_hint(hint: Image, *, hint_encoder: Any) -> Hint: ...
def join_prompt(text_emb: Tensor, hint_emb: Tensor | None = None) -> Prompt: ...
def encode_image(input_image: Image, *, vae: Any) -> Latents: ...
def jitter(input_latents: Tensor, *, rng: Any) -> Jitter: ...
def make_ids(height: int, *, dit_config: Any) -> Ids: ...
def unused_encode(input_image: Image, *, big: Any) -> Unread: ...
def predict(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    ids: Tensor,
    *,
    dit: Any,
) -> Tensor: ...
def shape(height: int) -> tuple[int, ...]: ...
def apply_guidance(positive: Tensor, negative: Tensor, scale: float) -> Tensor: ...
def loss(
    predict: Any, input_latents: Tensor, *, timestep_sampler: Any, rng: Any
) -> Tensor: ...
def teacher_loss(predict: Any, input_latents: Tensor, *, teacher: Any) -> Tensor: ...


TASK = Task.of("sft", loss)
GUIDED = Task.of("guided", loss, ("positive", "negative"))
WIRING = PipelineSpec(
    family="toy",
    variant="base",
    components=("dit", "text_encoder", "tokenizer", "vae", "hint_encoder", "big"),
    units=(
        encode_text,
        encode_hint,
        join_prompt,
        encode_image,
        jitter,
        make_ids,
        unused_encode,
    ),
    model_fn=predict,
    decoders=(),
    inputs={
        "prompt": Column("prompt"),
        "negative_prompt": Column("negative_prompt"),
        "input_image": Column("image", "image"),
        "hint": Column("hint_image", "image"),
        "height": Measured("input_image", "height"),
        "seed": Column("seed", "integer"),
        "scale": InferenceOnly(),
    },
    schedule=FlowMatchSchedule(shift=3.0),
    latent_shape=shape,
    apply_guidance=apply_guidance,
    cfg_inputs={"prompt": "negative_prompt"},
)
INPUTS = frozenset({"prompt", "input_image", "height"})


def names(steps: tuple[Step, ...]) -> list[str]:
    return [step.unit.name for step in steps]


def plan(
    *trainables: str,
    inputs: frozenset[str] | set[str] = INPUTS,
    task: Task = TASK,
    spec: PipelineSpec = WIRING,
) -> Plan:
    return make_plan(spec, frozenset(inputs), task, trainables)


# Stages.


def test_what_is_frozen_is_cached_and_nothing_is_loaded_twice() -> None:
    made = plan("dit")
    assert names(made.cached_steps) == [
        "encode_text",
        "join_prompt",
        "encode_image",
        "make_ids",
    ]
    assert made.train_steps == ()
    assert made.cached_values == ("ids", "input_latents", "prompt_emb")
    assert made.components == {
        "data_process": ("text_encoder", "tokenizer", "vae"),
        "train": ("dit",),
        "": ("dit", "text_encoder", "tokenizer", "vae"),
    }
    assert made.configs == {"data_process": ("dit",), "train": (), "": ()}
    assert made.components_of(made.cached_steps) == set(made.components["data_process"])
    (encoding,) = [s for s in made.cached_steps if s.unit.name == "encode_image"]
    assert made.components_of([encoding]) == {"vae"}


def test_what_uses_a_trained_component_or_its_outputs_runs_in_training() -> None:
    made = plan("text_encoder.layers.3", "text_encoder.layers.4")
    assert made == plan("text_encoder")
    assert names(made.cached_steps) == ["encode_image", "make_ids"]
    assert names(made.train_steps) == ["encode_text", "join_prompt"]
    assert made.cached_kinds == {
        "ids": "tensor",
        "input_latents": "tensor",
        "prompt": "str",
    }


# Absent values.


def test_skips_have_a_reason_and_cascade_through_required_inputs_only() -> None:
    task = Task.of("promptly", lambda predict: None)
    made = plan("dit", inputs={"prompt", "height"}, task=task)
    assert made.skipped["encode_image"].endswith("input_image")
    assert "encode_image" in made.skipped["jitter"]
    assert "encode_hint" in made.skipped
    assert "join_prompt" not in made.skipped


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({"input_image", "height"}, ["predict", "'prompt'", "join_prompt"]),
        ({"prompt", "height"}, ["loss", "'image'", "encode_image"]),
        ({"height"}, ["'image'", "'prompt'"]),
    ],
)
def test_an_absent_required_input_is_refused_naming_reader_column_and_skipped_unit(
    inputs: set[str], named: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        plan("dit", inputs=inputs)
    assert [word for word in named if word not in str(caught.value)] == []


def test_an_absent_input_may_say_what_to_do() -> None:
    def imitate(predict: Any, trajectory: Tensor) -> Tensor: ...

    column = Column("trajectory", "tensors", advice="make it")
    task = Task.of("imitate", imitate, inputs={"trajectory": column})
    with pytest.raises(UsageError, match="'trajectory'") as caught:
        plan("dit", task=task)
    assert caught.value.help_lines == ("make it",)


# Trainables.


@pytest.mark.parametrize("name", ["text_encodr", "hint_encoder"])
def test_training_what_no_step_uses_is_refused_with_what_one_does(name: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}'") as caught:
        plan("dit", name)
    assert "dit" in caught.value.help_lines[0]


# Branches.


def test_units_run_once_per_branch_only_where_a_value_differs_by_branch() -> None:
    inputs = INPUTS | {"negative_prompt", "hint"}
    assert "negative" not in " ".join(plan("dit", inputs=inputs).cached_values)
    made = plan("dit", inputs=inputs, task=GUIDED)
    assert {"prompt_emb", "negative.prompt_emb"} <= set(made.cached_values)
    assert names(made.cached_steps) == [
        "encode_text",
        "encode_text",
        "encode_hint",
        "join_prompt",
        "join_prompt",
        "encode_image",
        "make_ids",
    ]
    joins = [step for step in made.cached_steps if step.unit.name == "join_prompt"]
    assert [dict(step.inputs) for step in joins] == [
        {"text_emb": "text_emb", "hint_emb": "hint_emb"},
        {"text_emb": "negative.text_emb", "hint_emb": "hint_emb"},
    ]
    assert [dict(step.outputs) for step in joins] == [
        {"prompt_emb": "prompt_emb"},
        {"prompt_emb": "negative.prompt_emb"},
    ]


def test_the_inputs_of_both_branches_are_cached_when_the_encoder_is_trained() -> None:
    made = plan("text_encoder", inputs=INPUTS | {"negative_prompt"}, task=GUIDED)
    assert {"prompt", "negative_prompt"} <= set(made.cached_values)
    assert made.cached_kinds["negative_prompt"] == "str"


def test_an_absent_negative_input_is_refused_when_the_task_needs_that_branch() -> None:
    with pytest.raises(UsageError, match="'negative_prompt'"):
        plan("dit", task=GUIDED)


# Losses.


def test_a_component_of_the_loss_alone_is_loaded_in_stage_2() -> None:
    task = Task.of("taught", teacher_loss)
    with pytest.raises(UsageError, match="'teacher'"):
        plan("dit", task=task)
    spec = replace(WIRING, components=(*WIRING.components, "teacher"))
    assert plan("dit", task=task, spec=spec).components["train"] == ("dit", "teacher")


# Experts.


EXPERTS = replace(
    WIRING,
    components=(*WIRING.components, "dit2"),
    experts=ExpertSchedule("dit", {"dit": (875, 1000), "dit2": (0, 875)}),
)


def test_the_expert_that_is_trained_is_the_one_that_is_loaded() -> None:
    first, second = plan("dit", spec=EXPERTS), plan("dit2", spec=EXPERTS)
    assert first.components["train"] == ("dit",)
    assert second.components["train"] == ("dit2",)
    assert plan("dit", "dit2", spec=EXPERTS).components["train"] == ("dit", "dit2")
    assert first.cached_steps == second.cached_steps
    assert first.cached_values == second.cached_values
    neither = plan("text_encoder", spec=EXPERTS).components["train"]
    assert neither == ("dit", "text_encoder", "tokenizer", "dit2")


def test_what_acts_beside_an_expert_is_loaded_with_it() -> None:
    def steered(
        noisy_latents: Any, timestep: Any, prompt_emb: Any, *, dit: Any, adapter: Any
    ) -> Any: ...

    beside = {"adapter": {"dit": "adapter", "dit2": "adapter2"}}
    spec = replace(
        EXPERTS,
        components=(*EXPERTS.components, "adapter", "adapter2"),
        model_fn=steered,
        experts=replace(EXPERTS.experts, companions=beside),
    )
    for trained, loaded in {
        "dit": ("dit", "adapter"),
        "dit2": ("dit2", "adapter2"),
        "adapter": ("dit", "adapter"),
        "adapter2": ("dit2", "adapter2"),
    }.items():
        assert plan(trained, spec=spec).components["train"] == loaded


def test_units_are_split_by_what_is_trained_as_a_plan_splits_them() -> None:
    units = (encode_text, encode_hint, join_prompt, encode_image, jitter)

    def stages(trainables: str | list[str]) -> list[list[str]]:
        return [[unit.name for unit in one] for one in split_units(units, trainables)]

    frozen = ["encode_text", "encode_hint", "join_prompt", "encode_image"]
    assert stages("dit") == [frozen, ["jitter"]]
    assert stages(["text_encoder.layers.3", "dit"]) == [
        ["encode_hint", "encode_image"],
        ["encode_text", "join_prompt", "jitter"],
    ]
    assert stages("dit, vae ") == [frozen[:3], ["encode_image", "jitter"]]
    assert split_units(units, "vae").train == (Unit(encode_image), Unit(jitter))
    with pytest.raises(UsageError, match="len"):
        split_units([len], "dit")
    assert split_units(WIRING, "dit") == split_units(WIRING.units, "dit")
    with pytest.raises(UsageError, match=r"trainables: .*'ditt'.*'dit'"):
        split_units(WIRING, "vae,ditt")
