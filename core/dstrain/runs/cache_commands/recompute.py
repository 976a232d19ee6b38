"""`dstrain cache verify --recompute K`: compute samples again, and compare every bit."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dstrain.cache import FeatureCache, PlanSamples
from dstrain.cache.in_use import reading
from dstrain.config import validate
from dstrain.console import number_of, progress_bar, redacted
from dstrain.data import load_cell
from dstrain.errors import StateError
from dstrain.graph import deserialize, serialize
from dstrain.models import default_device
from dstrain.pipeline import Pipeline
from dstrain.runs.cache_commands.contents import Contents, PlanContents
from dstrain.runs.cache_commands.prune import named_plan
from dstrain.runs.feature_plan import CacheInfo, check_components
from dstrain.runs.plan_identity import USE, VALIDATION
from dstrain.runs.resolve import resolve
from dstrain.runs.runner import toy_models
from dstrain.runs.setup import Setup
from dstrain.runs.stage_1.recorded_config import config_of


def recompute(
    folder: Path, count: int, seed: int, names: Sequence[str], places: Mapping[str, Any]
) -> None:
    """Compute samples of plans live and compare them with what is stored.

    Args:
        folder: The cache, whose bytes were verified.
        count: How many samples of each plan, spread over it.
        seed: What chooses them.
        names: The plans, or none for all.
        places: Options in place of recorded ones: where models and data are here.

    Raises StateError if a value differs, and while values are removed from the cache;
    UsageError if models or data are not here.
    """
    differing = 0
    with reading(folder):
        contents = Contents.of(folder)
        plans = [named_plan(contents.plans, name) for name in names] or contents.plans
        for plan in plans:
            differing += _recompute(contents.cache, plan, count, seed, places)
    if differing:
        values = number_of(differing, "value")
        what = f"{values} differ from what was computed now"
        raise StateError(
            folder,
            what,
            "results differ by a rounding on another device or with other versions of libraries;"
            " a large difference means that the cache is of something else",
        )


def _recompute(
    cache: FeatureCache,
    plan: PlanContents,
    count: int,
    seed: int,
    places: Mapping[str, Any],
) -> int:
    """Return how many values of a plan's samples differ, and print each."""
    config = config_of(plan.record, plan.path, cache.folder, **places)
    validate(config)
    setup = replace(resolve(config), device=default_device())
    with toy_models(setup) as ready:
        if plan.record["identity"].get(USE) == VALIDATION and ready.validation:
            ready = ready.validation
        _check(ready, cache, plan)
        chosen = spread(len(plan.rows), count, seed)
        differing = 0
        compared = 0
        info = CacheInfo(**plan.about)
        rows = cache.plan_rows(plan.path)
        with progress_bar("recompute", len(chosen)) as progress:
            samples = [_numbered(rows, index) for index in chosen]
            for row, values in _computed(ready, plan, samples):
                for name, form in row["values"].items():
                    stored = (
                        cache.read(form["at"])
                        if "at" in form
                        else deserialize(form, {})
                    )
                    compared += 1
                    difference = compare(stored, values[name])
                    if difference:
                        differing += 1
                        print(redacted(f"{info.name_row(row)}: {name}: {difference}"))
                progress.update()
    print(
        f"plan {plan.path.stem}: recomputed {len(chosen)} of {len(plan.rows):,} samples;"
        f" {compared - differing} of {compared} values are equal bit for bit"
    )
    return differing


def _numbered(rows: PlanSamples, index: int) -> dict[str, Any]:
    """Return a variant of a sample with its number among those of the sample."""
    found = rows[index]
    first = rows.index(found["row"], found["chunk"])
    return {**found, "variant": index - first}


def _check(setup: Setup, cache: FeatureCache, plan: PlanContents) -> None:
    """Raise StateError for other metadata or model files than those of the plan."""
    table = setup.dataset.table
    if setup.dataset_digest != plan.about["dataset"]["sha256"]:
        what = f"is not the dataset that plan {plan.path.stem} was made from, or has changed"
        raise StateError(table.path, what)
    check_components(setup, cache, CacheInfo(**plan.about))


def spread(total: int, count: int, seed: int) -> list[int]:
    """Return `count` numbers below `total` (or all), one out of each of equal parts."""
    if count >= total:
        return list(range(total))
    draw = random.Random(seed)
    starts = [part * total // count for part in range(count + 1)]
    return [draw.randrange(starts[part], starts[part + 1]) for part in range(count)]


def _computed(
    setup: Setup, plan: PlanContents, samples: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield samples with their inputs and all that the cached steps compute."""
    dataset = setup.dataset
    cells = []
    for sample in samples:
        wanted = (sample["row"], sample["chunk"])
        (found,) = np.nonzero((dataset.sample_ids == wanted).all(1))
        if len(found) <= sample["variant"]:
            what = f"chunk {sample['chunk']} is no sample of the dataset now"
            raise StateError(dataset.table.where(sample["row"]), what)
        cells.append(dataset.rows[int(found[sample["variant"]])])
    plans = [setup.plan(frozenset(one)) for one in cells]
    pipeline = Pipeline.from_found(
        setup.family, setup.spec, setup.find(plans), setup.device, setup.dtype
    )
    for sample, own, steps in zip(samples, cells, plans, strict=True):
        with dataset.errors_at(sample["row"]), torch.no_grad():
            values = {name: load_cell(own[name]) for name in steps.used_inputs}
            pipeline.run(steps.cached_steps, values)
        yield sample, values


def compare(stored: Any, computed: Any) -> str:
    """Say how two values differ; '' if every bit is equal."""
    first: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    headers = serialize(stored, first, "value"), serialize(computed, second, "value")
    for name, tensor in first.items():
        other = second.get(name)
        if other is None or tensor.dtype != other.dtype or tensor.shape != other.shape:
            kinds = [_kind(one) for one in (tensor, other)]
            return f"stored {kinds[0]}, computed {kinds[1]}"
    if headers[0] != headers[1] or first.keys() != second.keys():
        return f"stored {_short(stored)}, computed {_short(computed)}"
    differences = [
        _largest(tensor, second[name])
        for name, tensor in first.items()
        if not _equal(tensor, second[name])
    ]
    if not differences:
        return ""
    return f"largest difference {max(differences):.3g}"


def _equal(one: Tensor, other: Tensor) -> bool:
    # As bytes: NaN is not equal to itself, and 0 equals -0.
    one_bytes = one.contiguous().reshape(-1).view(torch.uint8)
    return torch.equal(one_bytes, other.contiguous().reshape(-1).view(torch.uint8))


def _largest(one: Tensor, other: Tensor) -> float:
    kind = torch.complex128 if one.is_complex() else torch.float64
    difference = (one.to(kind) - other.to(kind)).abs()
    return float(difference.nan_to_num(float("inf")).max())


def _kind(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
