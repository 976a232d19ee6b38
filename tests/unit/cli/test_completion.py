"""A shell completes commands, options and values, and its script harms no file of the user."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from dstrain import SystemFault, UsageError
from dstrain.cli.completion import PROGRAM, SHELLS, VARIABLE, answer, install
from dstrain.cli.main import command_group, main
from dstrain.registry import card_size

Install = Callable[..., Path]
Source = Callable[..., str]


def completed(*words: str) -> list[str]:
    """Return the completions of the last word."""
    shell = ShellComplete(command_group(), {}, PROGRAM, VARIABLE)
    *before, incomplete = words
    return [one.value for one in shell.get_completions(list(before), incomplete)]


def answered(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *words: str
) -> list[str]:
    """Return the lines that bash gets for the last word."""
    monkeypatch.setenv(VARIABLE, "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "\n".join([PROGRAM, *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert main([]) == 0
    said = capfd.readouterr()
    assert not said.err
    return said.out.split()


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


def test_commands_and_the_options_of_the_default_command_are_completed() -> None:
    assert completed("tr") == ["train"]
    assert "--model_id" in completed("--mo")
    assert completed("--lora_ra") == completed("train", "--lora_ra") == ["--lora_rank"]
    assert completed("--lora-ra") == ["--lora-rank"]
    assert completed("cache", "ve") == ["verify"]
    assert completed("cache", "verify", "--rec") == ["--recompute"]
    assert completed("--debug", "gen") == ["generate"]
    assert "--help" in completed("--he")


@pytest.mark.usefixtures("shady")
def test_families_variants_ids_and_the_familys_options_are_completed() -> None:
    assert completed("--model", "sh") == ["shady"]
    assert completed("generate", "--model", "sh") == ["shady"]
    assert completed("--model", "shady", "--variant", "") == ["base", "edit"]
    assert completed("toy", "--model", "shady", "--variant", "e") == ["edit"]
    assert completed("--model_id", "Some/") == ["Some/Model"]
    assert completed("--model", "flux", "--model_id", "Some/") == ["Some/"]  # a file
    for named in ("--model", "shady"), ("--model_id", "Some/Model"):
        assert completed(*named, "--shade_") == ["--shade_path"]
    assert completed("--shade") == []
    assert completed("-p", "no:sh") == ["no:shady"]


@pytest.mark.usefixtures("shady")
def test_choices_and_files_are_completed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ask = [monkeypatch, capfd]
    assert answered(*ask, "--on_bad_sample", "") == ["plain,error", "plain,skip"]
    assert answered(*ask, "--on-bad-sample", "s") == ["plain,skip"]
    assert answered(*ask, "export", "--format", "ko") == ["plain,kohya"]
    for option in ("--dataset_base_path", "--dataset-base-path", "--config"):
        assert answered(*ask, option, "da") == ["file,da"]
    assert answered(*ask, "generate", "--lora", "a") == ["file,a"]
    assert answered(*ask, "--model", "shady", "--shade_path", "a") == ["file,a"]
    assert answered(*ask, "--model", "shady", "--shade", "a") == []
    assert answered(*ask, "cache", "ls", "ca") == ["file,ca"]


def test_recipes_goals_cards_and_optimizers_are_completed() -> None:
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
    assert cards == sorted(cards, key=card_size)
    assert {"16GB", "80GB"} <= {*cards}
    assert completed("recipes", "--card", "24") == ["24GB"]
    assert completed("recipes", "--model", "qw") == ["qwen_image"]
    assert completed("export", "--model", "qw") == ["qwen_image"]
    assert completed("--optimizer", "ad") == [
        *("adamw", "adafactor", "adamw8bit", "ademamix8bit")
    ]


def test_a_broken_family_keeps_no_recipe_of_others_and_nothing_is_printed(
    fake_plugin: Install,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    modules = {"leaves_record": "print('hello')\nraise KeyError('gone')"}
    fake_plugin("plugin-leaves", {"leaves": "leaves_record:MODEL"}, modules)
    found = answered(monkeypatch, capfd, "--recipe", "")
    assert "plain,wan-character-24gb" in found
    assert all(one.startswith("plain,") for one in found)
    assert answered(monkeypatch, capfd, "--recipe", "leaves-") == []


@pytest.mark.usefixtures("shady")
def test_the_options_of_a_family_that_a_file_names_are_completed(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "shady"\n')
    assert completed("--config", str(file), "--shade_") == ["--shade_path"]
    file.write_text("not a table [")
    assert completed("--config", str(file), "--lora_ra") == ["--lora_rank"]


def test_what_is_typed_may_be_wrong_or_half_a_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for words in (
        ("--model", "nothing", "--lora_ra"),
        ("--seed", "none", "--lora_ra"),
        ("--model_id", "''", "--lora_ra"),
    ):
        assert answered(monkeypatch, capfd, *words) == ["plain,--lora_rank"]
    assert answer(command_group(), "bash_nothing") != 0 or not capfd.readouterr().err
    assert answer(command_group(), "no-shell_complete") == 1


def test_plugins_are_imported_only_for_the_beginning_of_no_command_of_dstrains_own(
    fake_plugin: Install,
) -> None:
    source = (
        "import click\nfrom dstrain.registry.hooks import hookimpl\n"
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
    fake_plugin: Install,
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
        f"    os.environ['COMP_WORDS'] = '{PROGRAM}\\n' + words\n    code = main([])\n"
        "print(code, {'torch', 'numpy', 'pluggy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    *found, last = done.stdout.splitlines()
    assert last == "0 set()"
    assert {"plain,t2v", "plain,wan-character-24gb", "plain,adamw8bit"} <= {*found}


@pytest.mark.parametrize(
    ("shell", "place"),
    [
        ("bash", ".local/share/bash-completion/completions/dstrain"),
        ("zsh", ".local/share/zsh/site-functions/_dstrain"),
        ("fish", ".config/fish/completions/dstrain.fish"),
    ],
)
def test_the_script_is_written_where_the_shell_looks_and_nothing_else_is(
    shell: str, place: str, tmp_path: Path
) -> None:
    home = {"HOME": str(tmp_path), "SHELL": f"/usr/bin/{shell}"}
    (tmp_path / f".{shell}rc").write_text("mine\n")
    path = tmp_path / place
    assert install("", home).startswith(f"wrote {path}\n")
    script = path.read_text()
    assert VARIABLE in script and PROGRAM in script
    assert install(shell, home).startswith(f"{path} is already there\n")
    path.write_text(f"# of an earlier version: {VARIABLE}\n")
    assert install(shell, home).startswith(f"wrote {path}\n")
    assert path.read_text() == script
    path.write_text("another program's\n")
    with pytest.raises(UsageError, match="was not modified"):
        install(shell, home)
    assert path.read_text() == "another program's\n"
    assert (tmp_path / f".{shell}rc").read_text() == "mine\n"
    assert [one for one in tmp_path.rglob("*") if one.is_file()] == [
        tmp_path / f".{shell}rc",
        path,
    ]


def test_the_users_folders_are_respected(tmp_path: Path) -> None:
    home = {"HOME": "nowhere"}
    data = {**home, "XDG_DATA_HOME": str(tmp_path / "data")}
    assert f"wrote {tmp_path}/data/bash-completion/completions" in install("bash", data)
    own = {**data, "BASH_COMPLETION_USER_DIR": str(tmp_path / "own")}
    assert f"wrote {tmp_path}/own/completions/dstrain" in install("bash", own)
    config = {**home, "XDG_CONFIG_HOME": str(tmp_path / "config")}
    assert f"wrote {tmp_path}/config/fish/completions" in install("fish", config)


def test_a_shell_that_is_not_known_and_a_folder_that_cannot_be_made_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (
        ["--install-completion", "tcsh"],
        ["--install_completion=tcsh"],
    ):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "--install_completion: expected one of bash, zsh, fish" in said
    with pytest.raises(UsageError, match="the shell is not known; name it"):
        install("", {})
    (tmp_path / "file").touch()
    with pytest.raises(SystemFault):
        install("bash", {"XDG_DATA_HOME": str(tmp_path / "file")})


def test_a_bash_completes_in_a_terminal(tmp_path: Path) -> None:
    import pty  # Windows has none

    bash = shutil.which("bash")
    assert bash is not None
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / PROGRAM
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dstrain "$@"\n')
    program.chmod(0o755)
    install("bash", {"XDG_DATA_HOME": str(tmp_path)})
    script = tmp_path / "bash-completion/completions/dstrain"
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
        typed = f"source {script}\ndstrain --lora_ra\t"
        os.write(controller, typed.encode())
        seen = ""
        end = time.monotonic() + 60
        while "--lora_rank " not in seen and time.monotonic() < end:
            seen += os.read(controller, 4096).decode(errors="replace")
    finally:
        child.kill()
        child.wait()
        os.close(controller)
    assert "dstrain --lora_rank " in seen


def test_every_shell_has_a_script(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    for shell in SHELLS:
        assert answer(command_group(), f"{shell}_source") == 0
        assert PROGRAM.encode() in capfdbinary.readouterr().out
