"""R16: nothing of the user's is taken: what dstrain did not write stays as it is,
whatever command runs in its folder.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from dstrain.cache.backend.index import PARTS
from dstrain.cli.main import main
from dstrain.runs.checkpoints.saved_states import prune_states
from dstrain.runs.checkpoints.state import TrainingState, save_state

from tests.support.runs import project

pytestmark = [
    pytest.mark.promise("R16", "nothing of the user's is taken"),
    pytest.mark.usefixtures("tiny"),
]

LINK = "-> "
"""Beginning of the content of a symbolic link; the rest is where it leads."""
SHORT = "7\n"
"""What a lock's file may have."""


@dataclass(frozen=True)
class Foreign:
    """Files of somebody else.

    files: path below each folder that dstrain writes to -> content.
    refused: the folders in which a run may not start while they are there.
    """

    name: str
    files: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[str, ...] = ()


EVERY = ("out", "cache", "made")
PLACES = ("", "logs/", "states/", "previews/", "shards/", "plans/", "image/")
FOREIGN = (
    Foreign(
        "files with names like those of temporaries",
        {
            f"{place}{name}": "notes"
            for place in PLACES
            for name in (".tmp-1234-notes", ".tmp-1234-01234567-run.json", ".tmp-x")
        },
    ),
    Foreign(
        "folders with names like those of temporaries",
        {f"{place}.tmp-1234-notes/deep/a.txt": "notes" for place in PLACES},
    ),
    Foreign("locks of another program", {".lock": "held", ".lock.pid": "1 host"}),
    Foreign("a lock that is a link", {".lock": LINK + "../outside/thesis.txt"}),
    Foreign("content in the place of our lock", {".dstrain.lock": "held"}, EVERY),
    Foreign("a mark of another program", {".dstrain.lock.pid": "held by me"}, EVERY),
    Foreign("lists of who reads", {".reading-list.json": "[]", ".reading-notes": "me"}),
    Foreign("a list of what goes", {".removing.json": "[]"}, ("cache",)),
    Foreign(
        "links in the place of our lock's files",
        {
            ".dstrain.lock": LINK + "../outside/empty",
            ".dstrain.lock.pid": LINK + "../outside/number",
        },
        EVERY,
    ),
    Foreign(
        "folders with names like those of states",
        {
            "state-4/model.bin": "weights",
            "states/state-4/state.json": "{}",
            "states/step-3/notes.txt": "notes",
            "step-3/state.json": "{}",
        },
    ),
    Foreign("a state that no run wrote", {"states/step-1/state.json": "{}"}, ("out",)),
    Foreign(
        "folders with names of those that are set aside",
        {"states/.replaced-x/a.txt": "notes", "states/.replaced-step-2/state.json": "{}"},
    ),
    Foreign("a folder of removed files", {".overwritten/step-1.safetensors": "w"}, ("out",)),
    Foreign(
        "logs of another trainer",
        {"loss.csv": "step,loss\n", "logs/train.log": "log", "logs/events/a.1": "event"},
    ),
    Foreign("its table of losses", {"logs/loss.csv": "step,loss\n1,2\n"}, ("out",)),
    Foreign(
        "weights of another trainer",
        {"weights.json": "{}", "best.safetensors": "w", "checkpoint-2/model.safetensors": "w"},
    ),
    Foreign("weights with the name of ours", {"step-2.safetensors": "w"}, ("out",)),
    Foreign("a record of another program", {"run.json": '{"files": 3}'}, ("out",)),
    Foreign("a marker of another program", {"store.json": '{"format": 3}'}, ("cache",)),
    Foreign(
        "shards of another program",
        {"shards/model.safetensors": "w", "plans/trip.json": "{}"},
        ("cache",),
    ),
    Foreign("notes in the cache", {"shards/a.txt": "notes", "plans/b.arrow": "{}"}),
    Foreign(
        "digests of another program",
        {"digests.npy": '{"a": "sha"}', ".digests.npy": "-"},
        ("cache",),
    ),
    Foreign("a memory of another program", {"logs/.decoded_files.npy": "[]"}),
    Foreign("a table in a folder to generate into", {"metadata.csv": "a,b\n"}, ("made",)),
    Foreign("previews of another program", {"previews/cat.png": "p", "image/cat.png": "p"}),
    Foreign("its prompts", {"previews/prompts.json": "[]"}, ("out",)),
)  # fmt: skip


