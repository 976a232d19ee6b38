"""Shell scripts, of Windows too, are read as their shells read them."""

from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain_tools.importing.reading.shell import Script, read_script
from dstrain_tools.importing.reading.source import read_source


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)


def flags(script: Script) -> dict[str, list[str]]:
    """The flags of the only training command."""
    (command,) = [one for one in script.commands if one.trains]
    return dict(command.flags)


def test_what_stands_beside_a_command_on_its_line_is_no_value_of_it() -> None:
    text = (
        "cd tool && python train.py --name a#2 --seed 42 2>&1 | tee log.txt # --x 1\n"
        'echo done; echo "# no comment" > note.txt\n'
    )
    script = read_script(text, Path("a.sh"))
    assert flags(script) == {"name": ["a#2"], "seed": ["42"]}
    assert script.others == ["cd", "tee", "echo", "echo"]


@pytest.mark.parametrize(
    "runner",
    (
        *("nohup accelerate launch", "venv/bin/python3.11", "!accelerate launch"),
        *(".\\venv\\Scripts\\python.exe", "conda run -n tools accelerate launch"),
        *("uv run --extra cu128 accelerate launch", "srun --gpus 1 python"),
        *("$PYTHON", "${PYTHON:-python}", "accelerate launch --module"),
        *("python -m accelerate.commands.launch", "env A=1 B=2 poetry run python"),
    ),
)
def test_a_command_is_known_however_python_is_started(runner: str) -> None:
    suffix = "ps1" if "\\" in runner else "sh"
    file = "tools.train" if runner.endswith("--module") else "train.py"
    script = read_script(f"{runner} {file} --seed 1 &\n", Path(f"a.{suffix}"))
    assert flags(script) == {"seed": ["1"]}


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
    ),
)
def test_a_command_is_found_within_what_a_shell_has_around_it(text: str) -> None:
    script = read_script(text.replace("%s", "python train.py --seed 1"), Path("a.sh"))
    assert flags(script) == {"seed": ["1"]}


