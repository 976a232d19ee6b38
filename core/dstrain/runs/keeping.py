"""Ask how the components of a run are kept."""

from dataclasses import replace

from dstrain.config.options import TrainConfig
from dstrain.config.plugin_options import flags
from dstrain.graph import make_plan
from dstrain.lora import type_named
from dstrain.pipeline import generate_task, keeper_request
from dstrain.runs.checks.flags import loaded_components
from dstrain.runs.setup import Setup


def keeping_advice(setup: Setup) -> list[str]:
    """Return how the weights of a run can be kept with less memory."""
    if setup.sharding is not None:
        return list(setup.sharding.advice())
    if setup.trainables.full:
        return []
    trained = {*setup.trainables.components}
    given = [one for one in setup.keepers.all if trained & {*one.components}]
    if any(one.kind == "move" for one in given):
        return [line for one in given for line in one.advice()]
    return [one.frees for one in flags(TrainConfig) if one.frees]


def with_keepers(setup: Setup) -> Setup:
    """Return a run with how the weights of its components are kept, as its options ask;
    raises UsageError for what it cannot have.
    """
    spec = setup.spec
    plan = setup.plan(setup.all_inputs())
    steps = [*plan.cached_steps, *plan.train_steps]
    used = set()
    if setup.prompt_rows:
        inference = make_plan(
            spec, frozenset(spec.inputs), generate_task(spec, guided=True)
        )
        steps += [*inference.cached_steps, *inference.train_steps]
        used |= {name for one in spec.decoders for name in one.components}
        if spec.experts is not None:
            used.update(*spec.experts.roles.values())
    used |= {name for step in steps for name in step.unit.components}
    request = replace(
        keeper_request(setup.config, setup.family, spec, setup.models),
        loaded=loaded_components(setup),
        used=used,
        in_steps=plan.components["train"],
        full=setup.trainables.full,
        lora={one.component: one.type for one in setup.trainables.lora},
        needs_plain={
            one.component
            for one in setup.trainables.lora
            if not type_named(one.type).stored
        },
        stage=setup.stage,
    )
    return replace(setup, keepers=setup.extensions.keepers(request))
