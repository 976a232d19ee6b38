"""Fingerprints of units' outputs at toy sizes, loose enough to be equal on every
machine.

A tensor's fingerprint is its shape, its root mean square, and its sums against four
cosines, divided by the square root of its length. Two are equal if these numbers differ
by at most a thousandth of the root mean square: processors and library versions round
differently, a changed formula moves them further.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dstrain.errors import UsageError
from dstrain.graph import PipelineSpec, make_plan, serialize
from dstrain.pipeline import Pipeline, generate_task
from dstrain.randomness import Rng, SampleKey
from dstrain.testing.rows import data_inputs, inputs
from dstrain.training import SFT

FILE = "fingerprints.json"
VERSION = ", version "
TOLERANCE = 1e-3
COSINES = 4


def fingerprint(value: Any, name: str) -> dict[str, Any]:
    """Return the fingerprint of one value as JSON data: its structure, and the numbers
    of each of its tensors.
    """
    tensors: dict[str, Tensor] = {}
    form = serialize(value, tensors, name)
    return {
        "form": form,
        "numbers": {key: _numbers(tensor) for key, tensor in tensors.items()},
    }


def matches(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two fingerprints are equal within the tolerance."""
    if one["form"] != other["form"] or one["numbers"].keys() != other["numbers"].keys():
        return False
    pairs = [
        (numbers, other["numbers"][key]) for key, numbers in one["numbers"].items()
    ]
    return all(
        abs(our - their) <= TOLERANCE * max(ours[0], theirs[0])
        for ours, theirs in pairs
        for our, their in zip(ours, theirs, strict=True)
    )


def unit_values(
    pipeline: Pipeline, given: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the outputs of every unit that training or inference runs, by the unit's
    name; at toy sizes, if no inputs are given.
    """
    spec = pipeline.spec
    given = given or inputs(spec)
    tasks = (
        (SFT, data_inputs(spec)),
        (generate_task(spec, guided=False), frozenset(given)),
    )
    found: dict[str, dict[str, Any]] = {}
    for task, names in tasks:
        plan = make_plan(spec, names & frozenset(given), task)
        values = dict(given)
        with torch.no_grad():
            pipeline.run(
                (*plan.cached_steps, *plan.train_steps),
                values,
                Rng([SampleKey(0, 0, 0, 0)]),
            )
        for step in (*plan.cached_steps, *plan.train_steps):
            found[step.unit.name] = {
                name: values[key] for name, key in step.outputs.items()
            }
    return found


def unit_fingerprints(
    spec: PipelineSpec, values: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the fingerprints of the values that `unit_values` returned, by the unit's name
    and version.
    """
    versions = {one.name: one.version for one in (*spec.units, *spec.decoders)}
    return {
        f"{unit}{VERSION}{versions[unit]}" if versions.get(unit) else unit: {
            name: fingerprint(value, name) for name, value in made.items()
        }
        for unit, made in values.items()
    }


def read_fingerprints(folder: Path) -> dict[str, Any]:
    """Read the recorded fingerprints: unit and version -> variant -> output ->
    fingerprint.
    """
    path = folder / FILE
    recorded: dict[str, Any] = (
        json.loads(path.read_text("utf-8")) if path.is_file() else {}
    )
    return recorded


def changed(
    recorded: Mapping[str, Any], made: Mapping[str, Any], variant: str
) -> list[str]:
    """Return a line for each unit of a variant whose outputs differ from the recorded
    ones.
    """
    faults = []
    for unit, fingerprints in made.items():
        known = recorded.get(unit, {}).get(variant)
        if known is None:
            faults.append(f"{unit}: no fingerprint is recorded for {variant}")
        elif known.keys() != fingerprints.keys() or any(
            not matches(known[name], one) for name, one in fingerprints.items()
        ):
            differing = [
                name
                for name, one in fingerprints.items()
                if name not in known or not matches(known[name], one)
            ]
            faults.append(
                f"{unit}: makes another {', '.join(differing)} for {variant} than recorded"
            )
    return faults


def write_fingerprints(folder: Path, made: Mapping[str, Mapping[str, Any]]) -> None:
    """Record the fingerprints of every variant.

    Raises UsageError for a unit that makes something else and has its version still: values
    in users' caches would stay as they are.
    """
    recorded = read_fingerprints(folder)
    fresh: dict[str, Any] = {}
    for variant, units in made.items():
        for unit, fingerprints in units.items():
            known = recorded.get(unit, {}).get(variant)
            # Numbers within the tolerance stay as they are recorded.
            same = known is not None and not changed(
                recorded, {unit: fingerprints}, variant
            )
            if known is not None and not same and VERSION in unit:
                raise UsageError(
                    f"{unit} of {variant}",
                    "makes something else than is recorded of this version",
                    f"raise the version; if only the toy is another, delete {folder / FILE} first",
                )
            fresh.setdefault(unit, {})[variant] = known if same else fingerprints
    text = json.dumps(fresh, indent=1, sort_keys=True) + "\n"
    (folder / FILE).write_text(text, encoding="utf-8")


def _numbers(tensor: Tensor) -> list[float]:
    values = tensor.detach().to(torch.float64).flatten()
    places = torch.arange(values.numel(), dtype=torch.float64)
    sums = [
        (values * torch.cos(0.7 * (k + 1) * places + k)).sum()
        / math.sqrt(max(1, values.numel()))
        for k in range(COSINES)
    ]
    return [
        float(f"{float(number):.6g}")
        for number in (
            values.square().mean().sqrt() if values.numel() else values.sum(),
            *sums,
        )
    ]
