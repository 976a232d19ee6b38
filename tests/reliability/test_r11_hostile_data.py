"""R11: data cannot run code, reach outside its folders, or fill the memory."""

import io
import json
import multiprocessing
import os
import pickle
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from dstrain import UsageError
from dstrain.cache import stored_plans
from dstrain.cache.backend.plan_files import commit_plans, write_plan
from dstrain.cli.main import main
from dstrain.data import DataConfig, Resolution, load_cell
from dstrain.data.row_checks import open_dataset
from dstrain.plugin import Column
from PIL import Image

from tests.support import broad_family
from tests.support.bad_files import (
    encoded,
    film,
    huge_film,
    huge_png,
    huge_tiff,
    huge_webp,
    moving_gif,
    moving_png,
    pages,
    with_text,
    zeros,
)
from tests.support.family import write, write_data
from tests.support.machines import more_memory

pytestmark = pytest.mark.promise(
    "R11", "data cannot run code, reach outside its folders, or fill the memory"
)


@dataclass(frozen=True)
class Payload:
    """Creates a file when it is unpickled."""

    marker: Path

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


def raw(marker: Path) -> bytes:
    return pickle.dumps({"weight": Payload(marker)})


def archived(marker: Path) -> bytes:
    """A pickle in the archive that torch.save writes."""
    content = io.BytesIO()
    torch.save({"weight": Payload(marker)}, content)
    return content.getvalue()


def array(marker: Path) -> bytes:
    """An array of objects as numpy saves it."""
    content = io.BytesIO()
    np.save(content, np.array([Payload(marker)], dtype=object), allow_pickle=True)
    return content.getvalue()


PICKLES: tuple[tuple[str, str, Callable[[Path], bytes]], ...] = (
    ("weights called safetensors", "model/transformer/model-1-of-2.safetensors", raw),
    ("an archive called safetensors", "model/vae/model-1-of-1.safetensors", archived),
    ("weights called pth", "model/text_encoder/model.pth", archived),
    ("weights called bin", "model/text_encoder/model.bin", raw),
    ("a LoRA", "lora.safetensors", archived),
    ("a LoRA called pt", "lora.pt", archived),
    ("the tensors of a state", "out/states/step-3/trainable.safetensors", raw),
    ("the record of a state", "out/states/step-3/record.json", raw),
    ("a shard of a feature cache", "store/**/*.safetensors", raw),
    ("the record of a feature cache", "store/store.json", raw),
    ("what a cache remembers of files", "store/digests.npy", raw),
    ("the metadata", "data/metadata.json", raw),
    ("an image", "data/0.png", raw),
    ("an array in the place of an image", "data/0.png", array),
)
"""What is replaced by a pickle: its name, its place in a project, how it is pickled."""


@dataclass(frozen=True)
class Trick:
    """A way out of the dataset's folder: the cell, what is said, what lies in the folder."""

    name: str
    written: str
    words: str
    make: Callable[[Path], Any] = lambda data: None
    column: str = "image"


def link(name: str, target: str) -> Callable[[Path], Any]:
    return lambda data: (data / name).symlink_to(target.format(data=data))


def chain(data: Path) -> None:
    (data / "1.png").symlink_to("2.png")
    (data / "2.png").symlink_to(data / "3.png")
    (data / "3.png").symlink_to("../secret/secret.png")


