"""What lies in a folder of captions and is not read is said, a line for each kind."""

from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.data.forms import find_source
from dstrain.data.forms.left_out import left_out, tables_below


def write(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return folder


def test_each_kind_is_one_line_with_its_number_and_an_example(tmp_path: Path) -> None:
    write(tmp_path, "a.png", "a.txt", "b.mp4", "b.txt", "orphan.txt", "x/c.json")
    write(tmp_path, "IMG_1.HEIC", "IMG_1.txt", "x/d.jxl", "old.wmv", ".hidden.txt")
    assert left_out(tmp_path, is_image=True) == [
        "2 captions have no image, such as orphan.txt",
        "2 files are of a kind that is not read, such as IMG_1.HEIC; convert them to PNG or JPEG",
        "1 file is of a kind that is not read, such as old.wmv; convert it to MP4",
        "1 video is not read: the variant reads images",
    ]
    assert len(left_out(tmp_path, is_image=False)) == 3
    assert left_out(write(tmp_path / "y", "a.png", "a.txt"), is_image=True) == []


def test_names_of_folders_that_other_scripts_read_are_said(tmp_path: Path) -> None:
    write(tmp_path, "10_sks cat/a.png", "10_sks cat/a.txt", "20_dog/b.png")
    (line,) = left_out(write(tmp_path, "20_dog/b.txt"), is_image=True)
    assert "'10_sks cat' are not read as repeats and captions" in line
    assert "--trigger_word" in line


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ("train/metadata.jsonl", "train/a.png", "test/metadata.jsonl"),
            "give --dataset_base_path {}/train\n",
        ),
        (("notes/metadata.csv", "a.png"), "{} --dataset_metadata_path {}/notes/meta"),
        (("src=a/x.parquet", "src=b/y.parquet"), "give --dataset_base_path {}/src=a"),
    ],
)
def test_tables_in_folders_below_are_named_with_what_to_type(
    tmp_path: Path, names: tuple[str, ...], said: str
) -> None:
    write(tmp_path, *names)
    with pytest.raises(UsageError) as caught:
        find_source(tmp_path)
    found = str(caught.value)
    assert names[0] in found
    assert said.format(tmp_path, tmp_path) in found


def test_a_folder_of_which_all_have_captions_is_read_whatever_is_below(
    tmp_path: Path,
) -> None:
    write(tmp_path, "a.png", "a.txt", "deep/metadata.csv", ".git/metadata.csv")
    assert tables_below(tmp_path) == [Path("deep/metadata.csv")]
    assert find_source(tmp_path).form == "folder"


def test_a_folder_of_such_files_alone_is_refused_by_their_names(tmp_path: Path) -> None:
    write(tmp_path, "IMG_1.HEIC", "IMG_1.txt")
    with pytest.raises(UsageError, match=r"1 file is of a kind .*IMG_1\.HEIC"):
        find_source(tmp_path)


def test_a_file_or_a_name_misspelt_is_answered_with_what_to_type(
    tmp_path: Path,
) -> None:
    write(tmp_path / "photos", "metadata.csv", "x.png")
    table = tmp_path / "photos/metadata.csv"
    both = f"{table.parent} --dataset_metadata_path {table}"
    with pytest.raises(UsageError, match=f"is a file; give its folder, or .*{both}"):
        find_source(table)
    with pytest.raises(UsageError, match=r"x\.png is a file; give its folder$"):
        find_source(tmp_path / "photos/x.png")
    with pytest.raises(UsageError, match=r"does not exist; did you mean 'photos'\?"):
        find_source(tmp_path / "photo")
