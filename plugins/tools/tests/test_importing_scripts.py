"""Shell scripts, of Windows too, are read as their shells read them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dstrain.cli.main import main
from dstrain_tools.importing.reading.shell import read_script

Import = Callable[..., Any]
SCRIPTS = sorted(Path(__file__).with_name("scripts").iterdir())
"""The first line of each says the flags of its command."""
FLUX = "python flux_train_network.py --network_module networks.lora_flux"


pytestmark = pytest.mark.usefixtures("empty")


def flags(text: str, suffix: str = "sh") -> dict[str, list[str]]:
    """Return the flags of the only training command of a script."""
    commands = read_script(text, Path(f"a.{suffix}")).commands
    (command,) = [one for one in commands if one.trains]
    assert not command.positional
    return dict(command.flags)


@pytest.mark.parametrize(
    "runner",
    (
        "nohup accelerate launch",
        "venv/bin/python3.11",
        "!accelerate launch",
        ".\\venv\\Scripts\\python.exe",
        "conda run -n tools accelerate launch",
        "uv run --extra cu128 accelerate launch",
        "srun --gpus 1 python",
        "$PYTHON",
        "${PYTHON:-python}",
        "accelerate launch --module",
        "python -m accelerate.commands.launch",
        "env A=1 B=2 poetry run python",
    ),
)
def test_a_command_is_known_however_python_is_started(runner: str) -> None:
    suffix = "ps1" if "\\" in runner else "sh"
    file = "tools.train" if runner.endswith("--module") else "train.py"
    assert flags(f"{runner} {file} --seed 1 &\n", suffix) == {"seed": ["1"]}


@pytest.mark.parametrize(
    "text",
    (
        "if true; then %s; fi",
        "(cd tool && %s)",
        "run() { %s; }\nrun",
        'case "$1" in\nflux) %s;;\nesac',
        'HERE="$(cd "$(dirname "$0")" && pwd)"\n%s',
        'COMMAND="%s"\neval "$COMMAND"',
        'RUN="python" && $RUN train.py --seed 1',
        # A text that the script writes is no part of it.
        "cat > data.toml <<'EOF'\ncaption = \"don't\"\npython train.py --no\nEOF\n%s",
    ),
)
def test_a_command_is_found_within_what_a_shell_has_around_it(text: str) -> None:
    command = text.replace("%s", "python train.py --seed 1")
    assert flags(command) == {"seed": ["1"]}


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_a_script_has_the_flags_that_its_shell_would_pass(file: Path) -> None:
    text = file.read_text()
    wanted = json.loads(text[text.index("{") : text.index("\n")])
    for ending in (".bat", ".cmd") if file.suffix == ".bat" else (file.suffix,):
        assert flags(text, ending[1:]) == wanted


@pytest.mark.parametrize("home", ("~", "$HOME", "${HOME}"))
def test_the_home_folder_is_that_of_the_user(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    words = f"--a {home}/b --b $OUT --c '{home}' --d x~"
    found = flags(f"OUT={home}/a\npython train.py {words}\n")
    assert (found["a"], found["b"]) == (["/home/me/b"], ["/home/me/a"])
    assert (found["c"], found["d"]) == ([home], ["x~"])


def test_quotes_without_an_end_are_refused_with_their_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("a.sh").write_text("python train.py\necho don't\npython b.py\n")
    assert main(["import", "a.sh"]) == 2
    assert "line 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "broken",
    (
        "--network_dim 16 \\\n  # --lr 1 \\\n  --alpha 8 --name x \\\n  --seed 3\n",
        "--network_dim 16 \\\n  # rank\n  --alpha 8 --name x\n  --seed 3\n",
        "--network_dim 16 \\\n\n  --alpha 8 --name x \\\n  --seed 3\n",
        "--network_dim 16 # rank \\\n\n  --alpha 8 --name x \\\n  --seed 3\n",
    ),
)
def test_flags_that_a_comment_cuts_off_are_listed_with_their_line(
    broken: str, imported: Import
) -> None:
    Path("a.sh").write_text(f"{FLUX} {broken}echo --done\n")
    found = imported("a.sh")
    assert found.options["lora_rank"] == 16
    assert "seed" not in found.options
    for flag in ("alpha", "name", "seed"):
        assert re.search(r"line [34]", found.reason(f" --{flag}"))


def test_words_without_a_flag_and_variables_without_a_value_are_listed(
    imported: Import,
) -> None:
    words = 'x.toml --output_dir $DATA/out "$@" --ae "~/v"'
    Path("a.sh").write_text(f"{FLUX.replace('.py', '.py ' + words)}\n")
    reasons = imported("a.sh").reasons
    assert {"x.toml", "$DATA", "$@", "~"} <= {*reasons}
    assert "--output_dir" in reasons["$DATA"]
    assert "--ae" in reasons["~"]


def test_what_only_a_shell_replaces_is_listed_of_data_files_too(
    imported: Import,
) -> None:
    Path("a.toml").write_text(
        "pretrained_model_name_or_path = 'flux1-dev.safetensors'\n"
        "network_module = 'networks.lora_flux'\n"
        "ae = '%USERPROFILE%/ae'\noutput_dir = '~/out'\nsample_prompts = 'for $5'\n"
        "[[datasets]]\n[[datasets.subsets]]\nimage_dir = '${DATA}/a'\n"
    )
    listed = {key for key in imported("a.toml").reasons if re.search(r"[$%~]", key)}
    assert listed == {"${DATA}", "%USERPROFILE%", "~"}


@pytest.mark.parametrize(
    ("of_launcher", "own", "precision"),
    [
        ("--mixed_precision bf16", "", "bf16"),
        ("--mixed_precision no", "--mixed_precision bf16", "bf16"),
        ("--mixed_precision bf16", "--config_file a.toml", "no"),
    ],
)
def test_the_launchers_precision_is_the_trainings_where_this_has_none(
    of_launcher: str, own: str, precision: str, imported: Import
) -> None:
    Path("a.toml").write_text('mixed_precision = "no"')
    launcher = f"python -m accelerate.commands.launch --num_processes 2 {of_launcher}"
    script = f"wan_train_network.py --task t2v-14B {own}"
    Path("a.sh").write_text(f"{launcher} {script}\n")
    found = imported("a.sh")
    assert found.options["mixed_precision"] == precision
    assert "launcher --num_processes" in {key for _, key in found.kinds}
