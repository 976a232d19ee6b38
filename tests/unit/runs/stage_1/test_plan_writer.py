"""The plan file names what stage 2 reads, and each file once."""

from pathlib import Path

import pytest
from dstrain.cache import SourceFiles, open_samples, stored_plans
from dstrain.runs.stage_1.plan_writer import name_in

from tests.support.caching_project import filled_place


def test_a_plan_has_a_line_for_each_row_and_each_file_once(tmp_path: Path) -> None:
    with filled_place(tmp_path) as place:
        ((path, record),) = stored_plans(place.cache / "plans")
        rows = open_samples(path.parent, record)
        assert [(line["row"], line["line"]) for line in rows] == [
            (i, i + 2) for i in range(4)
        ]
        files = SourceFiles.open(path.parent, record)
        assert files.table.column("place").to_pylist() == [
            b"0.png",
            b"1.png",
            b"2.png",
            b"3.png",
        ]
        assert files.are_as_recorded([str(place.data)])


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/data/a/b.png", "a/b.png"),
        ("/other/c.png", "c.png"),
        ("/data.png", "/data.png"),
        ("/data/../secret.png", "/data/../secret.png"),
    ],
)
def test_a_file_is_named_by_its_place_in_a_folder(path: str, name: str) -> None:
    assert name_in(["/data", "/other"], path) == name


def test_a_file_that_a_link_leads_to_has_the_name_of_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    assert name_in([str(folder)], str(tmp_path / "link/a.png")) == "a.png"
