"""The same images and captions are the same dataset in every form: equal digests, plans,
cached values and training, split or not.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from dstrain.cache.store import FeatureCache

from tests.support.dataset_forms import FORMS, rows_in, write_form
from tests.support.family import write_data
from tests.support.runs import outcome, project, same, train

pytestmark = pytest.mark.usefixtures("tiny")
CAPTIONS = ("dog", "two dogs\non a bridge", "cat", "a, b", "ünï 猫")
STEPS = {"max_steps": 6, "seed": 3}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = project(tmp_path_factory.mktemp("forms"))
    shutil.rmtree(folder / "data")
    write_data(folder / "data", CAPTIONS, ((16, 16), (16, 24)))
    for form in FORMS:
        write_form(form, folder / "data", rows_in(folder / "data"), folder / form)
    return folder


@pytest.fixture(scope="module")
def wanted(here: Path) -> dict[str, Any]:
    """What the dataset of metadata.json gives."""
    return unsplit_and_split(here, here / "data")


def unsplit_and_split(here: Path, data: Path) -> dict[str, Any]:
    """Train on a dataset unsplit and split; return what both leave, and the plan."""
    base = here / f"{data.name} runs"
    whole = train(here, dataset_base_path=data, output_path=base / "whole", **STEPS)
    stages = {"dataset_base_path": data, "feature_cache": base / "cache", **STEPS}
    train(here, task="sft:data_process", **stages)
    split = train(here, task="sft:train", output_path=base / "split", **stages)
    ((_, plan),) = FeatureCache.open(base / "cache").plans()
    cache = FeatureCache.open(base / "cache")
    rows = [
        {name: row[name] for name in ("row", "chunk", "values", "group")}
        for (path, _) in cache.plans()
        for row in cache.plan_rows(path)
    ]
    return {
        "whole": outcome(whole),
        "split": outcome(split),
        "rows": rows,
        "identity": plan["identity"],
    }


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_values_and_the_training_of_metadata_json(
    here: Path, wanted: dict[str, Any], form: str
) -> None:
    found = unsplit_and_split(here, here / form)
    assert found["rows"] == wanted["rows"]
    assert found["identity"] == wanted["identity"]
    assert same(found["whole"], wanted["whole"])
    assert same(found["split"], wanted["split"])


def test_stage_1_computes_nothing_for_another_form_of_a_cached_dataset(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = {"feature_cache": here / "shared", "task": "sft:data_process"}
    train(here, dataset_base_path=here / "data", **cache)
    for form in FORMS:
        capsys.readouterr()
        train(here, dataset_base_path=here / form, **cache)
        assert "precomputing 0 of 5" in capsys.readouterr().err
