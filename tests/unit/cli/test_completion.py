"""A shell completes commands, options, families and recipes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from dstrain.cli.main import main
from dstrain.installed import installed

Install = Callable[..., Path]
Source = Callable[..., str]
Complete = Callable[..., list[str]]
VARIABLE = "_DSTRAIN_COMPLETE"
"""The variable by which a shell asks."""


@pytest.fixture
def shady(fake_plugin: Install, family_source: Source) -> None:
    """Install a family with options, variants and a published model."""
    fields = {
        "model_files": "{'Some/Model': {'dit': 'dit/*.safetensors'}}",
        "options": "(Option('shade', 'A shade.'), "
        "Option('shade_path', 'A file.', component='vae'))",
    }
    modules = {"shady_record": family_source("shady", **fields)}
    fake_plugin("plugin-shady", {"shady": "shady_record:MODEL"}, modules)


def test_commands_and_options_of_the_default_are_completed(completed: Complete) -> None:
    assert completed("tr") == ["train"]
    assert "--model_id" in completed("--mo")
    assert completed("--lora_ra") == completed("train", "--lora_ra") == ["--lora_rank"]
    assert completed("--lora-ra") == ["--lora_rank"]
    assert completed("cache", "ve") == ["verify"]
    assert completed("cache", "verify", "--rep") == ["--repair"]
    assert completed("--debug", "gen") == ["generate"]
    assert "--help" in completed("--he")


@pytest.mark.usefixtures("shady")
def test_families_and_options_of_a_family_are_completed(completed: Complete) -> None:
    assert completed("--model", "sh") == ["shady"]
    for command in ("generate", "toy"):
        assert completed(command, "--model", "sh") == ["shady"]
    for named in ("--model", "shady"), ("--model_id", "Some/Model"):
        assert completed(*named, "--shade_") == ["--shade_path"]
    assert completed("--shade") == []


@pytest.mark.usefixtures("shady")
def test_choices_and_files_are_completed(lines: Complete) -> None:
    assert lines("--on_bad_sample", "") == ["plain,error", "plain,skip"]
    assert lines("--on_bad_sample", "s") == ["plain,skip"]
    for option in ("--dataset_base_path", "--config"):
        assert lines(option, "da") == ["file,da"]
    assert lines("cache", "ls", "ca") == ["file,ca"]


@pytest.mark.usefixtures("shady")
def test_the_options_of_a_family_that_a_file_names_are_completed(
    tmp_path: Path, completed: Complete
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "shady"\n')
    assert completed("--config", str(file), "--shade_") == ["--shade_path"]
    file.write_text("not a table [")
    assert completed("--config", str(file), "--lora_ra") == ["--lora_rank"]


def test_what_is_typed_may_be_wrong_or_half_a_command(
    completed: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in ("--model", "nothing"), ("--seed", "none"), ("--model_id", "''"):
        assert completed(*words, "--lora_ra") == ["--lora_rank"]
    monkeypatch.setenv(VARIABLE, "no-shell_complete")
    assert main([]) == 1


def test_commands_in_the_metadata_of_plugins_are_completed_without_an_import(
    fake_plugin: Install, completed: Complete
) -> None:
    modules = {"extra_whisper": "raise SystemExit(9)"}
    entries = {"whisper": "extra_whisper", "trail": "extra_whisper"}
    fake_plugin("extra-whisper", entries, modules, group="dstrain.commands")
    assert completed("tr") == ["train", "trail"]
    assert completed("whi") == ["whisper"]
    assert "extra_whisper" not in sys.modules


def test_completing_imports_no_torch() -> None:
    environment = {**os.environ, VARIABLE: "bash_complete", "COMP_CWORD": "2"}
    environment["COMP_WORDS"] = "dstrain\n--model\n"
    code = (
        "import sys\nfrom dstrain.cli.main import main\ncode = main([])\n"
        "print(code, {'torch', 'numpy', 'pluggy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    *found, last = done.stdout.splitlines()
    assert last == "0 set()"
    assert {f"plain,{one.name}" for one in installed()} <= {*found}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script(
    shell: str,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    monkeypatch.setenv(VARIABLE, f"{shell}_source")
    assert main([]) == 0
    assert b"dstrain" in capfdbinary.readouterr().out
