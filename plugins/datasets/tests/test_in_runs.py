"""Datasets of these forms are trained on as others are: equal digests, plans, cached values
and training, split or not; what is wrong in them is named.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dstrain import DstrainError, UsageError
from PIL import Image

from tests.support.dataset_forms import (
    OTHERS,
    FormsInRuns,
    project_of_forms,
    rows_in,
    write_form,
)
from tests.support.runs import train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project_of_forms(tmp_path_factory.mktemp("forms"), OTHERS)


class TestFormsInRuns(FormsInRuns):
    forms = OTHERS


def test_a_name_in_parquet_leads_nowhere_else(here: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    shutil.copy(here / "data/0.png", tmp_path / "secret.png")
    for name in ("../secret.png", str(tmp_path / "secret.png")):
        images = [{"bytes": None, "path": name}]
        rows = pa.table({"image": images, "text": ["a"]})
        pq.write_table(rows, folder / "rows.parquet")
        with pytest.raises(UsageError) as caught:
            train(here, dataset_base_path=folder, output_path=tmp_path / "out")
        (line,) = caught.value.help_lines
        assert line.startswith("rows.parquet:1:image: ")
        assert "points outside the dataset's folder" in line


@pytest.mark.parametrize("start", [20, 60])
def test_a_damaged_image_in_parquet_is_named_by_its_row_and_column(
    start: int, here: Path, tmp_path: Path
) -> None:
    """In the header, where it shows before the run, or behind it: its file in the user's
    folder has a name that says nothing.
    """
    shutil.copytree(here / "data", tmp_path / "data")
    image = sorted((tmp_path / "data").rglob("*.png"))[1]
    content = image.read_bytes()
    image.write_bytes(content[:start] + b"\0" * 4 + content[start + 4 :])
    rows = rows_in(tmp_path / "data")
    write_form("parquet", tmp_path / "data", rows, tmp_path / "parquet")
    with pytest.raises(UsageError) as caught:
        train(
            here, dataset_base_path=tmp_path / "parquet", output_path=tmp_path / "out"
        )
    said = str(caught.value)
    assert ":2:image: the embedded file " in said
    assert "embedded_files" not in said


def test_the_line_of_a_dataset_has_its_files_and_the_splits_that_are_not_read(
    here: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copytree(here / "parquet", tmp_path / "form")
    (tmp_path / "form/data/test.parquet").touch()
    stage = {"task": "sft:data_process", "feature_cache": tmp_path / "cache"}
    train(here, dataset_base_path=tmp_path / "form", **stage)
    said = capsys.readouterr().err
    assert "2 parquet files, 5 rows: image, prompt from text; not read: test" in said


BAD: dict[str, tuple[dict[str, str | bytes], str]] = {
    "damaged": ({"a.parquet": b"PAR1"}, "a.parquet: cannot be read as parquet"),
    "no rows": (
        {"state.json": '{"_data_files": []}'},
        "state.json: names no files of rows",
    ),
    "below": (
        {"src=a/x.parquet": b"", "src=b/y.parquet": b""},
        "2 files are not read, such as src=a/x.parquet",
    ),
    "a pointer": (
        {"a.parquet": "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"},
        "Git LFS",
    ),
    "a URL": ({"metadata.csv": "image,prompt\nhttps://a/x.png,a\n"}, "--url_cache DIR"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_named(here: Path, tmp_path: Path, name: str) -> None:
    contents, said = BAD[name]
    for path, content in contents.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        (tmp_path / path).write_bytes(data)
    with pytest.raises(DstrainError) as caught:
        train(here, dataset_base_path=tmp_path, output_path=tmp_path / "out")
    assert said.format(tmp_path) in str(caught.value)


def test_a_url_of_another_kind_is_refused_with_the_reason(
    here: Path, tmp_path: Path
) -> None:
    table = "image,prompt\nftp://a.example/x.png,a\n"
    (tmp_path / "metadata.csv").write_text(table)
    given = {"dataset_base_path": tmp_path, "url_cache": tmp_path / "cache"}
    with pytest.raises(UsageError, match="an unsupported protocol 'ftp://'"):
        train(here, output_path=tmp_path / "out", **given)


def test_a_fetched_file_in_a_relative_folder_is_compared(
    here: Path, empty: Path
) -> None:
    shutil.copytree(here / "data", empty / "data")
    url = "https://example.org/0.png"
    name = f"{hashlib.sha256(url.encode()).hexdigest()}.png"
    Path("fetched").mkdir()
    metadata = empty / "data/metadata.json"
    rows = json.loads(metadata.read_text())
    (empty / "data" / rows[0]["image"]).rename(Path("fetched") / name)
    rows[0]["image"] = url
    metadata.write_text(json.dumps(rows))
    given: dict[str, Any] = {
        "dataset_base_path": empty / "data",
        "url_cache": Path("fetched"),
        "feature_cache": empty / "cache",
    }
    train(here, task="sft:data_process", **given)
    trained = {**given, "task": "sft:train", "max_steps": 1}
    train(here, output_path=empty / "a", **trained)
    Image.new("RGB", (16, 16), "red").save(Path("fetched") / name)
    with pytest.raises(DstrainError, match=f"{name}: is not what"):
        train(here, output_path=empty / "b", **trained)


def test_rows_whose_files_may_be_fetched_are_always_read(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dstrain.storage.file_memory.SETTLED", -(10**18))
    given: dict[str, Any] = {"feature_cache": tmp_path / "cache"}
    given |= {"task": "sft:data_process", "url_cache": tmp_path / "urls"}
    train(here, **given)
    read = []
    from dstrain.runs import setup

    opened = setup.open_dataset
    monkeypatch.setattr(
        setup, "open_dataset", lambda *all: read.append(1) or opened(*all)
    )
    train(here, **given)
    assert read
