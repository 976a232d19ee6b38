"""run.json lists what a run wrote, and nothing else is removed or replaced."""

from pathlib import Path

import pytest
from dstrain import StateError
from dstrain.storage import RUN, RunFiles
from dstrain.storage.run_files import averaged_name


@pytest.mark.parametrize(
    "record",
    [
        "",
        "{",
        '{"a": 1}',
        "[1]",
        '{"files": [["../data/0.safetensors", 1]]}',
        '{"files": [["..\\\\data\\\\0.safetensors", 1]]}',
        '{"files": [["C:\\\\data\\\\0.safetensors", 1]]}',
        '{"files": [["/etc/passwd", 0]]}',
        '{"files": [["x", "y"]]}',
        '{"files": {"x": 1}}',
    ],
)
def test_a_record_that_is_none_lists_nothing(record: str, tmp_path: Path) -> None:
    (tmp_path / RUN).write_text(record)
    assert RunFiles.read(tmp_path).steps == {}


def test_the_file_written_last_is_never_pruned_at_any_step(
    tmp_path: Path,
) -> None:
    record = RunFiles.read(tmp_path)
    for name, step in (
        ("step-2.safetensors", 2),
        ("step-9.safetensors", 9),
        ("step-5.safetensors", 5),
    ):
        record.add([name], step)
        (tmp_path / name).write_bytes(b"")
    RunFiles.read(tmp_path).prune_weights(1)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == [
        "step-5.safetensors"
    ]


def test_a_file_that_appears_during_the_run_is_not_replaced(tmp_path: Path) -> None:
    files = RunFiles.read(tmp_path)
    files.add(["step-1.safetensors"], 1)
    (tmp_path / "step-2.safetensors").write_text("mine")
    with pytest.raises(StateError, match=r"contains step-2\.safetensors"):
        files.add(["step-2.safetensors"], 2)


def test_a_listed_file_that_is_gone_is_no_longer_the_runs(tmp_path: Path) -> None:
    files = RunFiles.read(tmp_path)
    files.add(["step-1.safetensors"], 1)
    files.forget_missing()
    (tmp_path / "step-1.safetensors").write_text("mine")
    assert "step-1.safetensors" not in RunFiles.read(tmp_path).steps


def test_removing_a_file_removes_the_folders_that_this_leaves_empty(
    tmp_path: Path,
) -> None:
    files = RunFiles.read(tmp_path)
    paths = ["states/step-1/a", "states/step-2/a"]
    files.add(paths, 1)
    for path in (*paths, "states/step-2/mine"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    files.remove(paths)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        *("run.json", "states", "states/step-2", "states/step-2/mine")
    ]
    assert list(RunFiles.read(tmp_path).steps) == [RUN]


def test_the_newest_weights_are_of_one_step_and_all_exist(tmp_path: Path) -> None:
    files = RunFiles.read(tmp_path)
    names = {
        step: [f"step-{step}.{part}.safetensors" for part in "ab"] for step in (1, 2)
    }
    for step, pair in names.items():
        averages = [averaged_name(name) for name in pair]
        files.add([*pair, *averages], step)
        for name in (*pair, *averages):
            (tmp_path / name).touch()
    assert files.newest_weights() == [tmp_path / name for name in names[2]]
    (tmp_path / names[2][0]).unlink()
    assert files.newest_weights() == [tmp_path / name for name in names[1]]
    (tmp_path / names[1][1]).unlink()
    assert files.newest_weights() == []
    assert averaged_name("step-2.a.safetensors") == "step-2.a.ema.safetensors"
    files.prune_weights(1)
    left = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert left == [
        *(
            "step-2.a.ema.safetensors",
            "step-2.b.ema.safetensors",
            "step-2.b.safetensors",
        )
    ]
