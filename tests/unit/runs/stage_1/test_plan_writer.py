"""The plan file names what stage 2 reads, and each file once."""

import json
from pathlib import Path

import pytest
from dstrain.runs.stage_1.plan_writer import name_in, shapes

from tests.support.caching_project import filled_place


def test_a_plan_has_a_line_for_each_row_and_each_file_once(tmp_path: Path) -> None:
    with filled_place(tmp_path) as place:
        (plan,) = place.plans
        lines = [json.loads(line) for line in plan.read_text().splitlines()]
        rows = [line for line in lines if "row" in line]
        assert [(line["row"], line["line"]) for line in rows] == [
            (i, i + 2) for i in range(4)
        ]
        files = [name for line in rows for name, _ in line["files"]]
        assert files == ["0.png", "1.png", "2.png", "3.png"]


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


def test_shapes_are_those_of_every_tensor_of_a_value() -> None:
    one, other = {"shape": [2, 3]}, {"shape": [1]}
    assert shapes({"list": [one, {"record": {"a": other, "b": one}}]}) == [
        [2, 3],
        [[1], [2, 3]],
    ]
