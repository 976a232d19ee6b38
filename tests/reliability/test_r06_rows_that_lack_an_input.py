"""Rows that lack an input, and units that read what is not always there, train in two
stages as in a single run.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from accelerate import Accelerator
from dstrain import StateError, Task, Trainables
from dstrain.distributed import ProcessGroup
from dstrain.graph import FunctionSpec
from dstrain.graph.unit import Unit
from dstrain.plugin import FlowMatchSchedule, PipelineSpec
from dstrain.runs import data_process

from tests.support.program_runs import equal, run, write_program
from tests.support.programs import (
    INPUTS,
    NETS,
    WIDTH,
    Program,
    loss_body,
    predict_body,
    unit_body,
)
from tests.support.units import declared

pytestmark = pytest.mark.promise(
    "R6", "between the stages: recomputed, refused by name, or the same"
)

ROWS = tuple(
    {"prompt": prompt, "negative": "", "number": number, "image": image}
    for prompt, number, image in (
        ("a dog", "7", "small.png"),
        ("a cat", "", "small.png"),
        ("a dog", "7", ""),
        ("two cats", "-3", ""),
        ("a", "", ""),
        ("b", "", ""),
    )
)
ORDERS = ("look count join", "count look join", "look join count", "count join look")
"""Units in the order in which they are written; `join` reads what those before it make, if
they do.
"""
TRAINED = (
    ("dit",),
    ("dit", "net_a"),
    ("dit", "net_b"),
    ("dit", "net_c"),
    ("net_a", "net_b"),
)
"""Networks trained: `net_a` is what `look` uses, `net_b` `join` and `net_c` `count`."""


@dataclass(frozen=True)
class Presence:
    """A pipeline, and what each stage trains."""

    order: str
    first: tuple[str, ...]
    second: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.order}, {'+'.join(self.first)} then {'+'.join(self.second)}"


PRESENCES = tuple(Presence(*one) for one in product(ORDERS, TRAINED, TRAINED))


def program(order: str, trained: tuple[str, ...]) -> Program:
    """A pipeline of units that rows may lack inputs for."""
    units: list[Unit] = []
    reads = {
        "look": ({"picture": True}, ("net_a",)),
        "count": ({"number": True}, ("net_c",)),
        "join": ({"prompt": False}, ("net_b",)),
    }
    made: dict[str, bool] = {}
    for name in order.split():
        inputs, uses = reads[name]
        if name == "join":
            inputs |= made
        outputs = {f"{name}ed": "tensor"}
        made |= dict.fromkeys(outputs, False)
        body = partial(unit_body, outputs, uses)
        units.append(declared(name, body, inputs, uses, outputs))
    read = {name: name == "joined" for name in made}
    spec = PipelineSpec(
        family="random",
        variant="base",
        components=NETS,
        units=tuple(units),
        # It uses all networks, so that each may be trained for every row.
        model_fn=FunctionSpec("predict", partial(predict_body, NETS), read, NETS),
        decoders=(),
        inputs=INPUTS,
        schedule=FlowMatchSchedule(shift=3.0),
        latent_shape=FunctionSpec("shape", lambda: (1, WIDTH)),
        apply_guidance=lambda positive, negative, scale: positive,
        cfg_inputs={"prompt": "negative_prompt"},
    )
    context = ("rng", "timestep_sampler", "constrain_latents")
    loss = partial(loss_body, (), ("positive",))
    task = Task("random", FunctionSpec("loss", loss, {"joined": True}, context))
    dropouts = dict.fromkeys(NETS, 0.0)
    return Program(spec, task, Trainables(trained), dropouts, ROWS, 2)


@pytest.mark.parametrize("case", PRESENCES, ids=str)
def test_rows_that_lack_an_input_train_as_in_a_single_run(
    case: Presence, tmp_path: Path
) -> None:
    processes = ProcessGroup(Accelerator(cpu=True))
    first = write_program(program(case.order, case.first), tmp_path)
    data_process(replace(first, stage="data_process"), processes)
    second = replace(first, trainables=Trainables(case.second))
    plans = [
        [setup.plan(frozenset(row)) for row in setup.dataset.rows]
        for setup in (first, second)
    ]
    values = [[plan.cached_values for plan in one] for one in plans]
    if values[0] == values[1]:
        unsplit = run(second)[2]
        assert equal(unsplit, run(replace(second, stage="train"))[2])
        return
    with pytest.raises(StateError, match="contains no plan for this run") as caught:
        run(replace(second, stage="train"))
    assert "cached values" in str(caught.value)