def is_visible(path: str) -> bool:
    """Whether a path is below a name that a folder for a new cache must not have."""
    first = Path(path).parts[0]
    return not first.startswith(".") and first not in PARTS


def put(foreign: Foreign, folder: Path, is_new: bool = False) -> dict[Path, str]:
    """Write the files that are not there into each folder that dstrain writes to, those
    that no new cache may have left out of it if it is new; return what is written.
    """
    written = {}
    for name in EVERY:
        for path, content in foreign.files.items():
            place = folder / name / path
            if os.path.lexists(place):
                continue
            if is_new and name == "cache" and is_visible(path):
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            if content.startswith(LINK):
                place.symlink_to(content.removeprefix(LINK))
            else:
                place.write_text(content)
            written[place] = content
    return written


def found(paths: Mapping[Path, str]) -> dict[Path, str]:
    """What is at these paths, as `put` describes it."""
    contents = {}
    for path in paths:
        if path.is_symlink():
            contents[path] = f"{LINK}{path.readlink()}"
        elif path.is_file():
            contents[path] = path.read_text()
    return contents


def commands() -> dict[str, tuple[list[str], str]]:
    """Each command by its name, with the folder that it writes to."""
    run = [
        "--model",
        "tiny",
        "--toy",
        "--dataset_base_path",
        "data",
        "--lora_rank",
        "2",
    ]
    more = ["--on_bad_sample", "skip", "--save_steps", "1", "--keep_checkpoints", "1"]
    output = ["--output_path", "out", *more, "--preview_prompt", "a dog"]
    cache = [*run, "--feature_cache", "cache"]
    small = ["--num_inference_steps", "1", "--height", "16", "--width", "16"]
    generate = ["generate", "--model", "tiny", "--toy", *small]
    return {
        "train": ([*run, *output, "--max_steps", "2"], "out"),
        "dry run": ([*run, *output, "--max_steps", "4", "--resume", "--dry_run"], "out"),
        "resume": ([*run, *output, "--max_steps", "4", "--resume"], "out"),
        "overwrite": ([*run, *output, "--max_steps", "3", "--overwrite"], "out"),
        "stage 1": ([*cache, "--task", "sft:data_process"], "cache"),
        "stage 1 again": ([*cache, "--task", "sft:data_process", "--seed", "1"], "cache"),
        "stage 2": (
            [*cache, "--task", "sft:train", *output[:2], "--max_steps", "1", "--overwrite"],
            "out",
        ),
        "cache verify": (["cache", "verify", "cache"], ""),
        "cache prune": (["cache", "prune", "cache", "--yes"], ""),
        "cache export": (["cache", "export", "cache", "cache.tar"], ""),
        "cache import": (["cache", "import", "cache.tar", "cache"], ""),
        "cache repair": (["cache", "verify", "cache", "--repair"], ""),
        "dataset": ([*generate, "--dataset", "prompts.csv", "--output", "made"], "made"),
        "image": ([*generate, "--prompt", "a", "--output", "made/x.png"], ""),
        "toy": (["toy", "--model", "tiny", "--output", "made/toy"], ""),
    }  # fmt: skip


