"""A shell completes commands, options and values, and its script harms no file of the user."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from dstrain.cli.main import main

Install = Callable[..., Path]
Source = Callable[..., str]
Complete = Callable[..., list[str]]
VARIABLE = "_DSTRAIN_COMPLETE"
"""The variable by which a shell asks."""


@pytest.fixture
def lines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Complete:
    """Words -> the lines that bash gets for the last one."""

    def answered(*words: str) -> list[str]:
        with monkeypatch.context() as patch:
            patch.setenv(VARIABLE, "bash_complete")
            patch.setenv("COMP_WORDS", "\n".join(["dstrain", *words]))
            patch.setenv("COMP_CWORD", str(len(words)))
            assert main([]) == 0
        said = capfd.readouterr()
        assert not said.err
        return said.out.split()

    return answered


@pytest.fixture
def completed(lines: Complete) -> Complete:
    """Words -> the completions of the last one."""
    return lambda *words: [line.partition(",")[2] for line in lines(*words)]


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


def test_commands_and_the_options_of_the_default_command_are_completed(
    completed: Complete,
) -> None:
    assert completed("tr") == ["train"]
    assert "--model_id" in completed("--mo")
    assert completed("--lora_ra") == completed("train", "--lora_ra") == ["--lora_rank"]
    assert completed("--lora-ra") == ["--lora-rank"]
    assert completed("cache", "ve") == ["verify"]
    assert completed("cache", "verify", "--rep") == ["--repair"]
    assert completed("--debug", "gen") == ["generate"]
    assert "--help" in completed("--he")


@pytest.mark.usefixtures("shady")
def test_families_variants_ids_and_the_familys_options_are_completed(
    completed: Complete, lines: Complete
) -> None:
    assert completed("--model", "sh") == ["shady"]
    assert completed("generate", "--model", "sh") == ["shady"]
    assert completed("--model", "shady", "--variant", "") == ["base", "edit"]
    assert completed("toy", "--model", "shady", "--variant", "e") == ["edit"]
    assert completed("models", "shady", "--variant=e") == ["edit"]
    assert completed("--model_id", "Some/") == ["Some/Model"]
    assert lines("--model", "flux", "--model_id", "Some/") == ["file,Some/"]
    for named in ("--model", "shady"), ("--model_id", "Some/Model"):
        assert completed(*named, "--shade_") == ["--shade_path"]
    assert completed("--shade") == []
    assert completed("-p", "no:sh") == ["no:shady"]
    assert completed("-p", "no:to") == ["no:tools"]


@pytest.mark.usefixtures("shady")
def test_choices_and_files_are_completed(lines: Complete) -> None:
    assert lines("--on_bad_sample", "") == ["plain,error", "plain,skip"]
    assert lines("--on-bad-sample", "s") == ["plain,skip"]
    assert lines("export", "--format", "ko") == ["plain,kohya"]
    for option in ("--dataset_base_path", "--dataset-base-path", "--config"):
        assert lines(option, "da") == ["file,da"]
    assert lines("generate", "--lora", "a") == ["file,a"]
    assert lines("--model", "shady", "--shade_path", "a") == ["file,a"]
    assert lines("--model", "shady", "--shade", "a") == []
    assert lines("cache", "ls", "ca") == ["file,ca"]


def test_recipes_goals_cards_and_optimizers_are_completed(completed: Complete) -> None:
    for words in ("--recipe",), ("train", "--recipe"), ("recipes", "show"):
        for typed in "qwen-image-ch", "Qwen_image-ch":
            found = completed(*words, typed)
            assert "qwen-image-character-24gb" in found
            assert all(one.startswith("qwen-image-character-") for one in found)
        assert {one.split("-")[0] for one in completed(*words, "")} == {
            *("flux", "qwen", "wan")
        }
        assert completed(*words, "qwen-image-nothing") == []
    assert completed("recipes", "--goal", "st") == ["style"]
    cards = completed("recipes", "--card", "")
    assert cards == sorted(cards, key=lambda card: int(card.removesuffix("GB")))
    assert {"16GB", "80GB"} <= {*cards}
    assert completed("recipes", "--card", "24g") == ["24GB"]
    assert completed("recipes", "--model", "qw") == ["qwen_image"]
    assert completed("export", "--model", "qw") == ["qwen_image"]
    assert completed("--optimizer", "ad") == [
        *("adamw", "adafactor", "adamw8bit", "ademamix8bit")
    ]


def test_a_broken_family_keeps_no_recipe_of_others_and_nothing_is_printed(
    fake_plugin: Install, lines: Complete
) -> None:
    modules = {"leaves_record": "print('hello')\nraise KeyError('gone')"}
    fake_plugin("plugin-leaves", {"leaves": "leaves_record:MODEL"}, modules)
    found = lines("--recipe", "")
    assert "plain,wan-character-24gb" in found
    assert all(one.startswith("plain,") for one in found)
    assert lines("--recipe", "leaves-") == []


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


def test_plugins_are_imported_only_for_the_beginning_of_no_command_of_dstrains_own(
    fake_plugin: Install, completed: Complete
) -> None:
    source = (
        "import click\nfrom dstrain.plugin import hookimpl\napi = 2\n"
        "@click.command('shout')\n@click.option('--loud', is_flag=True)\ndef shout(loud): pass\n"
        "@hookimpl\ndef dstrain_commands():\n    return (shout,)\n"
    )
    modules = {"extra_shouting": source}
    fake_plugin("extra-shout", {"shouting": "extra_shouting"}, modules, group="dstrain")
    assert "train" in completed("")
    assert completed("tr") == ["train"]
    assert "extra_shouting" not in sys.modules
    assert completed("sho") == ["shout"]
    assert completed("shout", "--lo") == ["--loud"]


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
    typed = (
        "--model\nwan\n--variant\n",
        "--seed\n1\n--recipe\nwan-ch",
        "--seed\n1\n--optimizer\nadamw",
    )
    environment = {**os.environ, VARIABLE: "bash_complete", "COMP_CWORD": "4"}
    code = (
        f"import os, sys\nfrom dstrain.cli.main import main\nfor words in {typed}:\n"
        "    os.environ['COMP_WORDS'] = 'dstrain\\n' + words\n    code = main([])\n"
        "print(code, {'torch', 'numpy', 'pluggy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    *found, last = done.stdout.splitlines()
    assert last == "0 set()"
    assert {"plain,t2v", "plain,wan-character-24gb", "plain,adamw8bit"} <= {*found}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder."""
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "BASH_COMPLETION_USER_DIR"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.mark.parametrize(
    ("shell", "place"),
    [
        ("bash", ".local/share/bash-completion/completions/dstrain"),
        ("zsh", ".local/share/zsh/site-functions/_dstrain"),
        ("fish", ".config/fish/completions/dstrain.fish"),
    ],
)
def test_the_script_is_written_where_the_shell_looks_and_nothing_else_is(
    shell: str,
    place: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    (home / f".{shell}rc").write_text("mine\n")
    path = home / place
    assert main(["--install_completion"]) == 0
    assert str(path) in capsys.readouterr().out.splitlines()[0]
    script = path.read_text()
    assert VARIABLE in script and "dstrain" in script
    path.write_text(f"# of an earlier version: {VARIABLE}\n")
    for _ in range(2):
        assert main([f"--install-completion={shell}"]) == 0
        assert path.read_text() == script
    path.write_text("another program's\n")
    assert main(["--install_completion"]) == 2
    assert f"--install_completion: {path}" in capsys.readouterr().err
    assert path.read_text() == "another program's\n"
    assert (home / f".{shell}rc").read_text() == "mine\n"
    left = {one for one in home.rglob("*") if one.is_file()}
    assert left == {home / f".{shell}rc", path}


def test_the_users_folders_are_respected(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, shell, place in (
        ("XDG_DATA_HOME", "bash", "bash-completion/completions/dstrain"),
        ("BASH_COMPLETION_USER_DIR", "bash", "completions/dstrain"),
        ("XDG_CONFIG_HOME", "fish", "fish/completions/dstrain.fish"),
    ):
        folder = home.parent / variable
        monkeypatch.setenv(variable, str(folder))
        assert main(["--install_completion", shell]) == 0
        assert (folder / place).is_file()
    assert not any(home.iterdir())


def test_a_shell_that_is_not_known_and_a_folder_that_cannot_be_made_are_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SHELL", raising=False)
    for words in ["--install-completion", "tcsh"], ["--install_completion"]:
        assert main(words) == 2
        assert "--install_completion: " in capsys.readouterr().err
    (home / ".local").touch()
    assert main(["--install_completion", "bash"]) == 4


def test_a_bash_completes_in_a_terminal(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pty  # Windows has none

    bash = shutil.which("bash")
    assert bash is not None
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "dstrain"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dstrain "$@"\n')
    program.chmod(0o755)
    assert main(["--install_completion", "bash"]) == 0
    script = home / ".local/share/bash-completion/completions/dstrain"
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PS1": "$ "}
    controller, terminal = pty.openpty()
    child = subprocess.Popen(
        [bash, "--norc", "--noprofile", "-i"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**environment, "TERM": "dumb"},
        start_new_session=True,
    )
    os.close(terminal)
    try:
        os.write(controller, f"source {script}\ndstrain --lora_ra\t".encode())
        seen = ""
        while "dstrain --lora_rank " not in seen:
            seen += os.read(controller, 4096).decode(errors="replace")
    finally:
        child.kill()
        child.wait()
        os.close(controller)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script(
    shell: str,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    monkeypatch.setenv(VARIABLE, f"{shell}_source")
    assert main([]) == 0
    assert b"dstrain" in capfdbinary.readouterr().out
