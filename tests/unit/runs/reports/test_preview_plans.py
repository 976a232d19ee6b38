"""Previews are planned as inference: size, stages, and what a cache must hold."""

from pathlib import Path

import pytest
from dstrain.cache import FeatureCache
from dstrain.errors import CacheError
from dstrain.runs.reports.preview_plans import (
    PIXELS,
    plan_previews,
    preview_line,
    stored_previews,
)
from dstrain.runs.resolve import resolve

from tests.support.runs import config, project


@pytest.fixture
def here(tiny: None, tmp_path: Path) -> Path:
    return project(tmp_path)


def test_without_prompts_there_is_no_plan(here: Path) -> None:
    assert plan_previews(resolve(config(here))) == []


def test_each_prompt_has_a_plan_of_its_own_and_a_small_size(here: Path) -> None:
    setup = resolve(config(here, preview_prompt=("dog", "cat")))
    first, second = plan_previews(setup)
    assert (first.prompt, second.prompt) == ("dog", "cat")
    assert first.plan == second.plan
    size = [first.cells[name].literal for name in ("height", "width")]
    assert size[0] * size[1] <= PIXELS


def test_the_line_of_a_preview_has_an_address_for_each_encoded_value(
    here: Path,
) -> None:
    (preview,) = plan_previews(resolve(config(here, preview_prompt=("dog",))))
    encoded = {
        name: f"at {name}"
        for name in preview.plan.cached_values
        if name not in preview.cells
    }
    assert encoded
    line = preview_line(preview, encoded)
    assert line["prompt"] == "dog"
    assert line["inputs"] == sorted(preview.plan.inputs)
    assert {name: line["values"][name] for name in encoded} == {
        name: {"at": place} for name, place in encoded.items()
    }
    assert set(line["values"]) == set(preview.plan.cached_values)


def test_a_prompt_that_stage_1_did_not_see_is_named_with_the_way_to_add_it(
    here: Path,
) -> None:
    setup = resolve(config(here, preview_prompt=("dog",)))
    FeatureCache.create(here / "cache")
    cache = FeatureCache.open(here / "cache")
    # The run adds the command of stage 1 to such an error.
    with pytest.raises(CacheError, match="previews of 'dog'"):
        stored_previews(setup, cache, [])