def sock(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's whole path has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


def frames(data: Path) -> None:
    """A folder of frames, one of which is a link."""
    (data / "frames").mkdir()
    Image.new("RGB", (32, 32)).save(data / "frames/0.png")
    (data / "frames/1.png").symlink_to("../../secret/secret.png")


OUT = "points outside the dataset's folder"
TRICKS = (
    Trick("dots", "../secret/secret.png", OUT),
    Trick("dots behind a file", "good.png/../../secret/secret.png", OUT),
    Trick("an absolute path", "{secret}/secret.png", OUT),
    Trick("a folder whose name begins the same", "../data-2/secret.png", OUT),
    Trick("a link", "link.png", OUT, link("link.png", "{data}/../secret/secret.png")),
    Trick("a folder that is a link", "deep/secret.png", OUT, link("deep", "../secret")),
    Trick("links to links", "1.png", OUT, chain),
    Trick("the process's own folder", "/proc/self/cwd/secret/secret.png", OUT),
    Trick("a link to the process", "fd.png", OUT, link("fd.png", "/proc/self/fd/0")),
    Trick("a device", "/dev/zero", OUT),
    Trick("a link to a device", "zero.png", OUT, link("zero.png", "/dev/zero")),
    Trick("a pipe", "pipe.png", "is not a regular file", lambda data: os.mkfifo(data / "pipe.png")),
    Trick("a socket", "socket.png", "is not a regular file", lambda data: sock(data / "socket.png")),
    Trick("the home folder", "~/secret.png", "no such file"),
    Trick("a variable", "$HOME/secret.png", "no such file"),
    Trick("percent signs", "%2e%2e/secret/secret.png", "no such file"),
    Trick("backslashes", "..\\secret\\secret.png", OUT),
    Trick("a path of Windows", "C:\\secret\\secret.png", "no such file"),
    Trick("a NUL", "good.png\0/../../secret/secret.png", "contains a NUL character"),
    Trick("a file URL", "file://{secret}/secret.png", "is a URL"),
    Trick("dots and slashes behind", "good.png/.", "no such file"),
    Trick("another case", "GOOD.PNG", "no such file"),
    Trick("a name of 20,000 letters", "../" * 5000 + "secret/secret.png", "is not a file name"),
    Trick("a link in a folder of frames", "frames", "1.png points outside", frames, "clip"),
    Trick("a play list", "list.mp4", "is not a video in a supported format",
          lambda data: (data / "list.mp4").write_text("#EXTM3U\n#EXTINF:1,\n../secret/secret.png\n"), "clip"),
    Trick("a concatenation", "list.mp4", "is not a video in a supported format",
          lambda data: (data / "list.mp4").write_text("ffconcat version 1.0\nfile ../secret/secret.png\n"), "clip"),
)  # fmt: skip


BOMBS: tuple[tuple[str, str, Callable[[], bytes]], ...] = (
    ("a PNG of 2^32 pixels", "image", huge_png),
    ("a PNG of 400 megapixels in 2 megabytes", "image", lambda: zeros(20_000, 20_000)),
    ("a PNG with 192 megabytes of text", "image", lambda: with_text(2**26)),
    ("a PNG of 2^31 frames", "clip", lambda: moving_png(2**31 - 1)),
    ("a GIF of 65,535 x 65,535", "image", lambda: moving_gif(65_535, 1)),
    (
        "a GIF of 40,000 frames of 16 megapixels",
        "clip",
        lambda: moving_gif(4_000, 40_000),
    ),
    ("a WebP of 2^28 pixels a frame", "clip", huge_webp),
    ("a TIFF of 2^40 pixels", "image", huge_tiff),
    ("a TIFF of 20,000 pages", "image", lambda: pages(20_000)),
    ("a video of 256 megapixels a frame", "clip", huge_film),
)
"""What is larger than it looks: its name, its column, and how it is made."""


def replaced_by_link(place: str, target: str) -> Callable[[Path], Any]:
    """Move what is at a place of a cache out of it, and put a link in its place."""

    def act(store: Path) -> None:
        path = next(iter(sorted(store.glob(place))), store / place)
        outside = store.parent / "secret" / target
        if path.is_dir():
            shutil.copytree(path, outside)
            shutil.rmtree(path)
        elif path.exists():
            shutil.move(path, outside)
        else:
            outside.touch()
        path.symlink_to(outside)

    return act


def rewritten(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], Any]:
    """Change every row of the plans, with digests that fit."""

    def act(store: Path) -> None:
        for plan in stored_plans(store):
            table = plan.columns("files").to_pydict()
            names = ("size", "modified", "changed", "inode", "sha256")
            recorded = [
                [*mark, digest.hex()]
                for *mark, digest in zip(*(table[name] for name in names), strict=True)
            ]
            names = map(os.fsdecode, table["place"])
            lines = [
                {**line, "files": [], "frame folders": []} for line in plan.samples()
            ]
            lines[0]["files"] = list(zip(names, recorded, strict=True))
            for line in lines:
                change(line)
            write_plan(store, plan.identity, plan.record["about"], lines)

    return act


