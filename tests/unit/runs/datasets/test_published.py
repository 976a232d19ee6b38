"""A published dataset is downloaded once; a file or a folder here wins over an id."""

from pathlib import Path

import pytest
from dstrain import StateError, TrainConfig, UsageError
from dstrain.runs.datasets.published import is_published, with_folders

from tests.support.dataset_forms import rows_in, write_form
from tests.support.hub_server import Hub, serving, use

ID = "someone/photos"


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path) -> Hub:
    """A hub with a dataset of two folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DSTRAIN_DATASET_BASE_PATH", raising=False)
    write_form("parquet", data, rows_in(data), tmp_path / "own/parquet")
    write_form("captions", data, rows_in(data), tmp_path / "own/captions")
    with serving() as running:
        running.add(ID, tmp_path / "own")
        running.add(ID, data, "v1")
        use(monkeypatch, running.url, tmp_path)
        yield running


def config(hub: str = "modelscope", **changes: object) -> TrainConfig:
    given: dict[str, object] = {"model": "tiny", "hub": hub}
    return TrainConfig(**{**given, **changes})  # type: ignore[arg-type]


def test_a_dataset_is_downloaded_once_to_a_folder_of_its_id(
    published: Hub, hub: str, data: Path
) -> None:
    given = config(hub, dataset_base_path=Path(ID))
    assert with_folders(given).dataset_base_path == Path("data", ID)
    assert "parquet/data/train-00000-of-00002.parquet" in published.fetched
    assert (Path("data", ID) / "captions/0.txt").read_text() == "dog\n"
    published.forget()
    assert with_folders(given).dataset_base_path == Path("data", ID)
    assert not published.requests


def test_a_folder_and_a_revision_are_named_behind_the_id(
    published: Hub, hub: str
) -> None:
    part = with_folders(config(hub, dataset_base_path=Path(f"{ID}:parquet")))
    assert part.dataset_base_path == Path("data", ID, "parquet")
    assert all(name.startswith("parquet/") for name in published.fetched)
    first = with_folders(config(hub, validation_dataset_base_path=Path(f"{ID}@v1")))
    folder = first.validation_dataset_base_path
    assert folder is not None
    assert (folder / "metadata.json").is_file()


def test_what_is_on_this_machine_wins(published: Hub, data: Path) -> None:
    Path(ID).mkdir(parents=True)
    given = config(dataset_base_path=Path(ID))
    assert with_folders(given) == given
    # One in the same place that is misspelt is no id.
    assert not is_published(Path("someone/photo"))
    assert not is_published(data)
    assert not published.requests


def test_a_parquet_file_is_its_folder_and_metadata(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.touch()
    found = with_folders(config(dataset_base_path=path))
    assert found.dataset_base_path == tmp_path
    assert found.dataset_metadata_path == path
    with pytest.raises(UsageError, match="--dataset_metadata_path: cannot be combined"):
        with_folders(config(dataset_base_path=path, dataset_metadata_path=path))


@pytest.mark.parametrize("changes", [{"task": "sft:train"}, {"dry_run": True}])
def test_stage_2_and_a_dry_run_download_nothing(
    published: Hub, changes: dict[str, object]
) -> None:
    given = config(dataset_base_path=Path(ID), **changes)
    assert with_folders(given) == given
    assert not published.requests


def test_an_absent_dataset_is_named_with_what_it_was_taken_for(
    published: Hub, hub: str
) -> None:
    with pytest.raises(StateError, match="no such dataset or revision on") as caught:
        with_folders(config(hub, dataset_base_path=Path("someone/else")))
    assert "is taken for the id of a dataset" in caught.value.help_lines[-1]
    with pytest.raises(UsageError, match="leads out of the dataset"):
        with_folders(config(hub, dataset_base_path=Path(f"{ID}:../x")))


def test_nothing_is_downloaded_where_that_is_forbidden(
    published: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTRAIN_SKIP_DOWNLOAD", "1")
    with pytest.raises(StateError, match="not all of its files are on this machine"):
        with_folders(config(dataset_base_path=Path(ID)))
    assert not published.requests
