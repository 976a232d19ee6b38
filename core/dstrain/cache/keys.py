"""Compute the keys of cached values before anything is decoded or encoded.

A key is a hash of the family, the unit's identity (its module, name, outputs, and
its version or the digests of its code), the keys of its inputs, the digests of its components, the compute
dtype and, if the unit asks for it, the branch. Library versions and the device are not part
of it.
"""

import re
from collections.abc import Mapping

from dstrain.graph import POSITIVE, Plan
from dstrain.storage import hash_json
from dstrain.storage.hashing import hash_text, json_text

GAP = "?"


class PlanKeys:
    """Finds the keys of the values of many rows that have one plan: of what is hashed,
    only the keys of inputs differ.
    """

    def __init__(self, plan: Plan, components: Mapping[str, str], dtype: str) -> None:
        """Write down what is hashed of each step, with gaps for the keys of its inputs."""
        self._steps: list[tuple[list[str], dict[str, str]]] = []
        for step in plan.cached_steps:
            # A hash in the place of each key: nothing else in the text is equal to it.
            gaps = {hash_json("gap", name): name for name in step.inputs.values()}
            keys = {name: gap for gap, name in gaps.items()}
            used = {own: keys[name] for own, name in step.inputs.items()}
            unit = step.unit
            digests = {
                name: components[name] for name in unit.components if name in components
            }
            # Only a unit that uses the branch computes something else for another one.
            branch = ""
            if "branch" in unit.components:
                branch = step.branch or POSITIVE
            content = [plan.spec.family, unit.identity, used, digests, dtype, branch]
            text = json_text("unit", content)
            parts = re.split(f"({'|'.join(gaps)})", text) if gaps else [text]
            parts[1::2] = [gaps[gap] for gap in parts[1::2]]
            ends = {
                value: json_text("output", [GAP, name]).partition(GAP)[2]
                for name, value in step.outputs.items()
            }
            self._steps.append((parts, ends))

    def of(self, inputs: Mapping[str, str]) -> dict[str, str]:
        """Return the key of every value of stage 1, inputs included.

        The key of a value is its address in the feature cache, 40 hexadecimal digits.
        """
        keys = dict(inputs)
        for parts, ends in self._steps:
            text = parts.copy()
            text[1::2] = [keys[name] for name in parts[1::2]]
            key = hash_text("".join(text))
            for value, end in ends.items():
                keys[value] = hash_text(f'["output",["{key}{end}')
        return keys
