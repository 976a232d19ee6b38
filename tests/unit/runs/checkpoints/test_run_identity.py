"""What decides the numbers of a run has a digest that stays the same."""

import os
from pathlib import Path

import pytest
from dstrain.runs.checkpoints.run_identity import config_digest, data_fingerprint

from tests.support.runs import (
    config,
    project,
    training_run,
)

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


def test_files_are_looked_at_once_for_all_variants_of_a_sample(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = training_run(config(here, shuffle_tags=True, flip=True))
    variants, samples = len(made.data.source.sample_ids), 6
    seen: list[str] = []
    size_of = os.path.getsize
    monkeypatch.setattr(
        os.path, "getsize", lambda path: seen.append(str(path)) or size_of(path)
    )
    of_variants = data_fingerprint(made)
    assert variants > samples == len(seen)
    assert of_variants == data_fingerprint(training_run(config(here)))


def test_the_digest_of_a_configuration_does_not_change(
    here: Path, tmp_path: Path
) -> None:
    # Another digest would refuse to resume every run that was saved before.
    asked = config(
        here,
        output_path=tmp_path,
        mixed_precision="no",
        lr_scheduler="cosine",
        max_steps=4,
        data_file_keys="image",
    )
    digest = config_digest(training_run(asked))
    assert digest == "f5bec383d329fda39defbea5391ce7dc4e3ee312"
