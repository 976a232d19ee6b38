"""A spec that is bound to components runs the units of a plan, and calls model_fn with the
conditions of one branch.
"""

from dataclasses import replace
from typing import Any, TypedDict

import pytest
import torch
from dstrain import SFT, Pipeline, Task, UsageError
from dstrain.graph import make_plan
from dstrain.plugin import (
    Column,
    ExpertSchedule,
    FlowMatchSchedule,
    LatentConstraint,
    PipelineSpec,
    Unit,
)
from torch import Tensor


class Prompt(TypedDict):
    prompt_emb: Tensor


class Latents(TypedDict):
    input_latents: Tensor


class Sided(TypedDict):
    label: str


def encode_prompt(prompt: str, *, text_encoder: Any, dtype: torch.dtype) -> Prompt:
    return {"prompt_emb": text_encoder(prompt).to(dtype)}


def encode_number(number: int, *, vae: Any, dit_config: Any) -> Latents:
    return {"input_latents": vae(number) * dit_config["patch"]}


def label_side(prompt: str, *, branch: str) -> Sided:
    return {"label": f"{branch} {prompt}"}


def predict(
    noisy_latents: Tensor,
    timestep: Tensor,
    prompt_emb: Tensor,
    scale: int = 1,
    *,
    dit: Any,
) -> Tensor:
    return dit(noisy_latents) + prompt_emb * scale


def shape() -> tuple[int, ...]:
    return (1, 4)


def constrain_latents(
    latents: Tensor, timestep: Tensor, noise: Tensor, input_latents: Tensor
) -> LatentConstraint:
    return LatentConstraint(input_latents, timestep * 0)


