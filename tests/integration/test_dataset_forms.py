"""The same images and captions are the same dataset in every form: equal digests, plans,
cached values and training, split or not.
"""

import shutil
from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.errors import CacheError

from tests.support.dataset_forms import FORMS, FormsInRuns, project_of_forms
from tests.support.runs import train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project_of_forms(tmp_path_factory.mktemp("forms"), FORMS)


class TestFormsInRuns(FormsInRuns):
    forms = FORMS


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
