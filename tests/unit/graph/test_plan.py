"""A plan says which units run in which stage, what each stage loads, which values are
cached, and what is refused before loading.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypedDict

import pytest
from dstrain import Task, UsageError, split_units
from dstrain.graph import FunctionSpec, Plan, Step, make_plan
from dstrain.plugin import (
    Column,
    ExpertSchedule,
    FlowMatchSchedule,
    InferenceOnly,
    Measured,
    PipelineSpec,
    Unit,
)
from hypothesis import HealthCheck, given, reject, settings, strategies as st
from PIL.Image import Image
from torch import Tensor

from tests.support.units import declared


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
def jitter_loss(predict: Any, jittered: Tensor) -> Tensor: ...
def teacher_loss(predict: Any, input_latents: Tensor, *, teacher: Any) -> Tensor: ...
def seeded_loss(predict: Any, input_latents: Tensor, seed: int) -> Tensor: ...
def constrain_latents(
    latents: Tensor, timestep: Tensor, noise: Tensor, hint_emb: Tensor | None = None
) -> Any: ...


TASK = Task.of("sft", loss)
GUIDED = Task.of("guided", loss, ("positive", "negative"))
WIRING = PipelineSpec(
    family="toy",
    variant="base",
    components=("dit", "text_encoder", "tokenizer", "vae", "hint_encoder", "big"),
    units=tuple(
        Unit(f)
        for f in (
            encode_text,
            encode_hint,
            join_prompt,
            encode_image,
            jitter,
            make_ids,
            unused_encode,
        )
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
    inputs: frozenset[str] = INPUTS,
    task: Task = TASK,
    spec: PipelineSpec = WIRING,
) -> Plan:
    return make_plan(spec, inputs, task, trainables)


# Stages.


def test_a_unit_that_uses_nothing_trained_is_cached() -> None:
    made = plan("dit")
    assert names(made.cached_steps) == [
        "encode_text",
        "join_prompt",
        "encode_image",
        "make_ids",
    ]
    assert made.train_steps == ()
    assert made.cached_values == ("ids", "input_latents", "prompt_emb")


def test_a_unit_that_uses_the_trained_component_runs_in_training_as_do_users_of_its_outputs() -> (
    None
):
    made = plan("text_encoder")
    assert names(made.cached_steps) == ["encode_image", "make_ids"]
    assert names(made.train_steps) == ["encode_text", "join_prompt"]
    assert made.cached_values == ("ids", "input_latents", "prompt")
    assert made.cached_kinds == {
        "ids": "tensor",
        "input_latents": "tensor",
        "prompt": "str",
    }


def test_a_unit_that_uses_rng_runs_in_training() -> None:
    made = plan("dit", task=Task.of("jitter", jitter_loss))
    assert names(made.train_steps) == ["jitter"]
    assert "input_latents" in made.cached_values
    assert "jittered" not in made.cached_values


def test_a_unit_that_uses_a_configuration_is_cached_and_loads_no_weights() -> None:
    made = plan("dit")
    assert "make_ids" in names(made.cached_steps)
    assert made.configs["data_process"] == ("dit",)
    assert "dit" not in made.components["data_process"]


def test_components_follow_from_what_the_functions_use() -> None:
    made = plan("dit")
    assert made.components["data_process"] == ("text_encoder", "tokenizer", "vae")
    assert made.components["train"] == ("dit",)
    assert made.components[""] == ("dit", "text_encoder", "tokenizer", "vae")
    assert (made.configs["train"], made.configs[""]) == ((), ())


def test_steps_load_what_their_functions_use() -> None:
    made = plan("dit")
    assert made.components_of(made.cached_steps) == set(made.components["data_process"])
    (encoding,) = [s for s in made.cached_steps if s.unit.name == "encode_image"]
    assert made.components_of([encoding]) == {"vae"}


def test_unused_units_never_run_in_any_task_nor_load_anything() -> None:
    for task in (TASK, GUIDED):
        made = plan("dit", inputs=INPUTS | {"negative_prompt"}, task=task)
        assert set(made.unused_units) == {"jitter", "unused_encode"}
        assert not {"jitter", "unused_encode"} & {
            *names(made.cached_steps),
            *names(made.train_steps),
        }
        assert "big" not in made.components[""]


def test_dotted_trainables_count_as_their_component() -> None:
    assert plan("text_encoder.layers.3", "text_encoder.layers.4") == plan(
        "text_encoder"
    )


def test_inputs_of_constrain_latents_are_cached() -> None:
    spec = replace(
        WIRING,
        constrain_latents=constrain_latents,
    )
    assert "hint_emb" in plan("dit", inputs=INPUTS | {"hint"}, spec=spec).cached_values
    assert "hint_emb" not in plan("dit", spec=spec).cached_values


def test_the_plan_is_the_same_for_any_order_of_inputs_and_calls_no_unit() -> None:
    assert plan("dit", inputs=frozenset(sorted(INPUTS, reverse=True))) == plan("dit")


# Absent values.


def test_an_absent_optional_value_is_not_read() -> None:
    step = next(
        step for step in plan("dit").cached_steps if step.unit.name == "join_prompt"
    )
    assert dict(step.inputs) == {"text_emb": "text_emb"}
    step = next(
        step
        for step in plan("dit", inputs=INPUTS | {"hint"}).cached_steps
        if step.unit.name == "join_prompt"
    )
    assert dict(step.inputs) == {"text_emb": "text_emb", "hint_emb": "hint_emb"}


def test_skips_are_kept_with_their_reason_and_cascade_through_required_inputs_only() -> (
    None
):
    with pytest.raises(UsageError):
        plan("dit", inputs=frozenset({"prompt", "height"}))
    made = plan(
        "dit",
        inputs=frozenset({"prompt", "height"}),
        task=Task.of("promptly", lambda predict: None),
    )
    assert made.skipped["encode_image"] == "absent: input_image"
    assert (
        made.skipped["jitter"] == "absent: input_latents (unit encode_image is skipped)"
    )
    assert "encode_hint" in made.skipped
    assert "join_prompt" not in made.skipped


def test_an_absent_required_input_is_refused_naming_reader_column_and_skipped_unit() -> (
    None
):
    with pytest.raises(UsageError) as caught:
        plan("dit", inputs=frozenset({"input_image", "height"}))
    text = str(caught.value)
    assert "predict" in text
    assert "'prompt'" in text
    assert "join_prompt" in text
    with pytest.raises(UsageError, match="column 'image'"):
        plan("dit", inputs=frozenset({"prompt", "height"}))


def test_an_absent_input_may_say_what_to_do() -> None:
    def imitate(predict: Any, trajectory: Tensor) -> Tensor: ...

    column = Column("trajectory", "tensors", advice="make it")
    task = Task.of("imitate", imitate, inputs={"trajectory": column})
    with pytest.raises(UsageError, match="no column 'trajectory'") as caught:
        plan("dit", task=task)
    assert caught.value.help_lines == ("make it",)


def test_an_absent_input_is_named_once() -> None:
    class Both(TypedDict):
        both: Tensor

    def blend(input_latents: Tensor, unread: Tensor) -> Both: ...
    def blend_loss(predict: Any, both: Tensor) -> Tensor: ...

    spec = replace(WIRING, units=(*WIRING.units, Unit(blend)))
    with pytest.raises(UsageError) as caught:
        plan(
            "dit",
            inputs=frozenset({"prompt", "height"}),
            spec=spec,
            task=Task.of("blend", blend_loss),
        )
    assert str(caught.value).count("column 'image'") == 1


# Trainables.


def test_an_unknown_trainable_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot train 'text_encodr'"):
        plan("text_encodr")


def test_training_what_no_step_uses_is_refused_naming_what_a_step_uses() -> None:
    with pytest.raises(
        UsageError, match="cannot train 'hint_encoder': task sft does"
    ) as caught:
        plan("dit", "hint_encoder")
    assert "dit" in caught.value.help_lines[0]


# Branches.


def test_the_negative_branch_is_computed_only_if_the_task_needs_it() -> None:
    inputs = INPUTS | {"negative_prompt"}
    assert not [
        key
        for key in plan("dit", inputs=inputs).cached_values
        if key.startswith("negative")
    ]
    made = plan("dit", inputs=inputs, task=GUIDED)
    assert {"prompt_emb", "negative.prompt_emb"} <= set(made.cached_values)


def test_units_run_once_per_branch_only_where_a_value_differs_by_branch() -> None:
    made = plan("dit", inputs=INPUTS | {"negative_prompt", "hint"}, task=GUIDED)
    assert names(made.cached_steps) == [
        *[
            "encode_text",
            "encode_text",
            "encode_hint",
            "join_prompt",
            "join_prompt",
            "encode_image",
            "make_ids",
        ]
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


def test_a_unit_that_uses_the_branch_runs_once_per_branch() -> None:
    def make_branch_ids(height: int, *, branch: str) -> Ids: ...

    units = tuple(unit for unit in WIRING.units if unit.name != "make_ids")
    spec = replace(WIRING, units=(*units, Unit(make_branch_ids)))
    made = plan("dit", inputs=INPUTS | {"negative_prompt"}, task=GUIDED, spec=spec)
    assert {"ids", "negative.ids"} <= set(made.cached_values)


def test_a_unit_runs_for_no_branch_that_nothing_reads() -> None:
    def label_loss(predict: Any, input_latents: Tensor, hint_emb: Tensor) -> Tensor: ...
    def encode_branch(hint: Image, *, branch: str, hint_encoder: Any) -> Hint: ...

    others = tuple(unit for unit in WIRING.units if unit.name != "encode_hint")
    spec = replace(
        WIRING,
        units=(encode_branch, *(one for one in others if one.name != "join_prompt")),
        model_fn=lambda noisy_latents, timestep, text_emb: noisy_latents,
    )
    task = Task.of("labelled", label_loss, ("positive", "negative"))
    made = plan(
        "hint_encoder",
        inputs=INPUTS | {"negative_prompt", "hint"},
        task=task,
        spec=spec,
    )
    branches = [(step.unit.name, step.branch) for step in made.train_steps]
    assert branches == [("encode_branch", "positive")]
    assert names(made.cached_steps).count("encode_text") == 2


def test_an_absent_negative_input_is_refused_when_the_task_needs_that_branch() -> None:
    with pytest.raises(UsageError, match="negative_prompt"):
        plan("dit", task=GUIDED)


# Losses.


def test_an_input_of_the_loss_alone_is_cached() -> None:
    made = plan("dit", inputs=INPUTS | {"seed"}, task=Task.of("seeded", seeded_loss))
    assert made.cached_kinds["seed"] == "int"
    with pytest.raises(UsageError, match="seeded_loss needs seed"):
        plan("dit", task=Task.of("seeded", seeded_loss))


def test_a_loss_that_uses_an_unknown_component_is_refused() -> None:
    with pytest.raises(UsageError, match="teacher"):
        plan("dit", task=Task.of("taught", teacher_loss))


def test_a_component_of_the_loss_alone_is_loaded_in_stage_2() -> None:
    spec = replace(WIRING, components=(*WIRING.components, "teacher"))
    made = plan("dit", task=Task.of("taught", teacher_loss), spec=spec)
    assert made.components["train"] == ("dit", "teacher")


def test_the_kind_of_an_input_reads_as_that_of_an_output() -> None:
    def embed(hints: list[Image], *, dit: Any) -> Ids: ...

    units = tuple(unit for unit in WIRING.units if unit.name != "make_ids")
    inputs = {**WIRING.inputs, "hints": Column("hints", "images")}
    spec = replace(WIRING, units=(*units, Unit(embed)), inputs=inputs)
    assert (
        plan("dit", inputs=INPUTS | {"hints"}, spec=spec).cached_kinds["hints"]
        == "list[image]"
    )


# Experts.


EXPERTS = replace(
    WIRING,
    components=(*WIRING.components, "dit2"),
    experts=ExpertSchedule("dit", {"dit": (875, 1000), "dit2": (0, 875)}),
)


def test_the_expert_that_is_trained_is_the_one_that_is_loaded() -> None:
    first, second = plan("dit", spec=EXPERTS), plan("dit2", spec=EXPERTS)
    assert (first.components["train"], second.components["train"]) == (
        ("dit",),
        ("dit2",),
    )
    assert (first.cached_steps, first.cached_values) == (
        second.cached_steps,
        second.cached_values,
    )


def test_what_acts_beside_an_expert_is_loaded_with_it() -> None:
    def steered(
        noisy_latents: Any, timestep: Any, prompt_emb: Any, *, dit: Any, adapter: Any
    ) -> Any: ...

    spec = replace(
        EXPERTS,
        components=(*EXPERTS.components, "adapter", "adapter2"),
        model_fn=steered,
        experts=replace(
            EXPERTS.experts,
            companions={"adapter": {"dit": "adapter", "dit2": "adapter2"}},
        ),
    )
    for trained, loaded in {
        "dit": ("dit", "adapter"),
        "dit2": ("dit2", "adapter2"),
        "adapter": ("dit", "adapter"),
        "adapter2": ("dit2", "adapter2"),
    }.items():
        assert plan(trained, spec=spec).components["train"] == loaded


def test_training_something_else_loads_every_expert() -> None:
    assert plan("text_encoder", spec=EXPERTS).components["train"] == (
        "dit",
        "text_encoder",
        "tokenizer",
        "dit2",
    )


def test_a_unit_that_uses_the_denoiser_runs_in_training_whichever_expert_is_trained() -> (
    None
):
    def embed_size(height: int, *, dit: Any) -> Ids: ...

    units = tuple(unit for unit in WIRING.units if unit.name != "make_ids")
    spec = replace(EXPERTS, units=(*units, Unit(embed_size)))
    assert (
        names(plan("dit", spec=spec).train_steps)
        == names(plan("dit2", spec=spec).train_steps)
        == ["embed_size"]
    )


# The law, on random graphs: bodies are lists of what was read, so equal results mean
# equal programs.


def node(name: str, reads: Mapping[str, bool], borrows: tuple[str, ...]) -> Unit:
    def body(**arguments: Any) -> dict[str, Any]:
        read = [[key, list(value)] for key, value in sorted(arguments.items())]
        return {name: [name, *read]}

    return declared(f"unit_{name}", body, reads, borrows, {name: "str"})


@st.composite
def graphs(
    draw: Callable[..., Any],
) -> tuple[PipelineSpec, Task, frozenset[str], tuple[str, ...]]:
    inputs = ["a", "b", "c", "not_a"]
    components = ("m", "n", "o")
    known, units = ["a", "b", "c"], []
    for i in range(draw(st.integers(2, 7))):
        reads = draw(st.dictionaries(st.sampled_from(known), st.booleans(), max_size=3))
        borrows = tuple(
            draw(
                st.sets(
                    st.sampled_from([*components, "rng", "m_config", "branch"]),
                    max_size=2,
                )
            )
        )
        units.append(node(f"v{i}", reads, tuple(sorted(borrows))))
        known.append(f"v{i}")
    reads = draw(st.dictionaries(st.sampled_from(known), st.booleans(), max_size=3))
    spec = replace(
        WIRING,
        components=components,
        units=tuple(units),
        model_fn=FunctionSpec(
            "predict", print, MappingProxyType(reads | {known[-1]: False}), ("m",)
        ),
        inputs={name: Column(name) for name in inputs},
        latent_shape=FunctionSpec("shape", print),
        cfg_inputs={"a": "not_a"},
    )
    loss_reads = draw(
        st.dictionaries(st.sampled_from(known), st.booleans(), max_size=2)
    )
    branches = draw(st.sampled_from([("positive",), ("positive", "negative")]))
    task = Task(
        "random", FunctionSpec("loss", print, MappingProxyType(loss_reads)), branches
    )
    present = frozenset(draw(st.sets(st.sampled_from(["b", "c"]))) | {"a", "not_a"})
    try:
        used = make_plan(spec, present, task, ()).components[""]
    except UsageError:
        reject()
    return spec, task, present, tuple(sorted(draw(st.sets(st.sampled_from(used)))))


def execute(steps: tuple[Step, ...], values: dict[str, Any]) -> dict[str, Any]:
    for step in steps:
        reads = {name: values[key] for name, key in step.inputs.items()}
        made = step.unit.run(
            reads, {name: (name, step.branch) for name in step.unit.components}
        )
        values |= {step.outputs[name]: value for name, value in made.items()}
    return values


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
@given(graphs())
def test_stages_compute_what_one_run_does_and_all_that_can_be_cached_is(
    graph: tuple[PipelineSpec, Task, frozenset[str], tuple[str, ...]],
) -> None:
    spec, task, present, trained = graph
    made = make_plan(spec, present, task, trained)
    start = {name: f"<{name}>" for name in present}
    stage_1 = execute(made.cached_steps, dict(start))
    stage_2 = execute(
        made.train_steps, {key: stage_1[key] for key in made.cached_values}
    )
    order = {unit.name: i for i, unit in enumerate(spec.units)}
    whole = execute(
        tuple(
            sorted(
                (*made.cached_steps, *made.train_steps),
                key=lambda step: order[step.unit.name],
            )
        ),
        dict(start),
    )
    wanted = {
        name for name in (*spec.model_fn.inputs, *task.loss.inputs) if name in whole
    }
    assert {name: stage_2[name] for name in wanted} == {
        name: whole[name] for name in wanted
    }
    _assert_stages_are_right(made, trained)


def _assert_stages_are_right(made: Plan, trained: tuple[str, ...]) -> None:
    live_makes = {key for step in made.train_steps for key in step.outputs.values()}
    for step in made.train_steps:
        assert {"rng", *trained} & set(step.unit.components) or live_makes & set(
            step.inputs.values()
        ), step.unit.name
    for step in made.cached_steps:
        assert not {"rng", *trained} & set(step.unit.components), step.unit.name
        assert not live_makes & set(step.inputs.values()), step.unit.name
    assert not set(made.components["data_process"]) & set(trained)
    assert not live_makes & set(made.cached_values)


def test_units_are_split_by_what_is_trained_as_a_plan_splits_them() -> None:
    units = (encode_text, encode_hint, join_prompt, encode_image, jitter)

    def stages(*trainables: str) -> tuple[list[str], list[str]]:
        split = split_units(units, trainables)
        return (
            [unit.name for unit in split.data_process],
            [unit.name for unit in split.train],
        )

    frozen = ["encode_text", "encode_hint", "join_prompt", "encode_image"]
    assert stages("dit") == (frozen, ["jitter"])
    assert stages("text_encoder.layers.3", "dit") == (
        ["encode_hint", "encode_image"],
        ["encode_text", "join_prompt", "jitter"],
    )
    assert split_units(units, "vae").train == (Unit(encode_image), Unit(jitter))
    assert stages("dit,vae ") == (frozen[:3], ["encode_image", "jitter"])
    assert split_units(units, "dit, vae") == split_units(units, ["dit", "vae"])
    with pytest.raises(UsageError, match="hides names"):
        split_units([len], "dit")


def test_units_of_a_spec_are_split_by_components_that_it_has() -> None:
    spec = WIRING
    assert split_units(spec, "dit") == split_units(spec.units, "dit")
    with pytest.raises(UsageError, match=r"trainables: .* no component 'ditt'.*'dit'"):
        split_units(spec, "vae,ditt")