def apply_guidance(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    return negative + scale * (positive - negative)


WIRING = PipelineSpec(
    family="toy",
    variant="base",
    components=("dit", "text_encoder", "vae"),
    units=(Unit(encode_prompt), Unit(encode_number), Unit(label_side)),
    model_fn=predict,
    decoders=(),
    inputs={
        "prompt": Column("prompt"),
        "negative_prompt": Column("negative_prompt"),
        "number": Column("number", "integer"),
        "scale": Column("scale", "integer"),
    },
    schedule=FlowMatchSchedule(shift=3.0),
    latent_shape=shape,
    apply_guidance=apply_guidance,
    cfg_inputs={"prompt": "negative_prompt"},
)
RECORD: Any = None
COMPONENTS = {
    "dit": lambda noisy_latents: noisy_latents * 2,
    "text_encoder": lambda prompt: torch.full((1, 4), float(len(prompt))),
    "vae": lambda number: torch.full((1, 4), float(number)),
}
VALUES = {"prompt": "four", "negative_prompt": "", "number": 3}
GUIDED = Task.of(
    "guided", lambda predict, input_latents, label: None, ("positive", "negative")
)


def pipeline(spec: PipelineSpec = WIRING, **components: Any) -> Pipeline:
    return Pipeline(
        spec, RECORD, dict(components or COMPONENTS), {"dit": {"patch": 10}}
    )


def ready(pipe: Pipeline, task: Task = GUIDED) -> dict[str, Any]:
    values: dict[str, Any] = dict(VALUES)
    plan = make_plan(pipe.spec, frozenset(VALUES), task, ())
    pipe.run((*plan.cached_steps, *plan.train_steps), values)
    return values


def test_units_add_what_they_make_to_the_table_per_branch() -> None:
    def predict(
        noisy_latents: Tensor, timestep: Tensor, prompt_emb: Tensor, label: str
    ) -> Tensor:
        return noisy_latents

    values = ready(pipeline(replace(WIRING, model_fn=predict)))
    assert values["prompt_emb"].tolist() == [[4.0] * 4]
    assert values["negative.prompt_emb"].tolist() == [[0.0] * 4]
    assert values["input_latents"].tolist() == [[30.0] * 4]
    assert (values["label"], values["negative.label"]) == ("positive four", "negative ")


def test_units_leave_what_they_read_as_it_was() -> None:
    values = ready(pipeline())
    assert {name: values[name] for name in VALUES} == VALUES


def test_model_fn_gets_the_conditions_of_the_branch_asked_for() -> None:
    pipe = pipeline()
    values = ready(pipe)
    noisy_latents, timestep = torch.ones(1, 4), torch.tensor([500.0])
    assert pipe.predict(values, noisy_latents, timestep).tolist() == [[6.0] * 4]
    assert pipe.predict(values, noisy_latents, timestep, "negative").tolist() == [
        [2.0] * 4
    ]
    assert pipe.predict(values | {"scale": 2}, noisy_latents, timestep).tolist() == [
        [10.0] * 4
    ]


def test_a_component_that_is_not_loaded_is_named() -> None:
    with pytest.raises(UsageError, match="vae is not loaded"):
        ready(
            pipeline(
                **{name: part for name, part in COMPONENTS.items() if name != "vae"}
            )
        )


def test_a_configuration_is_bound_without_its_component() -> None:
    pipe = pipeline(
        **{name: part for name, part in COMPONENTS.items() if name != "dit"}
    )
    assert ready(pipe)["input_latents"].tolist() == [[30.0] * 4]


def test_without_constrain_latents_nothing_is_constrained() -> None:
    latents, timestep = torch.ones(1, 4), torch.tensor([500.0])
    constrained = pipeline().constrain_latents({})(latents, timestep, latents)
    assert constrained.latents is latents
    assert constrained.timestep is timestep
    assert constrained.mask is None


def test_hold_reads_the_values_it_names() -> None:
    pipe = pipeline(
        replace(
            WIRING,
            constrain_latents=constrain_latents,
        )
    )
    constrained = pipe.constrain_latents(ready(pipe, SFT))(
        torch.ones(1, 4), torch.tensor([500.0]), torch.zeros(1, 4)
    )
    assert constrained.latents.tolist() == [[30.0] * 4]
    assert constrained.timestep.tolist() == [0.0]


def experts(model_fn: Any = predict) -> Pipeline:
    parts = COMPONENTS | {"dit2": lambda noisy_latents: noisy_latents * 3}
    experts = ExpertSchedule("dit", {"dit": (875, 1000), "dit2": (0, 875)})
    spec = replace(
        WIRING,
        components=(*WIRING.components, "dit2"),
        experts=experts,
        model_fn=model_fn,
    )
    return pipeline(spec, **parts)


def test_the_expert_is_chosen_by_the_timestep() -> None:
    values = {"prompt_emb": torch.zeros(1, 4)}
    assert experts().predict(
        values, torch.ones(1, 4), torch.tensor([875.0])
    ).tolist() == [[2.0] * 4]
    assert experts().predict(
        values, torch.ones(1, 4), torch.tensor([874.0])
    ).tolist() == [[3.0] * 4]


def test_each_sample_of_a_batch_is_predicted_by_the_expert_for_its_timestep() -> None:
    seen: list[tuple[float, ...]] = []

    def predict_all(
        noisy_latents: Tensor, timestep: Tensor, prompt_emb: Tensor, *, dit: Any
    ) -> Tensor:
        seen.append(
            tuple(
                timestep.flatten(1).amax(1).tolist()
                if timestep.ndim > 1
                else timestep.tolist()
            )
        )
        return dit(noisy_latents) + prompt_emb

    values = {"prompt_emb": torch.tensor([[10.0], [20.0], [30.0]])}
    noisy_latents = torch.tensor([[1.0], [2.0], [3.0]])
    made = experts(predict_all).predict(
        values, noisy_latents, torch.tensor([900.0, 100.0, 880.0])
    )
    assert made.tolist() == [[12.0], [26.0], [36.0]]
    assert seen == [(900.0, 880.0), (100.0,)]
    one = experts(predict_all).predict(
        values, noisy_latents, torch.tensor([[0.0, 900.0], [0.0, 100.0], [880.0, 0.0]])
    )
    assert torch.equal(one, made)


def test_a_prediction_of_another_shape_than_the_latents_is_refused() -> None:
    def predict_tokens(noisy_latents: Tensor, timestep: Tensor, *, dit: Any) -> Tensor:
        return dit(noisy_latents)[:, :1]

    pipe = pipeline(replace(WIRING, model_fn=predict_tokens))
    with pytest.raises(UsageError, match=r"shape \[1, 1\]; the latents have \[1, 4\]"):
        pipe.predict({}, torch.ones(1, 4), torch.tensor([1.0]))


def test_the_only_expert_loaded_serves_every_timestep() -> None:
    pipe = experts()
    del pipe.components["dit"]
    values = {"prompt_emb": torch.zeros(1, 4)}
    assert pipe.predict(values, torch.ones(1, 4), torch.tensor([999.0])).tolist() == [
        [3.0] * 4
    ]


def test_model_fn_with_experts_may_ask_for_the_context() -> None:
    def predict_in_dtype(
        noisy_latents: Tensor,
        timestep: Tensor,
        prompt_emb: Tensor,
        *,
        dit: Any,
        dtype: torch.dtype,
    ) -> Tensor:
        return dit(noisy_latents).to(dtype)

    values = {"prompt_emb": torch.zeros(1, 4)}
    assert (
        experts(predict_in_dtype)
        .predict(values, torch.ones(1, 4), torch.tensor([1.0]))
        .dtype
        == torch.float32
    )


def test_a_component_named_like_the_role_is_not_taken_for_an_expert() -> None:
    def predict_beside(
        noisy_latents: Tensor,
        timestep: Tensor,
        prompt_emb: Tensor,
        *,
        dit: Any,
        dit_adapter: Any,
    ) -> Tensor:
        return dit(noisy_latents) + dit_adapter

    pipe = experts()
    spec = replace(
        pipe.spec,
        components=(*pipe.spec.components, "dit_adapter"),
        model_fn=predict_beside,
    )
    pipe = Pipeline(spec, RECORD, pipe.components | {"dit_adapter": 1.0})
    made = pipe.predict(
        {"prompt_emb": torch.zeros(1, 4)}, torch.ones(1, 4), torch.tensor([1.0])
    )
    assert made.tolist() == [[4.0] * 4]


def test_model_fn_gets_the_branch_it_is_called_for() -> None:
    def predict_side(
        noisy_latents: Tensor,
        timestep: Tensor,
        prompt_emb: Tensor,
        *,
        dit: Any,
        branch: str,
    ) -> Tensor:
        return noisy_latents if branch == "positive" else -noisy_latents

    pipe = pipeline(replace(WIRING, model_fn=predict_side))
    made = pipe.predict(ready(pipe), torch.ones(1, 4), torch.tensor([1.0]), "negative")
    assert made.tolist() == [[-1.0] * 4]


def test_frozen_values_are_not_cast_or_moved_by_running_units() -> None:
    pipe = pipeline()
    pipe.dtype = torch.float64
    values = ready(pipe)
    assert values["prompt_emb"].dtype == torch.float64
    assert values["input_latents"].dtype == torch.float32
