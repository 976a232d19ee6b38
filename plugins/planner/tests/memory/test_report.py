"""The answer is read without scrolling, and a machine reads the same."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from dstrain import run
from dstrain.cli.main import main

from tests.support.distilling import distillable
from tests.support.runs import config, project

pytestmark = pytest.mark.usefixtures("tiny")


def test_the_answer_comes_last_where_it_is_on_the_screen(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty / "metadata.csv").write_text("image,prompt\n0.png,a\n")
    words = "--model tiny --dry_run --toy --dataset_base_path . --output_path out"
    words += " --device_memory 24GB --preset_lora_path absent"
    for more in ("", " --feature_cache a-folder-with-a-long-name"):
        assert main(f"{words}{more}".split()) == 0
        printed = capsys.readouterr().out
        assert "\nto fetch\n" in printed
        *_, blank, title, answer = printed.splitlines()
        assert blank == "" and title[0] != " "
        assert answer.endswith("--device_memory 24GB (22.35 GiB)")


def test_a_machine_reads_the_bytes_of_each_stage_and_whether_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project(tmp_path)
    run(config(tmp_path, dry_run=True, json=True, device_memory="24GB"))
    lines = [json.loads(one) for one in capsys.readouterr().out.splitlines()]
    memory, disk, answer = (one for one in lines if "section" in one)
    assert memory["peak"] > sum(memory["weights"].values()) > 0
    assert disk["needs"]
    assert (answer["device"], answer["fits"]) == (24 * 10**9, True)


def test_trajectories_are_planned_by_the_shapes_of_their_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"dataset_base_path": distillable(tmp_path) / "made"}
    run(config(tmp_path, task="trajectory_imitation", dry_run=True, **data))
    assert re.search("activations +[0-9.]+ KiB", capsys.readouterr().out)


@pytest.mark.parametrize("stage", ["", ":data_process", ":train"])
def test_masks_are_planned_too(
    stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project(tmp_path)
    table = tmp_path / "data/metadata.json"
    rows = [{**row, "mask": row["image"]} for row in json.loads(table.read_text())]
    table.write_text(json.dumps(rows))
    flags: dict[str, Any] = {"mask_column": "mask", "mixed_precision": "bf16"}
    flags["feature_cache"] = tmp_path / "cache"
    if stage == ":train":
        run(config(tmp_path, task="sft:data_process", **flags))
    flags |= {"task": f"sft{stage}", "dry_run": True, "device_memory": "8GB"}
    run(config(tmp_path, **flags))
    printed = capsys.readouterr().out
    assert ("activations" in printed) == (stage != ":data_process")
    assert "fits" in printed
