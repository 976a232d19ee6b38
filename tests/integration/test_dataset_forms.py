"""The same images and captions are the same dataset in every form: equal digests, plans,
cached values and training, split or not.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from dstrain import UsageError
from dstrain.errors import CacheError

from tests.support.dataset_forms import FORMS, project_of_forms, unsplit_and_split
from tests.support.runs import same, train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project_of_forms(tmp_path_factory.mktemp("forms"), FORMS)


@pytest.fixture(scope="module")
def wanted(here: Path) -> dict[str, Any]:
    """What the dataset of metadata.json gives."""
    return unsplit_and_split(here, here / "data")


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


CHANGES = {
    "captions": lambda data: (data / "0.txt").write_text("a wolf"),
    "added": lambda data: [
        shutil.copy(data / "0.png", data / "9.png"),
        (data / "9.txt").write_text("a wolf"),
    ],
    "renamed": lambda data: [
        (data / "0.png").rename(data / "00.png"),
        (data / "0.txt").rename(data / "00.txt"),
    ],
    "image": lambda data: shutil.copy(data / "2.png", data / "0.png"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_folder_is_seen_by_both_stages(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    data = tmp_path / "data"
    shutil.copytree(here / "captions", data)
    given = {"dataset_base_path": data, "feature_cache": tmp_path / "cache"}
    train(here, task="sft:data_process", **given)
    train(here, task="sft:train", output_path=tmp_path / "a", max_steps=1, **given)
    CHANGES[change](data)
    refuse = {"output_path": tmp_path / "b", "max_steps": 1, **given}
    with pytest.raises(CacheError, match="is not what the feature cache"):
        train(here, task="sft:train", **refuse)
    capsys.readouterr()
    train(here, task="sft:data_process", **given)
    said = capsys.readouterr().err
    # The values of a renamed image, and of one in place of another, are in the cache.
    wanted = 0 if change in ("renamed", "image") else 1
    assert f"precomputing {wanted} of {6 if change == 'added' else 5}" in said
    train(here, task="sft:train", **refuse)


@pytest.mark.parametrize("form", FORMS)
def test_stage_1_with_nothing_to_do_reads_no_row(
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    form: str,
) -> None:
    # As if all had been written long ago.
    monkeypatch.setattr("dstrain.storage.file_memory.SETTLED", -(10**18))
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "user"))
    given = {"dataset_base_path": here / form, "feature_cache": tmp_path / "cache"}
    train(here, task="sft:data_process", **given)
    capsys.readouterr()

    def refuse(*_: Any) -> None:
        raise AssertionError("rows are read")

    monkeypatch.setattr("dstrain.runs.setup.open_dataset", refuse)
    for secret in (False, True):
        if secret:
            monkeypatch.setenv("SOME_TOKEN", "hf_abcdefghijklmnopqrst")
        train(here, task="sft:data_process", **given)
        again = capsys.readouterr().err.splitlines()
        assert any("precomputing 0 of 5" in line for line in again)


def test_the_default_caption_and_chosen_columns_belong_to_the_cache(
    here: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(here / "captions", data)
    (data / "0.txt").unlink()
    given = {"dataset_base_path": data, "feature_cache": tmp_path / "cache"}
    with pytest.raises(UsageError, match="1 bad value"):
        train(here, task="sft:data_process", **given)
    train(here, task="sft:data_process", default_caption="a wolf", **given)
    with pytest.raises(
        CacheError, match="--default_caption: cache a wolf, this run no"
    ):
        train(here, task="sft:train", output_path=tmp_path / "a", **given)
    with pytest.raises(UsageError, match="--default_caption: has no effect"):
        train(here, dataset_base_path=here / "data", default_caption="a wolf")
    table = here / "imagefolder csv"
    other = {"dataset_base_path": table, "feature_cache": tmp_path / "other"}
    train(here, task="sft:data_process", **other)
    chosen = {**other, "column": ("input_image=file_name", "prompt=text")}
    with pytest.raises(
        CacheError, match="--column: cache nothing, this run input_imag"
    ):
        train(here, task="sft:train", output_path=tmp_path / "b", max_steps=1, **chosen)


def test_a_second_dataset_may_have_another_form(here: Path, tmp_path: Path) -> None:
    losses = []
    for form in ("data", "captions"):
        out = train(
            here,
            output_path=tmp_path / form,
            max_steps=2,
            validation_steps=1,
            validation_dataset_base_path=here / form,
        )
        losses.append((out / "logs/validation.csv").read_text())
    assert losses[0] == losses[1]