@pytest.mark.parametrize("home", ("~", "$HOME", "${HOME}"))
def test_the_home_folder_is_that_of_the_user(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    text = f"OUT={home}/a\npython train.py --a {home}/b --b $OUT --c '{home}' --d x~\n"
    assert flags(read_script(text, Path("a.sh"))) == {
        "a": ["/home/me/b"],
        "b": ["/home/me/a"],
        "c": [home],
        "d": ["x~"],
    }


@pytest.mark.parametrize(
    "broken",
    (
        "--rank 16 \\\n  # --lr 1 \\\n  --alpha 8 --name x \\\n  --seed 3\n",
        "--rank 16 \\\n  # rank\n  --alpha 8 --name x \\\n  --seed 3\n",
        "--rank 16 \\\n\n  --alpha 8 --name x \\\n  --seed 3\n",
        "--rank 16 # rank \\\n\n  --alpha 8 --name x \\\n  --seed 3\n",
    ),
)
def test_flags_that_a_comment_cuts_off_are_listed_with_their_line(broken: str) -> None:
    Path("a.sh").write_text(f"python flux_train_network.py {broken}echo --done\n")
    source = read_source(Path("a.sh"), None, None, None)
    assert [one.key for one in source.run] == ["rank"]
    said = {one.entry.place: one.result.lost for one in source.apart}
    for flag in ("alpha", "name", "seed"):
        assert "ends the command before line 3" in said[f"a.sh: line 3 --{flag}"]


def test_words_in_quotes_stay_whole() -> None:
    text = "python train.py --a 'x | y; > z' --b \"#tag\" --c \\#1\n"
    found = flags(read_script(text, Path("a.sh")))
    assert found == {"a": ["x | y; > z"], "b": ["#tag"], "c": ["#1"]}


def test_an_empty_argument_does_not_end_its_command() -> None:
    text = "python train.py --a \"\" --b '' --c 1\n"
    assert flags(read_script(text, Path("a.sh"))) == {"a": [""], "b": [""], "c": ["1"]}


def test_the_output_of_a_command_stays_whole_with_quotes_in_it() -> None:
    text = (
        'python train.py --a "x $(echo "y; z" | tr "(" ")")" --b "$(a "$(b)")" --c 1\n'
    )
    assert flags(read_script(text, Path("a.sh"))) == {
        "a": ['x $(echo "y; z" | tr "(" ")")'],
        "b": ['$(a "$(b)")'],
        "c": ["1"],
    }


def test_a_text_in_quotes_goes_over_lines() -> None:
    text = (
        "python train.py --a 'x\ny' \\\n"
        "  --b 1 # don't stop\n"
        'echo "two\nlines" && python train.py --prompt "a dog,\n  a \\"cat\\"" \\\n  --c 2\n'
    )
    script = read_script(text, Path("a.sh"))
    assert [dict(one.flags) for one in script.commands] == [
        {"a": ["x\ny"], "b": ["1"]},
        {"prompt": ['a dog,\n  a "cat"'], "c": ["2"]},
    ]
    assert script.others == ["echo"]


def test_a_variable_is_several_words_where_no_quotes_are() -> None:
    text = (
        "LR=1e-4\n"
        'MORE="--lr $LR\n  --seed 42"\n'
        'MORE+=" --x"\n'
        "NAME='my dogs'\n"
        "ARGS=(  # what all runs have\n"
        '  --a "1 2"\n'
        "  --b ${RANK:-16}\n"
        ")\n"
        "ARGS+=(--c)\n"
        "for i in 1 2; do\n"
        '  python train.py "${ARGS[@]}" $MORE --name "$NAME" --q \'$LR\' --d $(date +%s)\n'
        "done\n"
    )
    assert flags(read_script(text, Path("a.sh"))) == {
        "a": ["1 2"],
        "b": ["16"],
        "c": [],
        "lr": ["1e-4"],
        "seed": ["42"],
        "x": [],
        "name": ["my dogs"],
        "q": ["$LR"],
        "d": ["$(date +%s)"],
    }


def test_a_text_that_a_script_writes_is_no_part_of_it() -> None:
    text = (
        "cat > data.toml <<'EOF'\ncaption = \"don't\"\npython train.py --no\nEOF\n"
        "python train.py --seed 1\n"
    )
    script = read_script(text, Path("a.sh"))
    assert flags(script) == {"seed": ["1"]} and script.others == ["cat"]


def test_quotes_without_an_end_are_refused_with_their_line() -> None:
    with pytest.raises(UsageError) as refused:
        read_script("python train.py\necho don't\npython b.py\n", Path("a.sh"))
    assert "line 2 cannot be read as a shell script" in refused.value.what


def test_a_batch_file_keeps_backslashes_and_has_its_own_variables() -> None:
    text = (
        "rem don't stop\n"
        'set "DATA=C:\\my photos"\n'
        "python train.py ^\n"
        '  --data "%DATA%" --output_dir C:\\out\\ --other $x\n'
    )
    found = flags(read_script(text, Path("a.bat")))
    assert found["data"] == ["C:\\my photos"]
    assert found["output_dir"] == ["C:\\out\\"] and found["other"] == ["$x"]


def test_a_script_of_powershell_keeps_backslashes_and_has_its_own_variables() -> None:
    text = '$data = "C:\\photos"\n$env:A = 1\npython train.py `\n  --data $data\n'
    script = read_script(text, Path("a.ps1"))
    assert flags(script) == {"data": ["C:\\photos"]}
    assert script.exported == {"A"}


def test_a_list_of_powershell_is_its_words() -> None:
    text = (
        '$all = @(\n  \'--a\', "1 2"\n  \'--b\'\n)\n$all += @("--c", "3")\n'
        "& accelerate launch train.py @all --d 4\n"
    )
    script = read_script(text, Path("a.ps1"))
    assert flags(script) == {"a": ["1 2"], "b": [], "c": ["3"], "d": ["4"]}


def test_words_without_a_flag_and_variables_without_a_value_are_listed() -> None:
    path = Path("a.sh")
    path.write_text(
        'python flux_train_network.py x.toml --output_dir $DATA/out "$@" --vae "~/v"\n'
    )
    said = {
        one.entry.key: one.result.lost
        for one in read_source(path, None, None, None).apart
    }
    assert said["x.toml"].startswith("a word without a flag")
    assert said["$DATA"].startswith(
        "--output_dir has $DATA, which the script does not set"
    )
    assert said["$@"].startswith("stands for the script's arguments")
    assert said["~"].startswith("--vae begins with ~, which means the home folder")


def test_what_only_a_shell_replaces_is_listed_of_data_files_too() -> None:
    path = Path("a.toml")
    path.write_text(
        "ae = '%USERPROFILE%/ae'\noutput_dir = '~/out'\nsample_prompts = 'for $5'\n"
        "[[datasets]]\n[[datasets.subsets]]\nimage_dir = '${DATA}/a'\n"
    )
    said = {one.entry.key for one in read_source(path, None, None, None).apart}
    assert said == {"${DATA}", "%USERPROFILE%", "~"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.sh", "python examples/flux/model_training/train.py --lora_rank 4\n"),
        ("a.toml", "[general]\nimage_dir = 'photos'\n"),
    ],
)
def test_a_separate_file_of_datasets_is_refused_where_it_has_no_effect(
    name: str, text: str
) -> None:
    Path(name).write_text(text)
    with pytest.raises(UsageError, match="has no effect"):
        read_source(Path(name), Path("data.toml"), None, None)


@pytest.mark.parametrize(
    ("flags_of_launcher", "own", "precision"),
    [
        ("--mixed_precision bf16", "", "bf16"),
        ("--mixed_precision fp16", "--mixed_precision bf16", "bf16"),
        ("--mixed_precision fp16", "--config_file a.toml", "no"),
    ],
)
def test_the_launchers_precision_is_the_trainings_where_this_has_none(
    flags_of_launcher: str, own: str, precision: str
) -> None:
    Path("a.toml").write_text('mixed_precision = "no"')
    path = Path("a.sh")
    path.write_text(
        f"python -m accelerate.commands.launch --num_processes 2 {flags_of_launcher} "
        f"wan_train_network.py --task t2v-14B {own}\n"
    )
    source = read_source(path, None, None, None)
    assert [one.value for one in source.run if one.key == "mixed_precision"] == [
        precision
    ]
    places = {one.entry.place for one in source.apart}
    assert "a.sh: launcher --num_processes" in places
    assert source.script == "wan_train_network.py"
