"""Compute the keys of cached values before anything is decoded or encoded.

A key is a hash of the family, the unit's identity (its module, name, version, outputs and
the digest of its code), the keys of its inputs, the digests of its components, the compute
dtype and, if the unit asks for it, the branch. Library versions and the device are not part
of it.
"""

from collections.abc import Mapping

from dstrain.graph.plan import Plan, Step
from dstrain.graph.task import POSITIVE
from dstrain.storage.hashing import hash_json


def step_key(
    family: str,
    step: Step,
    inputs: Mapping[str, str],
    components: Mapping[str, str],
    dtype: str,
) -> str:
    """Return the key of one run of a unit.

    Args:
        family: The model family's name.
        step: The unit and its branch.
        inputs: The unit's own name of an input -> the key of its value.
        components: Name -> digest of the component.
        dtype: The compute dtype.
    """
    unit = step.unit
    digests = {name: components[name] for name in unit.components if name in components}
    # Only a unit that uses the branch computes something else for another one.
    branch = ""
    if "branch" in unit.components:
        branch = step.branch or POSITIVE
    content = [family, unit.identity, dict(inputs), digests, dtype, branch]
    return hash_json("unit", content)


def value_keys(
    plan: Plan,
    inputs: Mapping[str, str],
    components: Mapping[str, str],
    dtype: str,
) -> dict[str, str]:
    """Return the key of every value of stage 1, inputs included.

    An output of a unit has the key '<key of the unit's run>.<name>'.
    """
    keys = dict(inputs)
    for step in plan.cached_steps:
        used = {name: keys[value] for name, value in step.inputs.items()}
        key = step_key(plan.spec.family, step, used, components, dtype)
        for name, value in step.outputs.items():
            keys[value] = f"{key}.{name}"
    return keys
