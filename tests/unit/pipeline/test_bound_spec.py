"""A spec that is bound to components runs the units of a plan, and calls model_fn with the
conditions of one branch.
"""

from dataclasses import replace
from typing import Any, TypedDict

import pytest
import torch
from dstrain import SFT, Pipeline, Task, UsageError
from dstrain.graph import make_plan
from dstrain.graph.unit import Unit
from dstrain.plugin import (
    Column,
    FlowMatchSchedule,
    LatentConstraint,
    PipelineSpec,
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


def apply_guidance(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    return negative + scale * (positive - negative)


SPEC = PipelineSpec(
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
ONES = torch.ones(1, 4)


def pipeline(without: str = "", **changes: Any) -> Pipeline:
    components = {name: one for name, one in COMPONENTS.items() if name != without}
    configs = {"dit": {"patch": 10}}
    return Pipeline(replace(SPEC, **changes), RECORD, components, configs)


def ready(pipe: Pipeline, task: Task = GUIDED) -> dict[str, Any]:
    values: dict[str, Any] = dict(VALUES)
    plan = make_plan(pipe.spec, frozenset(VALUES), task, ())
    pipe.run((*plan.cached_steps, *plan.train_steps), values)
    return values


def test_units_add_what_they_make_per_branch_and_leave_what_they_read() -> None:
    def predict(
        noisy_latents: Tensor, timestep: Tensor, prompt_emb: Tensor, label: str
    ) -> Tensor:
        return noisy_latents

    values = ready(pipeline(model_fn=predict))
    assert values["prompt_emb"].tolist() == [[4.0] * 4]
    assert values["negative.prompt_emb"].tolist() == [[0.0] * 4]
    assert values["input_latents"].tolist() == [[30.0] * 4]
    assert (values["label"], values["negative.label"]) == ("positive four", "negative ")
    assert {name: values[name] for name in VALUES} == VALUES


def test_a_component_that_is_not_loaded_is_named_but_not_its_configuration() -> None:
    with pytest.raises(UsageError, match=r"vae .*dit, text_encoder"):
        ready(pipeline(without="vae"))
    values = ready(pipeline(without="dit"))
    assert values["input_latents"].tolist() == [[30.0] * 4]


def test_constrain_latents_reads_the_values_it_names_or_leaves_all_as_it_is() -> None:
    def constrain_latents(
        latents: Tensor, timestep: Tensor, noise: Tensor, input_latents: Tensor
    ) -> LatentConstraint:
        return LatentConstraint(input_latents, timestep * 0)

    given = (ONES, torch.tensor([500.0]), torch.zeros(1, 4))
    pipe = pipeline(constrain_latents=constrain_latents)
    constrained = pipe.constrain_latents(ready(pipe, SFT))(*given)
    assert constrained.latents.tolist() == [[30.0] * 4]
    assert constrained.timestep.tolist() == [0.0]
    free = pipeline().constrain_latents({})(*given)
    assert (free.latents, free.timestep, free.mask) == (*given[:2], None)


def test_a_prediction_of_another_shape_than_the_latents_is_refused() -> None:
    def predict_tokens(noisy_latents: Tensor, timestep: Tensor, *, dit: Any) -> Tensor:
        return dit(noisy_latents)[:, :1]

    with pytest.raises(UsageError, match=r"\[1, 1\]; .*\[1, 4\]"):
        pipeline(model_fn=predict_tokens).predict({}, ONES, torch.tensor([1.0]))
