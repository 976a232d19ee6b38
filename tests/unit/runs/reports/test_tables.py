"""A table keeps the rows up to a step, whole ones only, and says the same in both forms."""

import json
from pathlib import Path

from dstrain.runs.reports.tables import NumberTable


def table(folder: Path) -> NumberTable:
    return NumberTable(
        folder / "logs/a.csv", folder / "logs/a.jsonl", ("step", "a", "b")
    )


def test_rows_are_kept_up_to_the_step_in_both_forms(tmp_path: Path) -> None:
    with table(tmp_path).opened(0):
        pass
    first = table(tmp_path)
    with first.opened(0):
        for step in range(4):
            first.add({"step": step, "a": step / 3, "b": 2})
    path = tmp_path / "logs/a.csv"
    path.write_text(path.read_text() + "1,0.5\n2,0.5,1e-\n")
    again = table(tmp_path)
    with again.opened(2):
        assert [row["step"] for row in again.kept] == [0, 1, 2]
        assert again.kept[1] == {"step": 1, "a": 0.333333, "b": 2}
        again.add({"step": 3, "a": 0.25, "b": 2})
    assert path.read_text() == (
        "step,a,b\n0,0,2\n1,0.333333,2\n2,0.666667,2\n3,0.25,2\n"
    )
    lines = (tmp_path / "logs/a.jsonl").read_text().splitlines()
    assert [json.loads(line)["a"] for line in lines] == [0, 0.333333, 0.666667, 0.25]


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path: Path) -> None:
    made = table(tmp_path)
    with made.opened(0):
        made.add({"step": 1, "a": float("nan"), "b": float("inf")})
    (line,) = (tmp_path / "logs/a.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "a": None, "b": None}
    with made.opened(1):
        made.add({"step": 2, "a": 1.0, "b": 1.0})
    assert len((tmp_path / "logs/a.csv").read_text().splitlines()) == 3
