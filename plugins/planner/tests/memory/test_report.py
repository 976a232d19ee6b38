"""The answer is read without scrolling, and a machine reads the same."""

import json
from pathlib import Path

import pytest
from dstrain import run
from dstrain.cli.main import main

from tests.support.runs import config, project

pytestmark = pytest.mark.usefixtures("tiny")


def test_the_answer_comes_last_where_it_is_on_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metadata.csv").write_text("image,prompt\n0.png,a\n")
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