def prepared(folder: Path) -> dict[Path, str]:
    """A project with files outside of the folders that dstrain writes to."""
    project(folder)
    (folder / "prompts.csv").write_text("prompt,seed\na dog,1\n")
    outside = {"thesis.txt": "all of it", "empty": "", "number": SHORT}
    (folder / "outside").mkdir()
    for name, content in outside.items():
        (folder / "outside" / name).write_text(content)
    return {folder / "outside" / name: content for name, content in outside.items()}


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("foreign", FOREIGN, ids=[one.name for one in FOREIGN])
def test_files_of_others_stay_whatever_command_runs(
    foreign: Foreign,
    late: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    theirs = prepared(tmp_path)
    monkeypatch.chdir(tmp_path)
    lines = commands()
    if late:
        for name in ("train", "stage 1", "dataset"):
            assert main(lines[name][0]) == 0
    theirs |= put(foreign, tmp_path, is_new=not late)
    for name, (words, folder) in lines.items():
        if late and name == "train":
            continue
        code = main(words)
        said = capfd.readouterr().err
        assert found(theirs) == theirs, (name, said)
        if folder in foreign.refused and code:
            assert code in (2, 3), said
            advice = "move it away|give another --|new.folder"
            assert re.search(advice, said, re.IGNORECASE), (name, said)
        elif not foreign.refused:
            assert code == 0, (name, said)


@pytest.mark.parametrize(
    "foreign",
    [one for one in FOREIGN if any(map(is_visible, one.files))],
    ids=lambda one: one.name,
)
def test_no_cache_is_made_in_a_folder_of_others(
    foreign: Foreign,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    theirs = prepared(tmp_path)
    monkeypatch.chdir(tmp_path)
    theirs |= put(foreign, tmp_path)
    before = sorted(Path("cache").rglob("*"))
    assert main(commands()["stage 1"][0]) in (2, 3)
    said = capfd.readouterr().err
    assert re.search("move it away|give an empty or new folder", said), said
    assert sorted(Path("cache").rglob("*")) == before
    assert found(theirs) == theirs


def state(step: int) -> TrainingState:
    """A state of nothing."""
    return TrainingState(step, {}, {"state": {}}, {}, "", {})


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on another disk than that of the tests."""
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.fail("these tests need a second file system at /dev/shm")
    folder = shared / f"dstrain-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def test_a_run_whose_states_are_linked_to_another_disk_is_overwritten(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path)
    monkeypatch.chdir(tmp_path)
    lines = commands()
    Path("out").mkdir()
    Path("out/states").symlink_to(disk)
    (disk / "notes.txt").write_text("mine")
    assert main(lines["train"][0]) == 0
    assert (disk / "step-2").is_dir()
    assert main(lines["overwrite"][0]) == 0
    assert sorted(path.name for path in disk.iterdir()) == ["notes.txt", "step-3"]
    assert Path("out/states").is_symlink()


def test_a_state_moved_to_another_place_and_linked_stays_when_it_is_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path)
    monkeypatch.chdir(tmp_path)
    lines = commands()
    assert main(lines["train"][0]) == 0
    Path("out/states/step-2").rename("kept")
    Path("out/states/step-2").symlink_to(tmp_path / "kept")
    before = {path: path.read_bytes() for path in Path("kept").iterdir()}
    assert main(lines["resume"][0]) == 0
    assert {path: path.read_bytes() for path in Path("kept").iterdir()} == before
    assert Path("out/states/step-2").is_symlink()


def test_a_state_that_comes_during_the_run_is_not_pruned(tmp_path: Path) -> None:
    """A user may copy one there at any time."""
    for step in (1, 2):
        save_state(tmp_path / f"states/step-{step}", state(step))
    prune_states(tmp_path, 1, 2, [])
    assert len(list((tmp_path / "states").iterdir())) == 2


def test_a_list_of_files_that_a_stranger_wrote_removes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = prepared(tmp_path)
    monkeypatch.chdir(tmp_path)
    lines = commands()
    assert main(lines["train"][0]) == 0
    Path("out/docs").symlink_to("../outside")
    Path("out/thesis.txt").write_text("mine")
    record = json.loads(Path("out/run.json").read_text())
    record["files"] += [["docs/thesis.txt", 1], ["thesis.txt", 1], ["docs/empty", 1]]
    Path("out/run.json").write_text(json.dumps(record))
    assert main(lines["overwrite"][0]) == 0
    assert found(theirs) == theirs
    assert Path("out/thesis.txt").read_text() == "mine"
