"""A dry run needs neither model files, nor a hub, nor images: what is absent is listed,
what is here is checked as the run checks it.
"""

import io
import socket
import sys
from pathlib import Path

import pytest
from dstrain import StateError
from dstrain.cli.main import main
from dstrain.console import PAGE_WIDTH
from dstrain.runs.dry_run.summary import BUILDING, COUNTING, SEARCHING, as_summary
from dstrain.runs.resolve import resolve

from tests.support.pages import set_page_width
from tests.support.runs import config, project, train

pytestmark = pytest.mark.usefixtures("tiny", "wide_page")
IDS = "Tiny/Tiny:transformer/model*.safetensors,Tiny/Tiny:vae/*.safetensors,Tiny/Tiny:text_encoder/*.safetensors"


TO_FETCH = {
    "": "metadata.csv transformer vae text_encoder tokenizer",
    ":data_process": "metadata.csv vae text_encoder tokenizer",
    ":train": ". transformer",
}


def to_fetch(printed: str) -> list[str]:
    """Return the lines of what is not on this machine."""
    return printed.partition("\nto fetch\n")[2].partition("\n\n")[0].splitlines()


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with metadata, and nothing else: no images, no models, no network."""

    def refuse(*given: object, **named: object) -> None:
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("DSTRAIN_MODEL_BASE_PATH", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metadata.csv").write_text("image,prompt\n0.png,a\n")
    return tmp_path


@pytest.mark.parametrize("stage", ["", ":data_process", ":train"])
def test_it_needs_only_the_metadata(
    bare: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--model",
        "tiny",
        "--model_id_with_origin_paths",
        IDS,
        "--dataset_base_path",
        ".",
        "--dry_run",
    ]
    assert main([*words, "--output_path", "out", "--task", f"sft{stage}"]) == 0
    printed = capsys.readouterr().out
    first, second = "stage 1  sft:data_process", "stage 2  sft:train"
    if not stage:
        # Without a feature cache there are no stages.
        first, second = "each step, first", "each step, then"
    assert f"{first}   loads text_encoder, vae, tokenizer" in printed
    assert f"{second}   loads dit" in printed
    assert ("stage 1" in printed) is ("stage 2" in printed) is (stage != "")
    assert ("    1 row in metadata.csv x 1" in printed) is (stage != ":train")
    files = to_fetch(printed)
    assert len(files) == len(TO_FETCH[stage].split())
    for line, place in zip(files, TO_FETCH[stage].split(), strict=True):
        assert place in line.split(" ")[4]
    assert [path.name for path in bare.iterdir()] == ["metadata.csv"]


def test_the_answer_comes_last_where_it_is_on_the_screen(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "tiny", "--toy", "--dry_run", "--dataset_base_path", "."]
    words += ["--output_path", "out", "--preset_lora_path", "absent"]
    words += ["--device_memory", "24"]
    for more, heading in (
        ([], "whether it fits"),
        (
            ["--feature_cache", "cache"],
            "whether it fits: the larger peak decides, that of stage ",
        ),
    ):
        assert main([*words, *more]) == 0
        printed = capsys.readouterr().out
        assert to_fetch(printed)
        assert "\ndisk" in printed
        *_, blank, title, answer = printed.splitlines()
        assert blank == ""
        assert title.startswith(heading)
        assert answer == "    it fits on --device_memory 24 (22.35 GiB)"


def test_a_terminal_shows_that_it_computes_after_the_rows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = resolve(config(project(tmp_path), dry_run=True))
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    as_summary(setup)
    assert terminal.getvalue().endswith(
        "".join(
            f"{line}\r\r{' ' * len(line)}\r" for line in (BUILDING, COUNTING, SEARCHING)
        )
    )


def test_it_needs_no_dataset_at_all(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "tiny", "--dry_run"]) == 0
    assert "this run\n    samples per step: 1\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {"dataset_repeat": 5, "num_epochs": 3, "batch_size": 4},
            ["samples per step: 4", "24 steps\n"],
        ),
        ({"max_steps": 7}, ["samples per step: 1", "7 steps"]),
        ({"validation_split": 0.3}, ["3 of these for validation", "3 steps"]),
        ({"max_steps": 7, "num_epochs": 2}, ["7 steps"]),
        (
            {"gradient_accumulation_steps": 3},
            ["samples per step: 3", "2 steps\n"],
        ),
    ],
)
def test_the_summary_says_rows_and_steps(
    tmp_path: Path, flags: dict[str, object], said: list[str]
) -> None:
    printed = as_summary(resolve(config(project(tmp_path), dry_run=True, **flags)))
    assert f"6 rows in {tmp_path}/data/metadata.json" in printed
    assert [words for words in said if words not in printed] == []


def test_the_page_fits_a_terminal_of_80_columns(
    bare: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_page_width(monkeypatch, PAGE_WIDTH)
    words = ["--model", "tiny", "--toy", "--dataset_base_path", ".", "--dry_run"]
    split = ["--feature_cache", "a-folder-with-a-long-name"]
    prompt = ["--preview_prompt", "a dog, a cat, and a bird in one picture"]
    words += [*split, *prompt, "--device_memory", "24GB", "--output_path", "out"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > PAGE_WIDTH] == []


def test_files_that_are_not_here_are_listed(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {
        "model_paths": '["no.safetensors"]', "lora_checkpoint": "lora", "preset_lora_path": "preset",
        "resume_from_checkpoint": "a,metadata.csv,b", "output_path": "out",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    assert main(["--model", "tiny", "--variant", "base", "--dry_run", *words]) == 0
    assert to_fetch(capsys.readouterr().out)[:-1] == [
        "    --lora_checkpoint: lora does not exist",
        "    --preset_lora_path: preset does not exist",
        "    --resume_from_checkpoint: a does not exist",
        "    --resume_from_checkpoint: b does not exist",
        "    no.safetensors: does not exist",
    ]
    words = ["--model", "tiny", "--dry_run", "--output_path", "new"]
    assert main([*words, "--resume", "nowhere"]) == 0
    assert "    --resume: nowhere does not exist\n" in capsys.readouterr().out


def test_a_folder_that_holds_a_run_is_refused_as_by_the_run(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bare / "out/states/step-4").mkdir(parents=True)
    (bare / "out/states/step-4/record.json").write_text("{}")
    (bare / "out/run.json").write_text(
        '{"files": [["run.json", 0], ["states/step-4/record.json", 4]]}'
    )
    words = ["--model", "tiny", "--dry_run", "--output_path", "out"]
    assert main(words) == 3
    said = "out: already contains a run: states/step-4\n  resume it with --resume"
    assert said in capsys.readouterr().err
    for more in (["--overwrite"], ["--resume"]):
        assert main([*words, *more]) == 0
    # Stage 1 would make a feature cache there.
    assert main([*words, "--task", "sft:data_process"]) == 2
    assert "out is not empty and no feature cache" in capsys.readouterr().err
    (bare / "out/logs").mkdir()
    (bare / "out/logs/config.json").write_text("mine")
    assert main([*words, "--overwrite"]) == 3
    what = "contains logs/config.json, which no run wrote: run.json does not list it"
    assert f"out: {what}\n" in capsys.readouterr().err


def test_rows_that_are_no_rows_are_refused_or_skipped(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bare / "metadata.csv").write_text("image,prompt\n0.png,a,b\n1.png,a\n")
    words = ["--model", "tiny", "--dataset_base_path", ".", "--dry_run"]
    assert main(words) == 2
    assert (
        "metadata.csv:2: has 3 values, but the first line names 2 columns"
        in capsys.readouterr().err
    )
    assert main([*words, "--on_bad_sample", "skip"]) == 0
    assert "1 row in metadata.csv x 1" in capsys.readouterr().out


def test_what_is_wrong_is_found_without_a_run(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "tiny", "--dataset_base_path", ".", "--dry_run"]
    for more, said in (
        (["--task", "sfft"], "--task: no task named 'sfft'"),
        (
            ["--lora_base_model", "dot"],
            "--lora_base_model: tiny base has no component 'dot'; did you mean 'dit'?",
        ),
        (
            ["--extra_inputs", "imgae"],
            "--extra_inputs: no column of metadata.csv gives input 'imgae'",
        ),
        (
            ["--variant", "bsae"],
            "--variant: tiny has no variant 'bsae'; variants: base, other; did you mean 'base'?",
        ),
    ):
        assert main([*words, *more]) == 2
        assert capsys.readouterr().err.startswith(f"dstrain: error: {said}")


def test_saved_weights_to_start_from_are_compared_with_what_is_trained(
    tmp_path: Path,
) -> None:
    here = project(tmp_path)
    for kind in ({"lora_rank": 2}, {"trainable_models": "dit"}):
        (name,) = kind
        out = train(here, output_path=tmp_path / name, max_steps=1, **kind)
        start = {"resume_from_checkpoint": out / "step-1.safetensors", "dry_run": True}
        assert "    1 step" in as_summary(
            resolve(config(here, max_steps=1, **kind, **start))
        )
    start["resume_from_checkpoint"] = tmp_path / "lora_rank/step-1.safetensors"
    with pytest.raises(StateError, match="has rank 2, but the LoRA layers to train"):
        as_summary(resolve(config(here, lora_rank=4, **start)))
