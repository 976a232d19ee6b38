"""The options of a run say how its datasets are read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain.data import CaptionOptions
from dstrain.data.variants import AugmentationOptions
from dstrain.runs.resolve import resolve

from tests.support.runs import config, project


@pytest.fixture(scope="module")
def here(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


def test_a_validation_dataset_has_no_views_of_its_own(here: Path) -> None:
    flags: dict[str, Any] = {"flip": True, "crops": 2, "caption_prefix": "a "}
    flags |= {"caption_suffix": " b", "trigger_word": "sks", "keep_tags": 2}
    flags |= {"caption_dropout": 0.5, "shuffle_tags": True}
    setup = resolve(config(here, validation_dataset_base_path=here / "data", **flags))
    captions = CaptionOptions(trigger="sks", prefix="a ", suffix=" b")
    data = setup.data_config
    assert data.caption_inputs == {"prompt"}
    assert data.augmentation == AugmentationOptions(True, 2)
    shuffled = {"dropout": 0.5, "shuffle_tags": True, "keep_tags": 2}
    assert data.captions == replace(captions, variants=8, **shuffled)
    assert setup.validation is not None
    held_out = setup.validation.data_config
    assert held_out.augmentation == AugmentationOptions()
    assert held_out.captions == captions
