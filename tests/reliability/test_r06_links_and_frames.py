"""What a link leads to, a fetched file and the frames of a folder are compared with what
stage 1 read.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from dstrain.cli.main import main
from PIL import Image

from tests.support.runs import same
from tests.support.stage_project import Project, another_image

pytestmark = pytest.mark.promise(
    "R6", "between the stages: recomputed, refused by name, or the same"
)


def link_to_an_image(project: Project) -> Path:
    (project.data / "0.png").rename(project.data / "images.png")
    (project.data / "0.png").symlink_to("images.png")
    shutil.copy(project.data / "images.png", project.data / "others.png")
    another_image(project.data / "others.png")
    return project.data / "0.png"


def link_to_a_folder(project: Project) -> Path:
    (project.data / "images").mkdir()
    for path in list(project.data.glob("*.png")):
        path.rename(project.data / "images" / path.name)
    (project.data / "link").symlink_to("images")
    metadata = project.data / "metadata.json"
    rows = json.loads(metadata.read_text())
    metadata.write_text(
        json.dumps([{**row, "image": f"link/{row['image']}"} for row in rows])
    )
    shutil.copytree(project.data / "images", project.data / "others")
    another_image(project.data / "others/1.png")
    return project.data / "link"


def link_to_another_root(project: Project) -> Path:
    link = link_to_a_folder(project)
    link.unlink()
    for name in ("images", "others"):
        (project.folder / "roots").mkdir(exist_ok=True)
        (project.data / name).rename(project.folder / "roots" / name)
    link.symlink_to(project.folder / "roots/images")
    project.flags["dataset_root"] = (project.folder / "roots",)
    return link


def link_to_the_dataset_in_absolute_names(project: Project) -> Path:
    project.data.rename(project.folder / "images")
    shutil.copytree(project.folder / "images", project.folder / "others")
    another_image(project.folder / "others/1.png")
    project.data.symlink_to("images")
    for name in ("images", "others"):
        metadata = project.folder / name / "metadata.json"
        rows = json.loads(metadata.read_text())
        metadata.write_text(
            json.dumps(
                [{**row, "image": str(project.data / row["image"])} for row in rows]
            )
        )
    return project.data


LINKS = (
    link_to_an_image,
    link_to_a_folder,
    link_to_another_root,
    link_to_the_dataset_in_absolute_names,
)


@pytest.mark.parametrize("replaces", [True, False], ids=("elsewhere", "no link"))
@pytest.mark.parametrize("arrange", LINKS)
def test_what_a_link_leads_to_is_compared(
    arrange: Callable[[Project], Path], replaces: bool, filled: Project
) -> None:
    link = arrange(filled)
    filled.fill()
    before = filled.unsplit()
    assert same(filled.stage_2(), before)
    others = link.readlink().with_name(link.readlink().name.replace("images", "others"))
    if replaces:
        link.unlink()
        link.symlink_to(others)
    else:
        found = link.parent / others
        link.unlink()
        found.rename(link)
    after = filled.unsplit()
    assert not same(after, before)
    assert "is not what the feature cache" in filled.refusal()
    filled.fill()
    assert same(filled.stage_2(), after)


def one_frame_more(folder: Path) -> None:
    shutil.copy(folder / "5.png", folder / "0.png")


def one_frame_less(folder: Path) -> None:
    (folder / "1.png").unlink()


def one_frame_at_another_place(folder: Path) -> None:
    (folder / "1.png").rename(folder / "9.png")


def a_hidden_file_more(folder: Path) -> None:
    (folder / ".index").write_text("of a file browser")


FRAMES = (one_frame_more, one_frame_less, one_frame_at_another_place)


@pytest.mark.parametrize("change", [*FRAMES, a_hidden_file_more])
def test_the_frames_of_a_folder_are_compared(
    change: Callable[[Path], None], empty: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = empty / "data/walk"
    folder.mkdir(parents=True)
    for number in range(1, 8):
        Image.new("RGB", (32, 32), (30 * number, 0, 0)).save(folder / f"{number}.png")
    rows = [{"video": "walk", "prompt": "a walk"}]
    (empty / "data/metadata.json").write_text(json.dumps(rows))
    shutil.copytree(empty / "data", empty / "more")
    (empty / "more/walk/7.png").unlink()
    # Stage 2 does not name the first dataset, nor is a folder of one that of another.
    entries = [
        f'{{"dataset_base_path": "{one}", "flip": true}}' for one in ("more", "data")
    ]
    words = ["--model", "wan", "--variant", "t2v", "--toy", "--num_frames", "5"]
    words += ["--dataset", entries[0], "--dataset", entries[1]]
    words += ["--feature_cache", "cache"]
    words += ["--lora_rank", "1", "--max_steps", "1", "--output_path", "out"]
    base = ["--dataset_base_path", "data"]
    assert main([*words, *base, "--task", "sft:data_process"]) == 0
    change(folder)
    refused = change in FRAMES
    assert main([*words, "--task", "sft:train"]) == (3 if refused else 0)
    assert ("data/walk" in capfd.readouterr().err) == refused
