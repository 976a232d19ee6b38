"""A published dataset is downloaded once; a file or a folder here wins over an id."""

from pathlib import Path
from typing import Any

import pytest
from dstrain import StateError, TrainConfig, UsageError
from dstrain.runs.resolve import resolve

from tests.support.dataset_forms import rows_in, write_form
from tests.support.family import write_data
from tests.support.hub_server import Hub, serving, use
from tests.support.runs import config as config_of

ID = "someone/photos"

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_data(tmp_path / "written", ("dog", "cat", "bird"))
    return tmp_path / "written"


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path) -> Hub:
    """A hub with a dataset of two folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DSTRAIN_DATASET_BASE_PATH", raising=False)
    for form in ("parquet", "captions"):
        write_form(form, data, rows_in(data), tmp_path / "own" / form)
    with serving() as running:
        running.add(ID, tmp_path / "own")
        running.add(ID, data, "v1")
        use(monkeypatch, running.url, tmp_path)
        yield running


def resolved(hub: str = "modelscope", **changes: Any) -> TrainConfig:
    """The configuration with the folders of its datasets."""
    given = config_of(Path(), toy=True, hub=hub, **changes)
    return resolve(given).config


def test_a_dataset_is_downloaded_once_to_a_folder_of_its_id(
    published: Hub, hub: str
) -> None:
    for _ in range(2):
        found = resolved(hub, dataset_base_path=Path(f"{ID}:captions"))
        assert found.dataset_base_path == Path("data", ID, "captions")
    assert published.fetched.count("captions/0.txt") == 1
    assert all(name.startswith("captions/") for name in published.fetched)
    assert (Path("data", ID) / "captions/0.txt").read_text() == "dog\n"
    published.forget()
    assert resolved(hub, dataset_base_path=Path(f"{ID}:captions")) == found
    assert not published.requests
    validation = Path(f"{ID}@v1")
    found = resolved(
        hub,
        dataset_base_path=Path(f"{ID}:parquet"),
        validation_dataset_base_path=validation,
    )
    assert found.dataset_base_path == Path("data", ID, "parquet")
    assert "parquet/data/train-00000-of-00002.parquet" in published.fetched
    folder = found.validation_dataset_base_path
    assert folder is not None
    assert (folder / "metadata.json").is_file()


def test_what_is_on_this_machine_wins(published: Hub, data: Path) -> None:
    Path("someone").mkdir()
    data.rename(ID)
    assert resolved(dataset_base_path=Path(ID)).dataset_base_path == Path(ID)
    # One in the same place that is misspelt is no id.
    with pytest.raises(UsageError) as caught:
        resolved(dataset_base_path=Path("someone/photo"))
    assert caught.value.where == "--dataset_base_path"
    assert not published.requests


def test_a_parquet_file_is_its_folder_and_metadata(data: Path, tmp_path: Path) -> None:
    write_form("parquet", data, rows_in(data), tmp_path / "form")
    path = tmp_path / "form/data/train-00000-of-00002.parquet"
    found = resolved(dataset_base_path=path)
    assert found.dataset_base_path == path.parent
    assert found.dataset_metadata_path == path
    with pytest.raises(UsageError, match="--dataset_base_path") as caught:
        resolved(dataset_base_path=path, dataset_metadata_path=path)
    assert caught.value.where == "--dataset_metadata_path"


@pytest.mark.parametrize("changes", [{"task": "sft:train"}, {"dry_run": True}])
def test_stage_2_and_a_dry_run_download_nothing(
    published: Hub, changes: dict[str, Any], tmp_path: Path
) -> None:
    given = {"feature_cache": tmp_path / "cache", **changes}
    found = resolved(dataset_base_path=Path(ID), **given)
    assert found.dataset_base_path == Path(ID)
    assert not published.requests


def test_an_absent_dataset_is_named_with_what_it_was_taken_for(
    published: Hub, hub: str
) -> None:
    with pytest.raises(StateError, match="someone/else") as caught:
        resolved(hub, dataset_base_path=Path("someone/else"))
    assert "--dataset_base_path someone/else" in caught.value.help_lines[-1]
    with pytest.raises(UsageError, match=r"'\.\./x'"):
        resolved(hub, dataset_base_path=Path(f"{ID}:../x"))


def test_nothing_is_downloaded_where_that_is_forbidden(
    published: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTRAIN_SKIP_DOWNLOAD", "1")
    with pytest.raises(StateError):
        resolved(dataset_base_path=Path(ID))
    assert not published.requests
