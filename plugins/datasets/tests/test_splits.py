"""Parquet files, and what `datasets` saved, are found in a folder, and of splits the one for
training.
"""

from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.data import metadata_files
from dstrain.data.tables import Source, find_source as find_any
from dstrain.storage import sha256
from dstrain_datasets.forms.columnar import Arrow, Parquet

from tests.support.dataset_forms import rows_in, write_form
from tests.support.family import write_data

CAPTIONS = ("dog", "cat", "bird", "fish")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_data(tmp_path / "data", CAPTIONS)
    return tmp_path / "data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a test writes a dataset."""
    return tmp_path / "x"


def find_source(base: Path, metadata: Path | None = None) -> Source:
    return find_any(base, metadata, forms=(Parquet(), Arrow()))


def refused(base: Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        find_source(base)
    return caught.value


def test_metadata_wins_over_images_and_a_named_file_over_all(
    data: Path, folder: Path
) -> None:
    write_form("parquet", data, rows_in(data), folder)
    path = folder / "data/train-00000-of-00002.parquet"
    path.with_name("metadata.parquet").symlink_to(path)
    assert find_source(data).path == data / "metadata.json"
    named = find_source(data, path)
    assert (named.form, named.base, named.files) == ("parquet", data, (path,))
    assert named.digest() == sha256(path)
    assert metadata_files(folder) == []


def test_of_splits_the_one_for_training_is_read(data: Path, folder: Path) -> None:
    write_form("parquet", data, rows_in(data), folder)
    (folder / "data/test-00000-of-00001.parquet").touch()
    found = find_source(folder)
    assert [file.name[:5] for file in found.files] == ["train", "train"]
    assert found.left_out == ("test",)
    for path in (folder / "data").glob("train*"):
        path.rename(path.with_name(path.name.replace("train", "validation")))
    error = refused(folder)
    assert error.where == str(folder / "data")
    assert "test, validation" in error.what


@pytest.mark.parametrize(
    ("split", "names"),
    [
        ("test", ("testing-0", "eval", "my_evaluation")),
        ("validation", ("valid.1", "VAL", "dev")),
        ("others", ("latest",)),
    ],
)
def test_a_split_is_known_by_a_word_in_the_names_of_its_files(
    tmp_path: Path, split: str, names: tuple[str, ...]
) -> None:
    for name in (*names, "training", ".train"):
        (tmp_path / f"{name}.parquet").touch()
    found = find_source(tmp_path)
    assert [file.name for file in found.files] == ["training.parquet"]
    assert found.left_out == (split,)


def test_saved_splits_are_folders(data: Path, folder: Path) -> None:
    for split in ("train", "test"):
        write_form("saved", data, rows_in(data), folder / split)
    splits = folder / "dataset_dict.json"
    splits.write_text('{"splits": ["test", "train"]}')
    found = find_source(folder)
    assert found.path == folder / "train"
    assert found.left_out == ("test",)
    splits.write_text('{"splits": ["test", "other"]}')
    (folder / "train").rename(folder / "other")
    assert f"--dataset_base_path {folder}/test" in str(refused(folder))


@pytest.mark.parametrize(
    ("state", "where"),
    [
        *(
            (f'{{"_data_files": [{{"filename": {name}}}]}}', "/state.json")
            for name in ('"../secret.arrow"', '"/etc/passwd"', '""', "null", "3")
        ),
        ('{"_data_files": []}', "/state.json"),
        ("{", "/state.json"),
        ("[]", "/state.json"),
        ('{"_data_files": [], "_indices_data_files": [1]}', ""),
    ],
)
def test_a_saved_dataset_names_its_files_and_no_other(
    tmp_path: Path, state: str, where: str
) -> None:
    (tmp_path / "state.json").write_text(state)
    error = refused(tmp_path)
    assert error.where == f"{tmp_path}{where}"
    assert ("flatten_indices" in str(error)) is (not where)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    name = "train-0000{}-of-00003.parquet"
    (tmp_path / name.format(1)).touch()
    error = refused(tmp_path)
    assert " 2 of 3 " in error.what
    assert name.format(0) in error.what
    for number in (0, 2):
        (tmp_path / name.format(number)).touch()
    assert len(find_source(tmp_path).files) == 3
