"""The plan of stage 1 names what stage 2 reads, and the command that makes it again."""

from pathlib import Path
from typing import Any

import pytest
from dstrain.cache import StoredPlan, stored_plans
from dstrain.cache.source_files import are_as_recorded

from tests.support.caching_project import (
    log_units,
    noise_image,
    write_place,
    write_rows,
)
from tests.support.runs import project, train


def plan_of(cache: Path) -> StoredPlan:
    (plan,) = stored_plans(cache)
    return plan


def test_a_plan_has_a_line_for_each_row_and_each_file_once_by_its_place_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_units(monkeypatch, tmp_path)
    place = write_place(tmp_path / "place")
    other, link = tmp_path / "other", tmp_path / "link"
    for path in (place.data / "deep/4.png", other / "5.png"):
        path.parent.mkdir()
        noise_image(int(path.stem)).save(path)
    link.symlink_to(place.data)
    images = ["0.png", "0.png", str(place.data / "1.png"), str(link / "2.png")]
    images += ["deep/4.png", "5.png"]
    write_rows(place.data, [{"image": image, "prompt": "a"} for image in images])
    place.fill(dataset_root=(other,))
    plan = plan_of(place.cache)
    rows = plan.samples()
    assert [(line["row"], line["line"]) for line in rows] == [
        (row, row + 2) for row in range(6)
    ]
    places = plan.files().table.column("place").to_pylist()
    names = ["0.png", "1.png", "2.png", "5.png", "deep/4.png"]
    assert sorted(places) == [name.encode() for name in names]
    assert are_as_recorded(plan, range(6), [str(place.data), str(other)])


@pytest.mark.parametrize(
    "flags", [{}, {"task": "sft", "max_steps": 1}], ids=["stage 1", "both stages"]
)
def test_the_words_of_stage_1_are_recorded_with_their_folder(
    flags: dict[str, Any], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    project(tmp_path)
    cache = tmp_path / "cache"
    given = {"task": "sft:data_process", "feature_cache": cache, "overwrite": True}
    train(tmp_path, **{**given, **flags})
    (words, folder) = map(plan_of(cache).info.config.get, ("words", "folder"))
    assert folder == str(tmp_path)
    assert words[:2] == ["--model", "tiny"]
    assert words[words.index("--task") + 1] == "sft:data_process"
    assert not {"--feature_cache", "--output_path", "--overwrite"} & {*words}
