"""A plugin's form finds rows and reads them; what is wrong is named by file and row."""

import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
from dstrain import SystemFault, UsageError
from dstrain.data import Table
from dstrain.data.tables import Reading, ask, embedded_folder, find_source, texts_of
from dstrain.data.tables.row_files import fetch
from dstrain.graph import Input
from dstrain.plugin import Column, Content, Form, FormCell, FormRow, Given, Source

INPUTS: dict[str, Input] = {
    "prompt": Column("prompt"),
    "input_image": Column("image", "image"),
}


def _read(archive: zipfile.ZipFile, name: str) -> list[bytes]:
    return [archive.read(name)]


class Zipped(Form):
    """Pictures in a zip, each with the stem of its name as its caption."""

    name = "zip"
    reads = (".zip",)

    def __init__(self, change: Callable[[FormRow], FormRow] = lambda row: row) -> None:
        self.change = change

    def find(self, given: Given) -> Source | None:
        path = given.path
        files = tuple(sorted(path.glob("*.zip"))) if path.is_dir() else (path,)
        is_one = bool(files) and files[0].suffix == ".zip"
        return Source(self.name, path, path, files) if is_one else None

    def columns(self, file: Path) -> Mapping[str, bool]:
        return {"image": True, "prompt": False}

    def rows(self, file: Path, columns: Mapping[str, bool]) -> Iterator[FormRow]:
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                content = Content(partial(_read, archive, name), name)
                row: dict[str, FormCell] = {"image": content}
                row["prompt"] = Path(name).stem
                yield self.change(row)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for archive, names in (("a", ("dog.png", "cat.png")), ("b", ("bird.png",))):
        with zipfile.ZipFile(tmp_path / f"data/{archive}.zip", "w") as file:
            for name in names:
                file.writestr(name, name * 3)
    return tmp_path / "data"


def read(folder: Path, form: Form) -> Table:
    return Reading().read(find_source(folder, forms=(form,)), INPUTS)


def test_contents_are_files(folder: Path) -> None:
    form = Zipped()
    table = read(folder, form)
    assert [row["prompt"] for row in table.rows] == ["dog", "cat", "bird"]
    images = [Path(str(row["image"])) for row in table.rows]
    assert [one.read_text() for one in images][1:] == ["cat.png" * 3, "bird.png" * 3]
    assert {one.suffix for one in images} == {".png"}
    assert table.roots == (embedded_folder(),)
    assert table.where(2, "image") == "b.zip:1:image"
    assert list(read(folder, form).rows) == list(table.rows)
    source = find_source(folder, forms=(form,))
    assert source.in_words == "2 zip files"
    assert sorted(texts_of(source))[:2] == ["bird", "bird.png"]


def test_contents_of_a_known_digest_are_not_opened_where_they_are(folder: Path) -> None:
    table = read(folder, Zipped())
    digest = Path(str(table.rows[0]["image"])).stem

    def refuse() -> list[bytes]:
        raise AssertionError("it is opened")

    known = Zipped(lambda row: {**row, "image": Content(refuse, "x.png", digest)})
    found = [row["image"] for row in read(folder, known).rows]
    assert found == [table.rows[0]["image"]] * 3


def failing(error: Exception) -> Callable[[FormRow], FormRow]:
    def change(row: FormRow) -> FormRow:
        raise error

    return change


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (failing(KeyError("x")), UsageError, "a.zip: cannot be read as zip by dstrain"),
        (failing(OSError(5, "failed")), SystemFault, "a.zip: cannot be read"),
        (lambda row: {**row, "image": 3}, UsageError, "a cell that is a int"),
        (lambda row: {**row, "image": ValueError("is bad")}, UsageError, "is bad"),
        (lambda row: {**row, "prompt": "a\0b"}, UsageError, "a.zip:1:prompt: "),
        (lambda row: {"prompt": ValueError("is bad")}, UsageError, "prompt: is bad"),
    ],
)
def test_what_is_wrong_has_its_place(
    folder: Path, change: Callable[[FormRow], FormRow], kind: type, said: str
) -> None:
    with pytest.raises(kind) as caught:
        table = read(folder, Zipped(change))
        table.refuse(table.faults)
    assert said in str(caught.value)


def test_a_damaged_file_of_the_form_is_named(folder: Path) -> None:
    (folder / "a.zip").write_bytes(b"PK")
    with pytest.raises(UsageError, match=r"a\.zip: cannot be read as zip"):
        read(folder, Zipped())


class Other(Zipped):
    name = "other"


def test_two_forms_of_a_dataset_are_refused_unless_one_is_chosen(folder: Path) -> None:
    forms = (Zipped(), Other())
    with pytest.raises(UsageError, match="zip or other") as caught:
        find_source(folder, forms=forms)
    assert "--dataset_form" in str(caught.value)
    assert find_source(folder, forms=forms, chosen="other").form == "other"
    with pytest.raises(UsageError, match=r"no form named 'zop'.*'zip'"):
        find_source(folder, forms=forms, chosen="zop")


def test_core_s_forms_can_be_chosen_and_a_table_wins(folder: Path) -> None:
    (folder / "a.png").touch()
    forms = (Zipped(),)
    assert find_source(folder, forms=forms).form == "zip"
    assert find_source(folder, forms=forms, chosen="folder").form == "folder"
    (folder / "metadata.csv").write_text("image,prompt\n")
    assert find_source(folder, forms=forms).form == "table"
    assert find_source(folder, forms=forms, chosen="zip").form == "zip"


class Bytes(Form):
    """Opens a scheme of its own."""

    name = "bytes"

    def __init__(self, keeps: Path) -> None:
        self.keeps = keeps

    def open(self, name: str) -> Content | None:
        _, is_own, text = name.partition("bytes://")
        return Content(lambda: [text.encode()]) if is_own else None


def test_a_form_opens_urls_of_its_own(tmp_path: Path) -> None:
    form = Bytes(tmp_path)
    assert fetch(" bytes://abc ", (form,)).read_text() == "abc"
    with pytest.raises(UsageError, match="is a URL"):
        fetch("https://a.example/x.png", (form,))


def test_what_a_plugin_reads_that_is_not_installed_is_answered_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dstrain.installed._is_there", lambda *_: False)
    for name in ("a.png", "a.txt", "data/train.parquet", "b/rows.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    file = tmp_path / "b/rows.parquet"
    for given in ((tmp_path,), (tmp_path / "b",), (file,), (tmp_path, file)):
        with pytest.raises(UsageError, match="no installed plugin reads") as caught:
            find_source(*given)
        assert "./plugins/datasets" in str(caught.value)
    monkeypatch.setattr("dstrain.installed._is_there", lambda *_: True)
    with monkeypatch.context() as installed:
        # No folder is gone through for nothing.
        installed.setattr("os.listdir", None)
        installed.setattr(Path, "iterdir", None)
        assert find_source(tmp_path).form == "folder"
    monkeypatch.setattr("dstrain.installed._is_there", lambda *_: False)
    with pytest.raises(UsageError, match="pip install"):
        fetch("https://a.example/x.png", ())
    with pytest.raises(UsageError, match="pip install") as caught:
        ask((), Given(Path("someone/photos"), is_id=True))
    assert caught.value.where == "--dataset_base_path"
    assert ask((), Given(Path("someone/photos"), is_id=True, is_needed=False)) is None
    assert find_source(tmp_path, chosen="folder").form == "folder"
