"""The form of a dataset is what its folder has, in one order."""

import json
from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.data.forms import find_source, metadata_files
from dstrain.storage import sha256

from tests.support.dataset_forms import FORMS, rows_in, write_form
from tests.support.family import write_data


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_data(tmp_path / "data", ("dog", "cat", "bird", "fish"))
    return tmp_path / "data"


WORDS = {
    "captions": ("folder", "folder with captions"),
    "imagefolder csv": ("table", "metadata.csv"),
    "imagefolder jsonl": ("table", "metadata.jsonl"),
    "parquet": ("parquet", "2 parquet files"),
    "saved": ("arrow", "2 arrow files"),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_found(data: Path, tmp_path: Path, form: str) -> None:
    write_form(form, data, rows_in(data), tmp_path / "x")
    found = find_source(tmp_path / "x")
    assert (found.form, found.in_words) == WORDS[form]
    assert found.base == tmp_path / "x"
    assert len(found.digest()) > 32


def test_metadata_wins_over_images_and_a_named_file_over_all(
    data: Path, tmp_path: Path
) -> None:
    write_form("parquet", data, rows_in(data), tmp_path / "x")
    path = tmp_path / "x/data/train-00000-of-00002.parquet"
    path.with_name("metadata.parquet").symlink_to(path)
    assert find_source(data).path == data / "metadata.json"
    named = find_source(data, path)
    assert (named.form, named.base, named.files) == ("parquet", data, (path,))
    assert named.digest() == sha256(path)
    assert metadata_files(tmp_path / "x") == []


def test_what_is_no_dataset_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--dataset_base_path: .*none does not exist"):
        find_source(tmp_path / "none")
    (tmp_path / "readme.txt").touch()
    with pytest.raises(UsageError) as caught:
        find_source(tmp_path, None, "--validation_dataset")
    said = str(caught.value)
    for words in (
        "no metadata.csv, .json or .jsonl",
        "no .parquet files",
        "no images",
    ):
        assert words in said
    assert "put images into it, each with its caption" in said
    assert "or name a table with --validation_dataset_metadata_path" in said
    for name in ("metadata.csv", "metadata.json"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=r"has metadata\.csv and metadata\.json"):
        find_source(tmp_path)


def test_of_splits_the_one_for_training_is_read(data: Path, tmp_path: Path) -> None:
    write_form("parquet", data, rows_in(data), tmp_path / "x")
    folder = tmp_path / "x/data"
    (folder / "test-00000-of-00001.parquet").touch()
    found = find_source(tmp_path / "x")
    assert [file.name[:5] for file in found.files] == ["train", "train"]
    assert found.left_out == ("test",)
    for path in folder.glob("train*"):
        path.rename(path.with_name(path.name.replace("train", "validation")))
    with pytest.raises(UsageError, match="has no split named train; splits: test, val"):
        find_source(tmp_path / "x")


def test_saved_splits_are_folders(data: Path, tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_form("saved", data, rows_in(data), tmp_path / "x" / split)
    (tmp_path / "x/dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    found = find_source(tmp_path / "x")
    assert found.path == tmp_path / "x/train"
    assert found.left_out == ("test",)


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/passwd", "", None, 3])
def test_a_saved_dataset_names_no_file_elsewhere(tmp_path: Path, name: object) -> None:
    state = {"_data_files": [{"filename": name}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(UsageError, match="is not the name of anything in this folder"):
        find_source(tmp_path)
    (tmp_path / "state.json").write_text('{"_data_files": []}')
    with pytest.raises(UsageError, match=r"state\.json: names no files of rows"):
        find_source(tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(UsageError, match=r"state\.json: is not valid JSON"):
        find_source(tmp_path)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    (tmp_path / "train-00001-of-00003.parquet").touch()
    with pytest.raises(UsageError, match="lacks 2 of 3 files") as caught:
        find_source(tmp_path)
    assert "train-00000-of-00003.parquet" in str(caught.value)
    for number in (0, 2):
        (tmp_path / f"train-0000{number}-of-00003.parquet").touch()
    assert len(find_source(tmp_path).files) == 3


def test_a_saved_dataset_with_indices_is_refused(tmp_path: Path) -> None:
    state = {
        "_data_files": [{"filename": "a.arrow"}],
        "_indices_data_files": [{"filename": "indices.arrow"}],
    }
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(UsageError, match="flatten_indices"):
        find_source(tmp_path)
