"""Stage 2 uses the dataset that the run names, where a feature cache stores more than one,
or refuses.
"""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
from dstrain.runs import feature_plan

from tests.support.runs import same
from tests.support.stage_project import Project, another_image

pytestmark = pytest.mark.promise(
    "R6", "between the stages: recomputed, refused by name, or the same"
)
Step = Callable[[Project], object]


def both(project: Project, first: str = "data", second: str = "other") -> None:
    """Fill the cache from two folders of other images, with one metadata file."""
    shutil.copytree(project.data, project.folder / "other")
    another_image(project.folder / "other/1.png")
    metadata = project.folder / "metadata.json"
    (project.data / "metadata.json").rename(metadata)
    (project.folder / "other/metadata.json").unlink()
    project.flags["dataset_metadata_path"] = metadata
    for name in (first, second):
        project.fill(dataset_base_path=project.folder / name)


def moved(old: str, new: str) -> Step:
    return lambda project: (project.folder / old).rename(project.folder / new)


def copied(old: str, new: str) -> Step:
    return lambda project: shutil.copytree(
        project.folder / old, project.folder / new, copy_function=shutil.copy
    )


def filled_from(name: str) -> Step:
    return lambda project: project.fill(dataset_base_path=project.folder / name)


def third_folder_of_some_images(project: Project) -> None:
    (project.folder / "part").mkdir()
    shutil.copy(project.folder / "other/1.png", project.folder / "part/1.png")


def look_at_few_rows(project: Project) -> None:
    project.patch.setattr(feature_plan, "MOST_ROWS", 2)


CASES: dict[str, tuple[tuple[Step, ...], str, str]] = {
    "names the first": ((), "data", "data"),
    "names the second": ((), "other", "other"),
    "moves the first": ((moved("data", "moved"),), "moved", "moved"),
    "moves the second": ((moved("other", "moved"),), "moved", "moved"),
    "moves the first twice": (
        (moved("data", "moved"), filled_from("moved"), moved("moved", "moved again")),
        "moved again",
        "moved again",
    ),
    "moves the second to the first": (
        (moved("data", "moved"), moved("other", "data")),
        "data",
        "data",
    ),
    "touches a copy": ((copied("data", "copy"),), "copy", "copy"),
    "has some images": ((third_folder_of_some_images,), "part", "other"),
    "has more rows than are looked at": ((look_at_few_rows,), "other", "other"),
}
"""What is done to two datasets with equal metadata, the folder that is named, and that which
a single run reads to the same result.
"""


@pytest.mark.parametrize("order", [("data", "other"), ("other", "data")])
@pytest.mark.parametrize("case", CASES)
def test_of_two_datasets_with_equal_metadata_the_named_one_is_used(
    case: str, order: tuple[str, str], filled: Project
) -> None:
    steps, named, same_as = CASES[case]
    both(filled, *order)
    for step in steps:
        step(filled)
    stored = filled.stage_2(dataset_base_path=filled.folder / named)
    assert same(stored, filled.unsplit(dataset_base_path=filled.folder / same_as))


def third_dataset(project: Project) -> tuple[dict[str, Any], str]:
    both(project)
    shutil.copytree(project.data, project.folder / "third")
    another_image(project.folder / "third/0.png")
    return {"dataset_base_path": project.folder / "third"}, "third/0.png: is not what"


def neither(project: Project) -> tuple[dict[str, Any], str]:
    both(project)
    return {"dataset_base_path": None}, "contains this plan for 2 datasets"


def cache_as_the_base_path(project: Project) -> tuple[dict[str, Any], str]:
    both(project)
    flags = {"dataset_base_path": project.folder / "cache", "feature_cache": None}
    return flags, "contains this plan for 2 datasets"


def unknown_folder_of_too_many_rows(project: Project) -> tuple[dict[str, Any], str]:
    both(project)
    project.patch.setattr(feature_plan, "MOST_ROWS", 2)
    (project.folder / "unknown").mkdir()
    flags = {"dataset_base_path": project.folder / "unknown"}
    return flags, "contains this plan for 2 datasets"


def other_root(project: Project) -> tuple[dict[str, Any], str]:
    for name in ("first", "second"):
        (project.folder / name).mkdir()
        for path in project.data.glob("*.png"):
            shutil.copy(path, project.folder / name)
    another_image(project.folder / "second/2.png")
    for path in project.data.glob("*.png"):
        path.unlink()
    project.fill(dataset_root=(project.folder / "first",))
    assert project.stage_2(dataset_root=(project.folder / "first",))
    flags = {"dataset_root": (project.folder / "second",)}
    return flags, "second/2.png: is not what"


REFUSED_DATASETS = (
    third_dataset,
    neither,
    cache_as_the_base_path,
    unknown_folder_of_too_many_rows,
    other_root,
)


@pytest.mark.parametrize("arrange", REFUSED_DATASETS)
def test_a_dataset_that_is_in_no_plan_or_in_two_is_refused(
    arrange: Callable[[Project], tuple[dict[str, Any], str]], filled: Project
) -> None:
    flags, words = arrange(filled)
    assert words in filled.refusal(**flags)


def test_a_dataset_that_moved_is_one_also_where_it_is_gone(filled: Project) -> None:
    want = filled.stage_2()
    filled.data.rename(filled.folder / "moved")
    filled.flags["dataset_base_path"] = filled.folder / "moved"
    filled.fill()
    shutil.rmtree(filled.folder / "moved")
    filled.flags["dataset_base_path"] = None
    assert same(filled.stage_2(), want)
