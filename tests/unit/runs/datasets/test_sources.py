"""Which dataset a run reads, and which is at hand in stage 2."""

import json
from pathlib import Path
from typing import Any

import pytest
from dstrain import TrainConfig, UsageError
from dstrain.data.forms import embedded_folder
from dstrain.runs.datasets.sources import (
    dataset_folders,
    dataset_source,
    source_here,
)

from tests.support.dataset_forms import rows_in, write_form


def config(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"model": "tiny", **changes})


def test_a_run_that_reads_no_dataset_has_none(data: Path) -> None:
    source = dataset_source(config(dataset_base_path=data))
    assert source is not None
    assert source.path == data / "metadata.json"
    assert dataset_source(config(dataset_base_path=data, task="sft:train")) is None
    assert dataset_source(config()) is None
    with pytest.raises(UsageError, match="does not exist"):
        dataset_source(config(dataset_base_path=data / "absent"))
    absent = config(dataset_base_path=Path("no/such-dataset"), dry_run=True)
    assert dataset_source(absent) is None


def test_stage_2_takes_what_is_here_and_no_cache_for_a_dataset(
    data: Path, tmp_path: Path
) -> None:
    found = source_here(config(dataset_base_path=data))
    assert found is not None
    assert found.path == data / "metadata.json"
    assert source_here(config(dataset_base_path=tmp_path / "none")) is None
    absent = config(dataset_metadata_path=tmp_path / "none.csv")
    assert source_here(absent) is None
    (data / "store.json").touch()
    assert source_here(config(dataset_base_path=data)) is None


def test_embedded_files_are_in_a_folder_of_their_own(
    data: Path, tmp_path: Path
) -> None:
    assert dataset_folders(config(dataset_base_path=data)) == [str(data)]
    write_form("parquet", data, rows_in(data), tmp_path / "x")
    folders = dataset_folders(config(dataset_base_path=tmp_path / "x"))
    assert folders == [str(tmp_path / "x"), str(embedded_folder())]


def test_a_single_entry_of_several_datasets_is_joined_as_its_rows_are(
    data: Path,
) -> None:
    entry = json.dumps({"dataset_base_path": str(data)})
    for find in (dataset_source, source_here):
        plain = find(config(dataset_base_path=data))
        found = find(config(dataset=(entry,)))
        assert found is not None
        assert plain is not None
        assert found.parts == (plain,)
