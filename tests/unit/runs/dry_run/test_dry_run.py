"""A dry run needs neither models nor images: what is here is checked as a run does it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dstrain import StateError, UsageError, run
from dstrain.cli.main import main
from PIL import Image

from tests.support.family import IDS
from tests.support.runs import config, log, project, train

pytestmark = pytest.mark.usefixtures("tiny", "wide_page")
Command = Callable[..., str]
Page = Callable[..., str]


@pytest.fixture
def bare(server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Words -> what a dry run says where there is metadata alone, and no hub to ask."""
    (tmp_path / "metadata.csv").write_text("image,prompt\n0.png,a\n")

    def said(words: str, code: int = 0) -> str:
        assert main(["--model", "tiny", "--dry_run", *words.split()]) == code
        assert server.requests == []
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return said


@pytest.fixture
def page(capsys: pytest.CaptureFixture[str]) -> Page:
    """Return a function from a project and flags to what a dry run prints."""

    def printed(folder: Path, **flags: Any) -> str:
        run(config(folder, dry_run=True, **flags))
        return capsys.readouterr().out

    return printed


def to_fetch(printed: str) -> list[str]:
    """The lines of what is not on this machine."""
    return printed.partition("\nto fetch\n")[2].partition("\n\n")[0].splitlines()