def elsewhere(row: dict[str, Any]) -> None:
    """Let every value have another address."""
    for value in row["values"].values():
        if "at" in value:
            value["at"] = "5e" * 20


def named_outside(row: dict[str, Any]) -> None:
    """Name files that lie outside of the dataset."""
    for number, (_, recorded) in enumerate(row["files"]):
        row["files"][number] = ["../secret/secret.png", recorded]


def renamed_shard(store: Path) -> None:
    """Let a shard's header name values of another folder."""
    path = next((store / "shards").iterdir())
    path.rename(path.with_name("..%2f..%2fsecret.safetensors"))


LINKED = "is a symbolic link and is not followed"
STORES: tuple[tuple[str, Callable[[Path], Any], str, str], ...] = (
    ("a marker that is a link", replaced_by_link("store.json", "store.json"), "train", LINKED),
    ("shards that are a link", replaced_by_link("shards", "shards"), "train", LINKED),
    ("shards that are a link, to write to", replaced_by_link("shards", "shards"), "data_process", LINKED),
    ("plans that are a link", replaced_by_link("plans", "plans"), "train", LINKED),
    ("plans that are a link, to write to", replaced_by_link("plans", "plans"), "data_process", LINKED),
    ("a shard that is a link", replaced_by_link("shards/*", "shard"), "train", LINKED),
    ("a plan that is a link", replaced_by_link("plans/*.json", "plan"), "train", LINKED),
    ("columns that are a link", replaced_by_link("plans/*.arrow", "columns"), "train", LINKED),
    ("a plan that is a link, to write to", replaced_by_link("plans/*.json", "plan"), "data_process", LINKED),
    ("a log that is a link", replaced_by_link("dstrain.log", "log"), "data_process", LINKED),
    ("digests that are a link", replaced_by_link("digests.npy", "digests"), "data_process", LINKED),
    ("a lock that is a link", replaced_by_link(".dstrain.lock", "lock"), "data_process", LINKED),
    ("the lock's holder that is a link", replaced_by_link(".dstrain.lock.pid", "7"), "data_process", LINKED),
    ("values that lie elsewhere", rewritten(elsewhere), "train", "lacks values"),
    ("files that lie elsewhere", rewritten(named_outside), "train", ""),
    ("a shard with slashes in its name", renamed_shard, "train", "lacks values"),
)  # fmt: skip
"""What a stranger does to a cache: how, the stage that then uses it, and what it says."""


MORE = 100 * 2**20
"""Bytes by which a bomb may make the memory grow; decoded, each would take 2.5 times that
and more."""
COLUMNS = {
    "image": Column("image", "image", multiple=8),
    "clip": Column("clip", "video", multiple=8),
}


def named(cases: Any) -> list[str]:
    return [
        (case.name if isinstance(case, Trick) else case[0]).replace(" ", "-")
        for case in cases
    ]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Path]:
    """A model, a dataset, a run with a state, and a filled cache, made once."""
    folder = tmp_path_factory.mktemp("project")
    broad_family.install(tiny)
    write(folder / "model")
    write_data(folder / "data", ("a", "b", "c"))
    assert main([*command(folder), "--output_path", str(folder / "out")]) == 0
    stage_1 = ["--task", "sft:data_process", "--output_path", str(folder / "store")]
    assert main([*command(folder), *stage_1]) == 0
    yield folder


