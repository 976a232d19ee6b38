"""A dry run needs neither model files, nor a hub, nor pictures, and says what the run would be."""

import socket
from pathlib import Path

import pytest
from dstrain.cli import main
from dstrain.dry_run import as_summary
from dstrain.setup import resolve
from runs import config, project

pytestmark = pytest.mark.usefixtures("tiny")
IDS = "Tiny/Tiny:transformer/model*.safetensors,Tiny/Tiny:vae/*.safetensors,Tiny/Tiny:text_encoder/*.safetensors"


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with metadata, and nothing else: no pictures, no models, no network."""

    def refuse(*given: object, **named: object) -> None:
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("DSTRAIN_MODEL_BASE_PATH", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metadata.csv").write_text("image,prompt\n")
    return tmp_path


@pytest.mark.parametrize("stage", ["", ":data_process", ":train"])
def test_it_needs_only_the_header_row_of_the_metadata(
    bare: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "tiny", "--model_id_with_origin_paths", IDS, "--dataset_base_path", ".", "--dry_run"]
    assert main([*words, "--output_path", "out", "--task", f"sft{stage}"]) == 0
    told = capsys.readouterr().out
    assert "stage 1  sft:data_process   loads text_encoder, vae, tokenizer" in told
    assert "stage 2  sft:train   loads dit" in told
    assert [path.name for path in bare.iterdir()] == ["metadata.csv"]


def test_it_needs_no_data_set_at_all(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "tiny", "--dry_run"]) == 0
    assert "writes nothing: --output_path is not given" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"dataset_repeat": 5, "num_epochs": 3, "batch_size": 4}, ["samples a step: 4", "24 steps; more where"]),
        ({"max_steps": 7}, ["samples a step: 1", "7 steps"]),
        ({"max_steps": 7, "num_epochs": 2}, ["12 steps, of which 7 are made at most"]),
        ({"gradient_accumulation_steps": 3}, ["samples a step: 3", "2 steps; more where"]),
        ({"trainable_models": "dit"}, ["trains dit in full"]),
        ({"lora_alpha": 3.0}, ["trains LoRA on dit, rank 2, alpha 3, of to_q, to_out", "--lora_alpha 3.0"]),
    ],
)
def test_the_summary_says_rows_steps_and_flags(tmp_path: Path, flags: dict[str, object], said: list[str]) -> None:
    told = as_summary(resolve(config(project(tmp_path), dry_run=True, **flags)))
    assert f"6 rows in {tmp_path}/data/metadata.json" in told
    assert [words for words in said if words not in told] == []
    assert "--dry_run" not in told and "--seed" not in told


def test_what_is_wrong_is_found_without_a_run(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "tiny", "--dataset_base_path", ".", "--dry_run"]
    for more, said in (
        (["--task", "sfft"], "--task: no task named 'sfft'"),
        (["--lora_base_model", "dot"], "--lora_base_model: tiny base has no component 'dot'; did you mean 'dit'?"),
        (["--extra_inputs", "imgae"], "--extra_inputs: no variant of tiny reads 'imgae'; did you mean 'image'?"),
        (["--variant", "bsae"], "--variant: tiny has no variant 'bsae'; variants: base, other; did you mean 'base'?"),
    ):
        assert main([*words, *more]) == 2
        assert capsys.readouterr().err.startswith(f"dstrain: error: {said}")