def steps_in(printed: str) -> list[str]:
    return re.findall(r"^    (\d+) steps?\b", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("stage", "absent"),
    [
        ("", ["metadata.csv", "transformer", "text_encoder", "vae", "tokenizer"]),
        (":data_process", ["metadata.csv", "text_encoder", "vae", "tokenizer"]),
        (":train", [".", "transformer"]),
    ],
)
def test_it_needs_only_the_metadata(
    stage: str, absent: list[str], bare: Command, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    words = f"--task sft{stage} --model_id_with_origin_paths {IDS}"
    printed = bare(f"{words} --dataset_base_path . --output_path out")
    loads = re.findall(r"   loads (.*)$", printed, re.MULTILINE)
    assert loads == ["text_encoder, vae, tokenizer", "dit"]
    assert ("stage 1" in printed) is ("stage 2" in printed) is (stage != "")
    assert ("1 row in metadata.csv" in printed) is (stage != ":train")
    for line, place in zip(to_fetch(printed), absent, strict=True):
        assert place in line.split(" ")[4]
    assert sorted(tmp_path.iterdir()) == before


def test_the_plan_needs_no_dataset_and_is_that_of_its_columns(
    bare: Command, here: Path, page: Page
) -> None:
    printed = bare("")
    assert "samples per step: 1\n" in printed
    assert "samples per step: 1\n" in bare("--feature_cache new --toy --output_path o")
    plan = printed.partition("this run")[0]
    assert "encode_prompt" in plan and "input_latents" in plan
    flags = {"model_paths": '["nothing.safetensors"]'}
    assert page(here, **flags).partition("this run")[0] == plan


@pytest.mark.parametrize(
    ("flags", "samples", "steps"),
    [
        ({"dataset_repeat": 5, "num_epochs": 3, "batch_size": 4}, 4, 24),
        ({"max_steps": 7}, 1, 7),
        ({"max_steps": 7, "num_epochs": 2}, 1, 7),
        ({"gradient_accumulation_steps": 3}, 3, 2),
        ({"validation_split": 0.3}, 1, 3),
    ],
)
def test_it_says_rows_and_the_steps_that_the_run_makes(
    flags: dict[str, Any],
    samples: int,
    steps: int,
    here: Path,
    tmp_path: Path,
    page: Page,
) -> None:
    printed = page(here, **flags)
    assert f"    6 rows in {here}/data/metadata.json x " in printed
    assert f" {samples}\n" in printed.partition("samples per step:")[2]
    assert steps_in(printed) == [str(steps)]
    # Rows that the run may leave out are not known yet.
    skipping = page(here, on_bad_sample="skip", **flags)
    guessed = re.findall(r"^    (\d+) steps?(.?)", skipping, re.MULTILINE)
    assert guessed == [(str(steps), ",")]
    held_out = re.findall(r"(\d+) of these for validation", printed)
    assert held_out == (["3"] if "validation_split" in flags else [])
    assert len(log(train(here, output_path=tmp_path, **flags))) == steps


def test_files_that_are_not_here_are_listed(bare: Command) -> None:
    flags = "--lora_checkpoint lora --preset_lora_path preset --output_path out"
    words = f"--variant base {flags} --resume_from_checkpoint a,metadata.csv,b"
    lines = to_fetch(bare(f'{words} --model_paths ["no.safetensors"]'))
    assert [line.split(" does ")[0].strip() for line in lines[:-1]] == [
        "--lora_checkpoint: lora",
        "--preset_lora_path: preset",
        "--resume_from_checkpoint: a",
        "--resume_from_checkpoint: b",
        "no.safetensors:",
    ]
    assert "    --resume: nowhere " in bare("--output_path new --resume nowhere")


def test_a_folder_that_holds_a_run_is_refused(bare: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "states/step-4").mkdir(parents=True)
    (out / "states/step-4/record.json").write_text("{}")
    (out / "run.json").write_text(
        '{"files": [["run.json", 0], ["states/step-4/record.json", 4]]}'
    )
    assert "--resume" in bare("--output_path out", code=3)
    for more in ("--overwrite", "--resume"):
        bare(f"--output_path out {more}")
    # Stage 1 would make a feature cache there.
    said = bare("--output_path out --task sft:data_process", code=2)
    assert said.startswith("dstrain: error: --")
    (out / "logs").mkdir()
    (out / "logs/config.json").write_text("mine")
    said = bare("--output_path out --overwrite", code=3)
    assert "error: out: " in said and "logs/config.json" in said


def test_saved_weights_to_start_from_are_compared_with_what_is_trained(
    here: Path, tmp_path: Path, page: Page
) -> None:
    for kind in ({"lora_rank": 2}, {"trainable_models": "dit"}):
        (name,) = kind
        out = train(here, output_path=tmp_path / name, max_steps=1, **kind)
        start = {"resume_from_checkpoint": out / "step-1.safetensors", **kind}
        assert steps_in(page(here, max_steps=1, **start)) == ["1"]
    start = {"resume_from_checkpoint": tmp_path / "lora_rank/step-1.safetensors"}
    with pytest.raises(StateError, match="rank 2"):
        page(here, lora_rank=4, **start)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Flags of a feature cache, which stage 1 fills; its files count as old ones."""
    monkeypatch.setattr("dstrain.storage.file_memory.SETTLED", 0)
    project(tmp_path)
    return {"feature_cache": tmp_path / "cache"}


def test_stage_1_with_nothing_to_do_reads_no_row_and_says_the_same(
    cached: dict[str, Any], tmp_path: Path, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage_1 = {"task": "sft:data_process", **cached}
    want = page(tmp_path, **stage_1)
    assert "6 rows in" in want
    assert "2 sizes (" in want and "batches" not in want
    train(tmp_path, **stage_1)
    # Now an image that is looked at is one that cannot be read.
    monkeypatch.setattr(Image, "open", None)
    assert page(tmp_path, **stage_1) == want
    metadata = tmp_path / "data/metadata.json"
    metadata.write_text(metadata.read_text().replace("bridge", "road"))
    with pytest.raises(UsageError, match=r"metadata\.json:1:image"):
        page(tmp_path, **stage_1)


@pytest.mark.parametrize("flags", [{}, {"validation_split": 0.3}, {"batch_size": 4}])
def test_stage_2_has_the_rows_and_steps_of_the_feature_cache(
    flags: dict[str, Any], cached: dict[str, Any], tmp_path: Path, page: Page
) -> None:
    train(tmp_path, task="sft:data_process", **cached)
    stage_2 = {"task": "sft:train", **cached, **flags}
    printed = page(tmp_path, **stage_2)
    assert f"    6 rows in {tmp_path / 'data'} x 1\n" in printed
    made = log(train(tmp_path, output_path=tmp_path / "trained", **stage_2))
    assert steps_in(printed) == [str(len(made))]
    assert "to fetch" not in printed
    with pytest.raises(StateError, match="'a horse'"):
        page(tmp_path, **stage_2 | {"preview_prompt": ("a horse",)})


def test_a_command_of_both_stages_says_what_stage_1_computes_and_the_steps_of_stage_2(
    cached: dict[str, Any], tmp_path: Path, page: Page
) -> None:
    def work(**more: Any) -> str:
        printed = page(tmp_path, **{**cached, "batch_size": 4, **more})
        # Two sizes of three rows each, of which a step has four.
        assert steps_in(printed) == ["2"]
        (line,) = re.findall("^    stage 1 .*$", printed, re.MULTILINE)
        return line

    cache = cached["feature_cache"]
    assert work().endswith(f" 6 rows into {cache}")
    second = {"validation_dataset_base_path": tmp_path / "data"}
    assert work(**second).endswith(f" 12 rows into {cache}")
    assert not cache.exists()
    train(tmp_path, task="sft:data_process", batch_size=4, **cached)
    assert f": {cache} " in work() and " 6 rows" not in work()
    assert work(preview_prompt=("new",)).endswith(f" {cache} lacks of 6 rows")


def test_a_machine_reads_a_json_object_per_row_and_then_buckets_steps_and_files(
    here: Path, page: Page, tmp_path: Path
) -> None:
    printed = page(here, json=True, resume_from_checkpoint="gone", dataset_repeat=2)
    found = [json.loads(line) for line in printed.splitlines()]
    rows = [one for one in found if "files" in one]
    assert [one["row"] for one in rows] == [f"metadata.json:{n}" for n in range(1, 7)]
    (image,) = rows[0]["files"].values()
    assert image == [str(here / "data/0.png")]
    assert rows[0]["repeats"] == 2 and not rows[0]["has_mask"]
    assert rows[0]["values"]["prompt"] == "dog"
    buckets = {one["bucket"]: one["samples"] for one in found if "samples" in one}
    assert buckets == {"16 x 16": 6, "16 x 24": 6}
    (length,) = (one for one in found if "steps" in one)
    assert (length["rows"], length["steps"], length["is_exact"]) == (6, 12, True)
    (missing,) = (one for one in found if "to_fetch" in one)
    assert "gone" in missing["to_fetch"]


def test_a_machine_reads_the_place_of_each_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project(tmp_path)
    count = len(json.loads((tmp_path / "data/metadata.json").read_bytes()))
    for number in range(count):
        (tmp_path / f"data/{number}.png").write_bytes(b"no image")
        with pytest.raises(UsageError, match="bad value"):
            run(config(tmp_path, dry_run=True, json=True))
        lines = capsys.readouterr().out.splitlines()
        bad = [one for one in map(json.loads, lines) if "fault" in one]
        assert bad[0]["row"].startswith("metadata.json:1:")
        # The others are listed beside these.
        listed = [one for one in map(json.loads, lines) if "files" in one]
        assert (len(bad), len(listed)) == (number + 1, count - number - 1)
    with pytest.raises(UsageError, match="--dry_run"):
        run(config(tmp_path, json=True))