def command(folder: Path, text_encoder: str = "model-1-of-1.safetensors") -> list[str]:
    model = folder / "model"
    dit = sorted(map(str, (model / "transformer").glob("*.safetensors")))
    encoders = (
        model / "text_encoder" / text_encoder,
        model / "vae/model-1-of-1.safetensors",
    )
    files = [dit, *map(str, encoders)]
    data = ["--dataset_base_path", str(folder / "data"), "--lora_rank", "2"]
    return ["--model", "tiny", "--model_paths", json.dumps(files), *data]


@pytest.mark.parametrize("name, place, pickled", PICKLES, ids=named(PICKLES))
def test_no_pickle_is_opened_wherever_it_is(
    project: Path,
    tmp_path: Path,
    name: str,
    place: str,
    pickled: Any,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder, marker = tmp_path / "project", tmp_path / "marker"
    shutil.copytree(project, folder)
    path = next(iter(folder.glob(place)), folder / place)
    path.write_bytes(pickled(marker))
    encoder = (
        path.name if path.parent.name == "text_encoder" else "model-1-of-1.safetensors"
    )
    words = command(folder, encoder)
    if place.startswith("store"):
        task = "data_process" if place.endswith("digests.npy") else "train"
        words += ["--task", f"sft:{task}", "--feature_cache", str(folder / "store")]
    if place.startswith("out"):
        words += ["--output_path", str(folder / "out"), "--resume", "--num_epochs", "2"]
    else:
        words += ["--output_path", str(folder / "new")]
    if place.startswith("lora"):
        words += ["--lora_checkpoint", str(path)]
    code = main(words)
    said = capfd.readouterr().err
    assert not marker.exists()
    assert "Traceback" not in said
    # What a cache remembers of files is no part of it: unreadable, it is made again.
    assert code == (
        0 if place.endswith("digests.npy") else 2 if place.startswith("data") else 3
    ), said
    if code:
        assert "dstrain: error: " in said and path.name in said


@pytest.fixture(scope="module")
def opened() -> list[str]:
    """The files that Python opened since the last `clear`."""
    found: list[str] = []

    def note(event: str, arguments: Any) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            found.append(os.path.realpath(os.fsdecode(arguments[0])))

    sys.addaudithook(note)
    return found


@pytest.mark.parametrize("name, alter, stage, words", STORES, ids=named(STORES))
def test_no_cache_leads_out_of_its_folder(
    project: Path,
    tmp_path: Path,
    opened: list[str],
    name: str,
    alter: Callable[[Path], Any],
    stage: str,
    words: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "project"
    shutil.copytree(project, folder)
    secret = folder / "secret"
    secret.mkdir()
    # As large as what is recorded, so that its bytes would be compared.
    shutil.copyfile(folder / "data/0.png", secret / "secret.png")
    alter(folder / "store")
    before = {path: path.read_bytes() for path in secret.rglob("*") if path.is_file()}
    opened.clear()
    task = ["--task", f"sft:{stage}", "--feature_cache", str(folder / "store")]
    seed = [] if stage == "train" else ["--seed", "1"]
    output = ["--output_path", str(folder / "new")]
    code = main([*command(folder), *task, *output, *seed])
    said = capfd.readouterr().err
    reached = [path for path in opened if path.startswith(str(secret))]
    after = {path: path.read_bytes() for path in secret.rglob("*") if path.is_file()}
    assert not reached
    assert after == before
    assert code == (3 if words else 0), said
    assert words in said


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
@pytest.mark.parametrize(
    "words",
    ["verify {}", "verify {} --repair", "show {} --output {}.html", "prune {} --yes",
     "export {} {}.tar", "import {} {}-2"],
)  # fmt: skip
def test_nothing_that_a_plan_names_is_fetched_opened_or_written(
    project: Path,
    tmp_path: Path,
    opened: list[str],
    words: str,
    damaged: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, secret = tmp_path / "store", tmp_path / "secret"
    shutil.copytree(project / "store", store)
    for name in ("data", "model"):
        shutil.copytree(project / name, secret / name)
    rows = [{"image": "https://127.0.0.1:9/0.png", "prompt": "a"}]
    (secret / "data/metadata.json").write_text(json.dumps(rows))
    ((_, record),) = stored_plans(store)
    flags = {
        "model": "tiny",
        "task": "sft:data_process",
        "model_id": str(secret / "model"),
        "dataset_base_path": str(secret / "data"),
        "url_cache": str(secret / "urls"),
        "feature_cache": str(secret / "cache"),
    }
    recorded = [word for name, value in flags.items() for word in (f"--{name}", value)]
    record["about"]["config"] = {**flags, "words": recorded, "folder": str(secret)}
    record["about"]["dataset"] |= {
        "path": str(secret / "data/metadata.json"),
        "folders": [str(secret / "data")],
    }
    commit_plans(store, [record])
    if damaged:
        shard = next((store / "shards").iterdir())
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    before = {path: path.stat().st_mtime_ns for path in secret.rglob("*")}
    connect = Mock()
    monkeypatch.setattr(socket.socket, "connect", connect)
    opened.clear()
    main(["cache", *words.format(*[store] * 3).split()])
    assert not [path for path in opened if path.startswith(str(secret))]
    assert {path: path.stat().st_mtime_ns for path in secret.rglob("*")} == before
    connect.assert_not_called()


@pytest.mark.parametrize("trick", TRICKS, ids=named(TRICKS))
def test_no_name_leads_out_of_the_folder(
    trick: Trick,
    tmp_path: Path,
    opened: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    data, secret = tmp_path / "data", tmp_path / "secret"
    for folder in (data, secret, tmp_path / "data-2"):
        folder.mkdir()
        (folder / "secret.png").write_bytes(encoded("PNG"))
    (data / "secret.png").rename(data / "good.png")
    (data / "good.mp4").write_bytes(film())
    monkeypatch.setenv("HOME", str(secret))
    trick.make(data)
    written = trick.written.replace("{secret}", str(secret))
    row = {"image": "good.png", "prompt": "a", "clip": "good.mp4"}
    (data / "metadata.json").write_text(
        json.dumps([row, {**row, trick.column: written}])
    )
    monkeypatch.chdir(tmp_path)
    opened.clear()
    with pytest.raises(UsageError) as caught:
        open_dataset(
            DataConfig(Path("data"), None, None, Resolution(None, None, 2**20)), COLUMNS
        )
    said = str(caught.value)
    assert trick.words in said and f"metadata.json:2:{trick.column}: " in said
    forbidden = (str(secret), str(tmp_path / "data-2"), "/dev/zero")
    assert not [path for path in opened if path.startswith(forbidden)]


def grown(path: Path, column: str, answers: Any) -> None:
    """Answer what is said of a dataset of one file, in a process with little memory."""
    (path.parent / "metadata.json").write_text(json.dumps([{column: path.name}]))
    try:
        config = DataConfig(path.parent, None, None, Resolution(None, None, 2**20))
        with more_memory(MORE):
            load_cell(open_dataset(config, {column: COLUMNS[column]}).rows[0][column])
        said = "loaded"
    except (UsageError, MemoryError) as error:
        said = str(error)
    answers.send(said)


@pytest.mark.parametrize("name, column, make", BOMBS, ids=named(BOMBS))
def test_a_small_file_fills_no_memory(
    tmp_path: Path, name: str, column: str, make: Callable[[], bytes]
) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(make())
    mine, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(
        target=grown, args=(path, column, theirs)
    )
    child.start()
    said = mine.recv()
    child.join()
    assert (said == "loaded") == ("pages" in name)
    if said != "loaded":
        assert f"metadata.json:1:{column}: 'bomb' " in said


def sparse(path: Path) -> None:
    """2^40 bytes that take no room."""
    with path.open("wb") as file:
        file.truncate(2**40)


STRANGE: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a sparse file": sparse,
    # It has no size and, read, no end of its own.
    "a file of the system": lambda path: path.symlink_to("/proc/self/mem"),
    "a socket": sock,
}
NAMED = {
    "--config": "run.yaml",
    "--dataset_metadata_path": "table.csv",
    "--model_paths": "model.safetensors",
    "--lora_checkpoint": "lora.safetensors",
    "--preset_lora_path": "preset.safetensors",
    "--resume_from_checkpoint": "start.safetensors",
}
"""Flags that name a file, and the file's name."""


def run_in_child(words: list[str], answers: Any) -> None:
    with more_memory(20 * MORE):  # a command imports more than it reads
        answers.send(main(words))


def in_child(words: list[str]) -> int:
    """The exit code of a command in a process of its own, whose memory is limited."""
    mine, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    child = context.Process(target=run_in_child, args=(words, theirs))
    child.start()
    answered = mine.poll(120)
    if not answered:
        child.kill()
    assert answered, "it waits"
    code: int = mine.recv()
    child.join()
    return code


@pytest.mark.parametrize("flag", NAMED)
@pytest.mark.parametrize("kind", STRANGE)
def test_a_named_file_that_is_no_file_is_refused_at_once(
    kind: str,
    flag: str,
    project: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / NAMED[flag]
    STRANGE[kind](path)
    words = [*command(project), "--output_path", str(tmp_path / "out")]
    words += ["--max_steps", "1"]
    if flag == "--model_paths":
        words[words.index(flag) + 1] = json.dumps([str(path)])
    else:
        words += [flag, str(path)]
    code = in_child(words)
    said = capfd.readouterr().err
    assert code in (2, 3, 4), said
    assert path.name in said
    assert "Traceback" not in said


@pytest.mark.parametrize("kind", STRANGE)
def test_a_caption_that_is_no_file_is_refused_at_once(
    kind: str, project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "photos"
    data.mkdir()
    for name in "ab":
        (data / f"{name}.png").write_bytes(encoded("PNG"))
    (data / "a.txt").write_text("a caption")
    STRANGE[kind](data / "b.txt")
    words = [*command(project), "--output_path", str(tmp_path / "out")]
    words[words.index("--dataset_base_path") + 1] = str(data)
    code = in_child(words)
    said = capfd.readouterr().err
    assert code == 2, said
    assert "photos: 1 bad value\n  b.txt: " in said
    assert "Traceback" not in said


DEEP = {
    "flow.yaml": "a: " + "[" * 100_000,
    "block.yaml": "- " * 100_000,
    "mapping.yaml": "a: " + "{b: " * 100_000,
    "list.json": '{"a": ' + "[" * 100_000,
    "objects.json": '{"a": ' * 100_000,
    "list.toml": "a = " + "[" * 100_000,
}


@pytest.mark.parametrize("name", DEEP)
def test_options_nested_100000_deep_are_refused_in_one_line(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(DEEP[name])
    assert main(["--config", str(tmp_path / name)]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert len(said) < 400
    assert name in said


@pytest.mark.parametrize("named", [True, False])
def test_100000_columns_that_nothing_reads_are_one_line(
    named: bool, project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the column that the run needs, and without it."""
    many = ",".join(f"column {number}" for number in range(100_000))
    first = "image,prompt" if named else "prompt,label"
    table = tmp_path / "wide.csv"
    table.write_text(f"{first},{many}\n0.png,a{',' * 100_000}\n")
    words = [*command(project), "--dataset_metadata_path", str(table)]
    code = main([*words, "--output_path", str(tmp_path / "out"), "--max_steps", "1"])
    said = capfd.readouterr().err
    assert code == (0 if named else 2), said[:1000]
    lines = [line for line in said.splitlines() if "column 0" in line]
    assert len(lines) == 1
    assert len(said) < 4000
