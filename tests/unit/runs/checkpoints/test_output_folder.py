"""The files of a run in its output folder: what is kept, refused, and never removed."""

import os
import re
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from dstrain import Interrupted, StateError, SystemFault, UsageError, run
from dstrain.cli.main import main
from dstrain.runs import refuse_early
from dstrain.runs.checkpoints.directory import check_way, states
from dstrain.runs.checkpoints.saved_states import newest_state
from dstrain.storage import RunFiles, lock

from tests.support.runs import PowerCut, changed, config, log, project, stop_at, train

pytestmark = pytest.mark.usefixtures("tiny")

ASIDE = ".overwritten"
SKIPPED = "logs/bad_samples.jsonl"
LOGS = (
    "logs/config.json",
    "logs/dstrain.log",
    "logs/loss.csv",
    "logs/loss.jsonl",
    "logs/state.json",
)


@pytest.fixture(scope="module")
def trained(here: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of two steps, each saved."""
    output = tmp_path_factory.mktemp("trained") / "out"
    return train(here, output_path=output, max_steps=2, save_steps=1)


@pytest.fixture
def out(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "out")


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes, but the lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".dstrain.lock")
    }


def put(folder: Path, *names: str) -> dict[str, bytes]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"mine")
    return dict.fromkeys(names, b"mine")


def left(folder: Path) -> tuple[list[str], list[str]]:
    """The states and the weights files in an output folder."""
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    return sorted(path.name for path in folder.glob("states/*")), weights


def named(*steps: int) -> tuple[list[str], list[str]]:
    names = [f"step-{step}" for step in steps]
    return names, [f"{name}.safetensors" for name in names]


@pytest.mark.parametrize("keep", [None, 1, 3, 9])
def test_checkpoints_are_kept(keep: int | None, here: Path, tmp_path: Path) -> None:
    train(here, output_path=tmp_path, max_steps=6, save_steps=1, keep_checkpoints=keep)
    every = range(1, 7)
    kept_states, weights = left(tmp_path)
    assert kept_states == named(*every[-(keep or 2) :])[0]
    assert weights == named(*every[-(keep or 6) :])[1]
    files = RunFiles.read(tmp_path)
    assert list(files.weights()) == weights
    assert set(tree(tmp_path)) <= set(files.steps)


def test_components_of_a_step_are_one_checkpoint(here: Path, tmp_path: Path) -> None:
    flags = {"trainable_models": "dit,text_encoder", "keep_checkpoints": 2}
    train(here, output_path=tmp_path, max_steps=3, save_steps=1, **flags)
    assert left(tmp_path) == (
        ["step-2", "step-3"],
        [
            f"step-{step}.{part}.safetensors"
            for step in (2, 3)
            for part in ("dit", "text_encoder")
        ],
    )


def test_a_resumed_run_prunes_what_the_first_part_kept_and_nothing_of_the_users(
    here: Path, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"save_steps": 1, "ema_decay": 0.5}
    train(here, output_path=tmp_path, max_steps=3, **flags)
    users = put(tmp_path, "mine.safetensors", "logs/notes.txt", "states/step-2/x.txt")
    flags |= {"keep_checkpoints": 2, "resume": "auto"}
    train(here, output_path=tmp_path, max_steps=4, **flags)
    after = tree(tmp_path)
    assert users.items() <= after.items()
    assert [name for name in after if "step-2" in name] == ["states/step-2/x.txt"]
    assert not [name for name in after if "step-1" in name]
    assert {"step-3.safetensors", "step-4.ema.safetensors"} <= after.keys()
    assert newest_state(tmp_path).name == "step-4"


@pytest.mark.parametrize("keep", [None, 1, 2])
def test_a_damaged_state_never_takes_the_place_of_the_one_a_run_resumes_from(
    keep: int | None, here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, max_steps=6, save_steps=2)
    damaged = tmp_path / "states/step-6/trainable.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    train(here, output_path=tmp_path, max_steps=4, keep_checkpoints=keep, resume="auto")
    assert newest_state(tmp_path).name == "step-4"
    train(here, output_path=tmp_path, max_steps=5, keep_checkpoints=keep, resume="auto")
    assert newest_state(tmp_path).name == "step-5"
    assert ("step-4" in left(tmp_path)[0]) == (keep != 1)


def test_overwriting_removes_the_run_and_nothing_else(
    here: Path, out: Path, tmp_path: Path
) -> None:
    users = put(
        out, "notes.txt", "best.safetensors", "previews/cat.png", "states/of-mind/x",
        "step-2.bak.txt", "states/step-2/mine", "config.json", "weights.json",
    )  # fmt: skip
    RunFiles.read(out).add(["keep/step-2.safetensors"], 2)
    users |= put(out, "keep/step-2.safetensors")  # listed, and no name that runs write
    train(here, output_path=out, max_steps=1, seed=7, overwrite=True)
    fresh = train(here, output_path=tmp_path / "fresh", max_steps=1, seed=7)
    wanted = {**users, **tree(fresh)}
    ours = tree(out)
    assert ours.keys() == wanted.keys()
    assert {name for name in ours if ours[name] != wanted[name]} <= set(LOGS)
    assert [row["step"] for row in log(out)] == [1]


def test_overwriting_removes_the_list_of_skipped_rows(tmp_path: Path) -> None:
    folder = project(tmp_path)
    image = (folder / "data/1.png").read_bytes()
    (folder / "data/1.png").write_bytes(b"no image")
    out = train(folder, max_steps=1, on_bad_sample="skip")
    assert SKIPPED in RunFiles.read(out).steps
    assert (out / SKIPPED).exists()
    (folder / "data/1.png").write_bytes(image)
    cache = {"feature_cache": folder / "cache"}
    run(config(folder, task="sft:data_process", **{**cache, "output_path": None}))
    train(folder, task="sft:train", max_steps=1, overwrite=True, **cache)
    assert not (out / SKIPPED).exists()


@pytest.mark.parametrize(
    "fault",
    [
        {"model_paths": '["nothing.safetensors"]'},
        {"dataset_metadata_path": Path("nothing.json")},
        {"learning_rate": 0.0},
        {"lora_target_modules": "nothing"},
    ],
    ids=["model files", "data set", "flag", "layers"],
)
def test_a_run_is_not_overwritten_by_one_that_cannot_begin(
    fault: dict[str, Any], here: Path, trained: Path
) -> None:
    before = tree(trained)
    with pytest.raises((UsageError, StateError)):
        train(here, output_path=trained, max_steps=1, overwrite=True, **fault)
    assert tree(trained) == before


@pytest.mark.parametrize("gone", ["nothing", "states/*", "step-*", "logs/loss.csv"])
def test_what_is_left_of_a_run_is_not_overwritten_by_accident(
    gone: str, here: Path, out: Path, tmp_path: Path
) -> None:
    for number, path in enumerate(out.glob(gone)):
        path.rename(tmp_path / str(number))
    before = tree(out)
    with pytest.raises(StateError) as caught:
        train(here, output_path=out, max_steps=1)
    assert caught.value.where == str(out)
    (advice,) = caught.value.help_lines
    assert "--overwrite" in advice and "--output_path" in advice
    assert ("--resume" in advice) == bool(states(out))
    # What a script has in their place.
    (note,) = caught.value.__notes__
    assert "overwrite=True" in note and "output_path=" in note
    assert tree(out) == before


def put_together(out: Path) -> dict[str, bytes]:
    """Every file of a folder, whether it was set aside or not, but the lists."""
    found = tree(out)
    both = {name.removeprefix(f"{ASIDE}/"): content for name, content in found.items()}
    return {name: content for name, content in both.items() if name != "run.json"}


def test_an_overwritten_run_lies_aside_until_a_save(here: Path, out: Path) -> None:
    before = put_together(out)
    users = put(out, f"{ASIDE}/notes.txt")
    for _ in range(2):  # the second removes what the first has written
        with pytest.raises(PowerCut):
            train(here, stop_at(0), output_path=out, max_steps=1, overwrite=True)
    aside = tree(out / ASIDE)
    assert aside == {**before, "run.json": aside["run.json"], "notes.txt": b"mine"}
    with pytest.raises(StateError, match=ASIDE):
        train(here, output_path=out, max_steps=1)
    train(here, output_path=out, max_steps=1, overwrite=True)
    assert tree(out / ASIDE) == {"notes.txt": users[f"{ASIDE}/notes.txt"]}
    assert left(out) == named(1)


def test_what_cannot_be_set_aside_is_put_back_and_set_aside_the_next_time(
    here: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(out)
    rename, calls = Path.rename, count()

    def full(path: Path, place: Path) -> Any:
        if next(calls) == 3:
            raise OSError(28, "No space left on device")
        return rename(path, place)

    with monkeypatch.context() as patch, pytest.raises((SystemFault, OSError)):
        patch.setattr(Path, "rename", full)
        train(here, output_path=out, max_steps=1, overwrite=True)
    assert (out / ASIDE / "run.json").exists()
    check_way(out)  # as --resume does, too
    assert {name: tree(out)[name] for name in before} == before
    assert not (out / ASIDE).exists()
    train(here, output_path=out, max_steps=1, overwrite=True)
    assert not (out / ASIDE).exists()
    assert left(out) == named(1)


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_file_of_the_users_where_a_run_would_be_set_aside_stays(
    kind: str, out: Path, tmp_path: Path
) -> None:
    put(tmp_path / "mine", "step-1.safetensors")
    if kind == "file":
        put(out, ASIDE)
    elif kind == "link":
        (out / ASIDE).symlink_to(tmp_path / "mine")
    else:
        (tmp_path / "mine").rename(out / ASIDE)
    before = tree(out)
    with pytest.raises(StateError, match=ASIDE):
        check_way(out)
    assert tree(out) == before
    assert (out / ASIDE).is_symlink() == (kind == "link")


@pytest.mark.parametrize(
    "name",
    [
        "run.json", *LOGS, SKIPPED, "step-1.safetensors", "epoch-0.vae.safetensors",
        "logs/validation.csv", "logs/validation.jsonl", "states/step-7/ema.safetensors",
    ],
)  # fmt: skip
def test_a_file_of_the_users_that_has_the_name_of_a_runs_is_never_replaced(
    name: str, here: Path, tmp_path: Path
) -> None:
    users = put(tmp_path, name)
    for flags in ({}, {"overwrite": True}):
        with pytest.raises(StateError, match=name) as caught:
            train(here, output_path=tmp_path, max_steps=1, **flags)
        assert "--output_path" in caught.value.help_lines[0]
        assert tree(tmp_path) == users


@pytest.mark.parametrize("name", ["step-3.safetensors", "states/step-3/state.json"])
def test_a_resumed_run_replaces_no_file_in_the_place_of_one_that_it_writes(
    name: str, here: Path, out: Path
) -> None:
    users = put(out, name)
    with pytest.raises(StateError, match=name):
        train(here, output_path=out, max_steps=3, resume="auto")
    assert users.items() <= tree(out).items()


def test_a_folder_in_the_way_is_refused_before_any_file_is_decoded(
    here: Path, trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(here / "data", tmp_path / "data")
    for path in (tmp_path / "data").glob("*.png"):
        path.write_bytes(b"no image")
    flags = {"dataset_base_path": tmp_path / "data", "on_bad_sample": "skip"}
    with pytest.raises(StateError) as caught:
        train(here, output_path=trained, max_steps=1, **flags)
    assert caught.value.where == str(trained)
    assert not (trained / SKIPPED).exists()


@pytest.mark.parametrize(
    ("steps", "flags", "advice"),
    [
        (1, {}, ("--resume",)),
        (1, {"resume_from_checkpoint": True}, ("--output_path",)),
        (1, {"overwrite": True}, ("--resume", "--overwrite")),
        (3, {"resume_from_checkpoint": True}, ("--resume", "--resume_from_checkpoint")),
    ],
)
def test_ctrl_c_says_how_to_run_again(
    steps: int,
    flags: dict[str, Any],
    advice: tuple[str, ...],
    here: Path,
    trained: Path,
    tmp_path: Path,
) -> None:
    calls = count()

    def stop(module: Any) -> None:
        if next(calls) == steps:
            raise KeyboardInterrupt

    start = dict(flags)
    if "resume_from_checkpoint" in flags:
        start["resume_from_checkpoint"] = trained / "step-2.safetensors"
    given = {"output_path": tmp_path, "max_steps": 4, "save_steps": 2}
    with pytest.raises(Interrupted) as caught:
        train(here, changed(stop), **given, **start)
    assert caught.value.where == str(tmp_path)
    assert tuple(re.findall(r"--\w+", caught.value.help_lines[0])) == advice


def test_a_folder_with_a_run_is_refused_before_libraries_are_loaded(
    here: Path,
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # It would not be found any more.
    monkeypatch.setitem(sys.modules, "dstrain.runs.runner", None)
    words = ["--model", "tiny", "--toy", "--dataset_base_path", str(here / "data")]
    words += ["--output_path", str(trained)]
    assert main(words) == 3
    assert "states/step-2" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) != 3
    with lock(trained):
        assert main(words) == 3
    assert f"process {os.getpid()}" in capsys.readouterr().err
    code = "import sys, dstrain.runs; dstrain.runs.refuse_early; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_stage_1_a_dry_run_and_one_of_several_processes_are_not_refused_early(
    here: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flags in ({"task": "sft:data_process"}, {"dry_run": True}, {"resume": "auto"}):
        refuse_early(config(here, output_path=trained, **flags))
    with pytest.raises(StateError):
        refuse_early(config(here, output_path=trained))
    monkeypatch.setenv("WORLD_SIZE", "2")
    refuse_early(config(here, output_path=trained))
