"""The files of a run in its output folder: how many are kept, and that nothing of the
user's is removed.
"""

import os
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from dstrain import Interrupted, StateError, UsageError, run
from dstrain.cli.main import main
from dstrain.config import CONFIG, validate
from dstrain.runs import refuse_early
from dstrain.runs.checkpoints.directory import (
    LOG,
    LOSS_CSV,
    LOSS_JSONL,
    PROMPTS,
    SET_ASIDE,
    SKIPPED_ROWS,
    remove_run,
    run_in,
)
from dstrain.runs.checkpoints.state import newest_state, states
from dstrain.storage import RUN, RunFiles, lock, remove_leftovers

from tests.support.runs import config, log, project, train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes, but the lock."""
    paths = (
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".dstrain.lock")
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def left(folder: Path) -> list[str]:
    """The weights files and states in an output folder."""
    paths = [*folder.glob("states/*"), *folder.glob("*.safetensors")]
    return sorted(str(path.relative_to(folder)) for path in paths)


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (
            None,
            [
                "states/step-5",
                "states/step-6",
                *(f"step-{step}.safetensors" for step in range(1, 7)),
            ],
        ),
        (1, ["states/step-6", "step-6.safetensors"]),
        (
            3,
            [
                "states/step-4",
                "states/step-5",
                "states/step-6",
                *(f"step-{step}.safetensors" for step in (4, 5, 6)),
            ],
        ),
        (
            9,
            [
                *(f"states/step-{step}" for step in range(1, 7)),
                *(f"step-{step}.safetensors" for step in range(1, 7)),
            ],
        ),
    ],
)
def test_so_many_checkpoints_are_kept(
    keep: int | None, kept: list[str], here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, max_steps=6, save_steps=1, keep_checkpoints=keep)
    assert left(tmp_path) == kept
    files = RunFiles.read(tmp_path)
    assert list(files.weights()) == [name for name in kept if "safe" in name]
    on_disk = set(tree(tmp_path))
    assert on_disk <= set(files.steps)


def test_all_components_of_a_step_are_one_checkpoint(
    here: Path, tmp_path: Path
) -> None:
    flags = {
        "trainable_models": "dit,text_encoder",
        "save_steps": 1,
        "keep_checkpoints": 2,
    }
    train(here, output_path=tmp_path, max_steps=3, **flags)
    names = [
        f"step-{step}.{part}.safetensors"
        for step in (2, 3)
        for part in ("dit", "text_encoder")
    ]
    assert left(tmp_path) == ["states/step-2", "states/step-3", *names]


def test_a_weights_file_that_the_run_did_not_write_is_never_pruned(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, max_steps=2, save_steps=1, keep_checkpoints=1)
    users = ("mine.safetensors", "logs/notes.txt", "states/step-2/notes.txt")
    for name in users:
        (tmp_path / name).write_bytes(b"mine")
    train(
        here,
        output_path=tmp_path,
        max_steps=4,
        save_steps=1,
        keep_checkpoints=1,
        resume="auto",
    )
    assert [(tmp_path / name).read_bytes() for name in users] == [b"mine"] * 3
    assert "step-4.safetensors" in left(tmp_path)
    assert "step-3.safetensors" not in left(tmp_path)


def test_a_resumed_run_prunes_what_the_first_part_kept(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, max_steps=3, save_steps=1)
    train(
        here,
        output_path=tmp_path,
        max_steps=4,
        save_steps=1,
        keep_checkpoints=2,
        resume="auto",
    )
    assert left(tmp_path) == [
        "states/step-3",
        "states/step-4",
        "step-3.safetensors",
        "step-4.safetensors",
    ]


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
    assert ("states/step-4" in left(tmp_path)) == (keep != 1)


def test_overwriting_removes_the_run_and_nothing_else(
    here: Path, tmp_path: Path
) -> None:
    out = train(here, output_path=tmp_path / "out", max_steps=4, save_steps=1)
    users = {
        "notes.txt": b"mine", "best.safetensors": b"mine", "previews/cat.png": b"mine", "states/of-mind/x": b"mine",
        "step-2.bak.txt": b"mine", "states/step-4/mine": b"mine", "config.json": b"mine", "weights.json": b"mine",
    }  # fmt: skip
    for name, content in users.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)
    RunFiles.read(out).add(["previews/step-000002-0.png"], 2)
    (out / "previews/step-000002-0.png").write_bytes(b"ours")
    train(here, output_path=out, max_steps=2, seed=7, overwrite=True)
    fresh = train(here, output_path=tmp_path / "fresh", max_steps=2, seed=7)
    ours, wanted = tree(out), tree(fresh)
    assert {name: ours.pop(name, None) for name in users} == users
    for files in (ours, wanted):
        assert {
            files.pop(name) is not None for name in (CONFIG, LOG, LOSS_CSV, LOSS_JSONL)
        } == {True}
    assert ours == wanted
    assert [row["step"] for row in log(out)] == [1, 2]


def test_overwriting_removes_the_list_of_rows_that_the_run_skipped(
    tmp_path: Path,
) -> None:
    folder = project(tmp_path)
    image = (folder / "data/1.png").read_bytes()
    (folder / "data/1.png").write_bytes(b"no image")
    out = train(folder, max_steps=1, on_bad_sample="skip")
    assert SKIPPED_ROWS in RunFiles.read(out).steps
    assert (out / SKIPPED_ROWS).exists()
    (folder / "data/1.png").write_bytes(image)
    run(
        config(
            folder,
            task="sft:data_process",
            feature_cache=folder / "cache",
            output_path=None,
        )
    )
    train(
        folder,
        max_steps=1,
        task="sft:train",
        feature_cache=folder / "cache",
        overwrite=True,
    )
    assert not (out / SKIPPED_ROWS).exists()


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
    fault: dict[str, Any], here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, max_steps=1)
    before = tree(tmp_path)
    with pytest.raises((UsageError, StateError)):
        train(here, output_path=tmp_path, max_steps=1, overwrite=True, **fault)
    assert tree(tmp_path) == before


def test_weights_of_unknown_origin_are_not_overwritten(
    here: Path, tmp_path: Path
) -> None:
    (tmp_path / "step-1.safetensors").write_bytes(b"mine")
    for flags in ({"overwrite": True}, {}):
        with pytest.raises(StateError, match=r"contains .*step-1\.safetensors"):
            train(here, output_path=tmp_path, max_steps=1, **flags)
    assert (tmp_path / "step-1.safetensors").read_bytes() == b"mine"


@pytest.mark.parametrize("gone", ["states/*", "step-*", "logs/loss.csv"])
def test_what_is_left_of_a_run_is_not_overwritten_by_accident(
    gone: str, here: Path, tmp_path: Path
) -> None:
    out = train(here, output_path=tmp_path / "out", max_steps=1)
    for path in out.glob(gone):
        path.rename(tmp_path / path.name)
    with pytest.raises(StateError, match="already contains a run") as caught:
        train(here, output_path=out, max_steps=1)
    assert ("--resume" in caught.value.help_lines[0]) == bool(states(out))


def test_a_run_whose_removal_is_interrupted_is_restored(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, max_steps=2, save_steps=1)
    before = tree(tmp_path)
    (tmp_path / SET_ASIDE).mkdir()
    for name in (RUN, CONFIG, LOG, "step-1.safetensors"):
        place = tmp_path / SET_ASIDE / name
        place.parent.mkdir(exist_ok=True)
        (tmp_path / name).rename(place)
    with pytest.raises(StateError, match="already contains a run"):
        train(here, output_path=tmp_path, max_steps=2)
    assert tree(tmp_path) == before  # before it is refused
    remove_run(tmp_path)
    remove_leftovers(tmp_path)
    assert tree(tmp_path) == {}
    assert run_in(tmp_path) == []


@pytest.mark.parametrize("flags", [{}, {"overwrite": True}])
def test_a_folder_of_the_users_that_is_called_as_the_one_of_files_set_aside_stays(
    flags: dict[str, Any], here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, max_steps=1)
    place = tmp_path / SET_ASIDE / "step-1.safetensors"
    place.parent.mkdir()
    place.write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(StateError, match=r"contains \.overwritten, which no run wrote"):
        train(here, output_path=tmp_path, max_steps=1, **flags)
    assert tree(tmp_path) == before


def test_a_run_that_is_restored_replaces_no_file(here: Path, tmp_path: Path) -> None:
    train(here, output_path=tmp_path, max_steps=1)
    before = tree(tmp_path)
    aside = tmp_path / SET_ASIDE
    aside.mkdir()
    for name in (RUN, "step-1.safetensors"):
        (tmp_path / name).rename(aside / name)
    users = tmp_path / "step-1.safetensors"
    users.write_text("mine")
    for _ in range(2):
        with pytest.raises(StateError, match=r"contains step-1\.safetensors, which"):
            train(here, output_path=tmp_path, max_steps=1, overwrite=True)
    assert users.read_text() == "mine"
    users.unlink()
    with pytest.raises(StateError, match="already contains a run"):
        train(here, output_path=tmp_path, max_steps=1)
    assert tree(tmp_path) == before
    assert not aside.exists()


USERS = (RUN, CONFIG, LOG, LOSS_CSV, LOSS_JSONL, SKIPPED_ROWS, PROMPTS)


@pytest.mark.parametrize("name", USERS)
def test_a_file_of_the_users_that_has_the_name_of_a_record_is_never_replaced(
    name: str, here: Path, tmp_path: Path
) -> None:
    place = tmp_path / "out" / name
    place.parent.mkdir(parents=True)
    place.write_text("mine")
    for flags in ({}, {"overwrite": True}):
        with pytest.raises(
            StateError, match=f"contains {name}, which no run wrote"
        ) as caught:
            train(here, output_path=tmp_path / "out", max_steps=1, **flags)
        assert "another --output_path" in caught.value.help_lines[0]
        assert tree(tmp_path / "out") == {name: b"mine"}


def test_a_file_in_the_place_of_one_to_be_written_is_never_replaced_by_a_resumed_run(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, max_steps=1)
    for name in ("step-2.safetensors", "states/step-2/state.json", PROMPTS):
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        place.write_text("mine")
        with pytest.raises(StateError, match=f"contains {name}, which no run wrote"):
            train(here, output_path=tmp_path, max_steps=2, resume="auto")
        assert place.read_text() == "mine"
        place.unlink()


def test_a_folder_in_the_way_is_refused_before_any_file_is_decoded(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(here, output_path=tmp_path, max_steps=1)
    before = tree(tmp_path)
    monkeypatch.setattr(
        "dstrain.data.decoding.load_cell", lambda cell: pytest.fail("decoded")
    )
    with pytest.raises(StateError, match="already contains a run"):
        train(here, output_path=tmp_path, max_steps=1, on_bad_sample="skip")
    assert tree(tmp_path) == before


def fourth_raises(error: BaseException) -> Callable[[Path, Path], Path]:
    """A `Path.rename` whose fourth call ends so."""
    rename, calls = Path.rename, count(1)

    def renamed(path: Path, target: Path) -> Path:
        if next(calls) == 4:
            raise error
        return rename(path, target)

    return renamed


def test_ctrl_c_while_a_run_is_taken_away_changes_nothing_and_after_it_says_so(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(here, output_path=tmp_path, max_steps=2, save_steps=1)
    before = tree(tmp_path)
    with (
        monkeypatch.context() as patch,
        pytest.raises(Interrupted, match="nothing there was changed"),
    ):
        patch.setattr(Path, "rename", fourth_raises(KeyboardInterrupt()))
        train(here, output_path=tmp_path, max_steps=1, overwrite=True)
    assert tree(tmp_path) == before
    with (
        monkeypatch.context() as patch,
        pytest.raises(Interrupted, match="interrupted before the first save"),
    ):
        patch.setattr(
            "dstrain.runs.checkpoints.outputs.write_resolved",
            Mock(side_effect=KeyboardInterrupt),
        )
        train(here, output_path=tmp_path, max_steps=1, overwrite=True)
    assert set(tree(tmp_path)) == {RUN}  # of the new run, which has no other file


@pytest.mark.parametrize(
    "given",
    [
        {"resume": "auto", "overwrite": True},
        {"resume": "auto", "resume_from_checkpoint": Path("x")},
        {"resume_from_checkpoint": Path("x"), "overwrite": True},
    ],
)
def test_two_ways_to_begin_are_refused_naming_both(
    given: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        validate(config(tmp_path, model_paths="[]", toy=True, **given))
    assert all(f"--{name}" in str(caught.value) for name in given)


def test_a_run_that_cannot_be_taken_away_whole_stays(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(here, output_path=tmp_path, max_steps=2, save_steps=1)
    before = tree(tmp_path)
    monkeypatch.setattr(
        Path, "rename", fourth_raises(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space left on device"):
        remove_run(tmp_path)
    assert tree(tmp_path) == before


def test_a_folder_with_a_run_is_refused_before_libraries_are_loaded(
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(here, output_path=tmp_path, max_steps=1)
    # It would not be found any more.
    monkeypatch.setitem(sys.modules, "dstrain.runs.runner", None)
    words = ["--model", "tiny", "--toy", "--dataset_base_path", str(here / "data")]
    words += ["--output_path", str(tmp_path)]
    assert main(words) == 3
    assert "already contains a run: states/step-1\n" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) != 3  # goes on to the library
    with lock(tmp_path):
        assert main(words) == 3
    assert f"process {os.getpid()}" in capsys.readouterr().err


def test_stage_1_a_dry_run_and_one_of_several_processes_are_not_refused_early(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(here, output_path=tmp_path, max_steps=1)
    for flags in ({"task": "sft:data_process"}, {"dry_run": True}, {"resume": "auto"}):
        refuse_early(config(here, output_path=tmp_path, **flags))
    with pytest.raises(StateError):
        refuse_early(config(here, output_path=tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    refuse_early(config(here, output_path=tmp_path))
