"""Keys of values: what a stored value is the result of, known before anything is
decoded or encoded.

A key is a hash of the unit's name and declared version, the keys of what it reads, the
digests of the components it borrows, and the compute dtype. Library versions and the
device are not part of it.
"""

from collections.abc import Mapping

from dstrain.graph.plan import POSITIVE, Plan, Step
from dstrain.storage.hashing import hash_json


def step_key(
    family: str,
    step: Step,
    reads: Mapping[str, str],
    components: Mapping[str, str],
    dtype: str,
) -> str:
    """The key of one run of a unit; `reads` and `components` map the unit's own names
    to keys and digests.
    """
    borrowed = {
        name: components[name] for name in step.unit.components if name in components
    }
    branch = (step.branch or POSITIVE) if "branch" in step.unit.components else ""
    return hash_json(
        "unit",
        [
            family,
            step.unit.name,
            step.unit.version,
            dict(reads),
            borrowed,
            dtype,
            branch,
        ],
    )


def value_keys(
    plan: Plan, inputs: Mapping[str, str], components: Mapping[str, str], dtype: str
) -> dict[str, str]:
    """The key of every value of stage 1, inputs included: '<key of the unit's
    run>.<name>' for what a unit makes.
    """
    keys = dict(inputs)
    for step in plan.cached_steps:
        key = step_key(
            plan.family,
            step,
            {name: keys[value] for name, value in step.inputs.items()},
            components,
            dtype,
        )
        keys |= {value: f"{key}.{name}" for name, value in step.outputs.items()}
    return keys
