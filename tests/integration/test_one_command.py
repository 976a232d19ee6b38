"""A task with --feature_cache runs both stages in one command: what is computed, cached
and saved is what the two commands leave, and the encoders are gone in between.
"""

import gc
import json
import mmap
import re
import shlex
import shutil
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import Pipeline
from dstrain.cli.main import main

from tests.support.family import weights_of
from tests.support.fixtures import FakePlugin
from tests.support.launchers import FSDP_2, launched
from tests.support.processes import commands, in_processes, words
from tests.support.runs import files, log, outcome, plan_digests, project, same
from tests.support.toys import dataset, toy

pytestmark = pytest.mark.usefixtures("tiny")

BALLAST = 2**28
"""Bytes that an encoder has more in a test of what is freed."""


@pytest.fixture(scope="module")
def here(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose denoiser has dropout, and a second dataset for validation."""
    folder = project(tmp_path_factory.mktemp("project"), dropout=0.2)
    shutil.copytree(folder / "data", folder / "second")
    table = folder / "second/metadata.json"
    table.write_text(table.read_text().replace("dog", "horse"))
    return folder


def flags(here: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": "tiny", "dataset_base_path": here / "data", "learning_rate": 1e-2, "num_epochs": 2, "batch_size": 2,
        "model_paths": json.dumps(list(weights_of(here / "model").values())),
        "tokenizer_path": here / "model/tokenizer", **changes,
    }  # fmt: skip


def cached(here: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """The same, of both stages, which writes into a folder."""
    places = {"feature_cache": folder / "cache", "output_path": folder / "out"}
    return flags(here, **{"lora_rank": 2, **places, **changes})


RUNS: dict[str, dict[str, Any]] = {
    "LoRA": {"lora_rank": 2, "save_steps": 3},
    "an encoder and LoRA": {"trainable_models": "text_encoder", "lora_base_model": "dit", "lora_rank": 2},
    "previews and a second dataset": {
        "lora_rank": 2, "preview_prompt": "a horse", "validation_dataset_base_path": "{here}/second",
        "ema_decay": 0.9, "on_bad_sample": "skip",
    },
    "held-out rows": {"lora_rank": 2, "validation_split": 0.4, "dataset_repeat": 2},
}  # fmt: skip


def left(folder: Path) -> dict[str, Any]:
    """All that a run leaves, previews and validation losses included."""
    more = [*folder.glob("previews/*"), *folder.glob("logs/validation.csv")]
    return {**outcome(folder), **{path.name: path.read_bytes() for path in more}}


@pytest.mark.parametrize("name", RUNS)
def test_one_command_leaves_what_two_commands_and_an_unsplit_run_leave(
    name: str, here: Path, tmp_path: Path
) -> None:
    given = {flag: str(value).format(here=here) for flag, value in RUNS[name].items()}
    given = flags(here, **given)
    lines = {
        "unsplit": [{}],
        "two": [{"task": "sft:data_process"}, {"task": "sft:train"}],
        "one": [{"task": "sft"}],
    }
    for way, stages in lines.items():
        cache = {} if way == "unsplit" else {"feature_cache": tmp_path / way / "cache"}
        for stage in stages:
            more = {**cache, **stage, "output_path": tmp_path / way / "out"}
            assert main(words({**given, **more})) == 0
    found = {way: left(tmp_path / way / "out") for way in lines}
    for way in ("two", "one"):
        for part in ("files", "log", "validation.csv"):
            assert same(found[way].get(part), found["unsplit"].get(part)), part
    assert same(found["one"], found["two"])
    caches = [tmp_path / way / "cache" for way in ("two", "one")]
    # Only the names of shards are random.
    sizes = [Counter(f.stat().st_size for f in c.glob("shards/*")) for c in caches]
    assert sizes[0] == sizes[1]
    assert plan_digests(caches[0]) == plan_digests(caches[1])
    recorded = json.loads((tmp_path / "one/out/logs/config.json").read_text())
    assert recorded["task"] == "sft"


TASK = """
from dstrain.plugin import Task
from dstrain.registry.hooks import hookimpl
api = 2
from dstrain.training.losses import flow_match

@hookimpl
def dstrain_tasks():
    return [Task.of("of_a_plugin", flow_match)]
"""


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[set[str]]]:
    """What a command loads with its weights, one entry for each pipeline."""
    real, found = Pipeline.from_found.__func__, []  # type: ignore[attr-defined]  # of a classmethod

    def from_found(
        cls: type, family: Any, spec: Any, parts: Any, *rest: Any, **more: Any
    ) -> Any:
        if not more.get("empty") and True not in rest:
            found.append(set(parts.files))
        return real(cls, family, spec, parts, *rest, **more)

    monkeypatch.setattr(Pipeline, "from_found", classmethod(from_found))
    yield found


def test_a_repeated_command_loads_no_encoder(
    here: Path, tmp_path: Path, loads: list[set[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    line = words(cached(here, tmp_path))
    assert main(line) == 0
    assert loads == [{"text_encoder", "tokenizer", "vae"}, {"dit"}]
    loads.clear()
    assert main([*line, "--overwrite"]) == 0
    assert loads == [{"dit"}]
    said = capfd.readouterr().err
    assert "precomputing 0 of 6 samples" in said
    assert said.count("encoders freed") == 1
    assert "to train on it, run" not in said


@pytest.mark.usefixtures("empty")
def test_the_command_that_stage_1_prints_trains_though_it_was_given_encoders_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As the published split commands are."""
    shutil.copytree(toy("qwen_image", "base"), "models/Qwen/Qwen-Image")
    files = ("text_encoder/model*.safetensors", "vae/*.safetensors")
    origins = ",".join(f"Qwen/Qwen-Image:{one}" for one in files)
    line = ["--model", "qwen_image", "--model_id_with_origin_paths", origins]
    line += ["--dataset_base_path", str(dataset("qwen_image", "base"))]
    line += ["--task", "sft:data_process", "--feature_cache", "cache"]
    assert main([*line, "--lora_rank", "2", "--max_steps", "1"]) == 0
    said = capfd.readouterr().err
    (command,) = re.findall("to train on it, run: dstrain (.*)", said)
    assert "text_encoder" not in command
    assert main(shlex.split(command)) == 0


def test_the_encoders_are_gone_before_the_denoiser_is_loaded(
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Measured as they are referred to, and as memory that they alone hold is given back."""
    real = Pipeline.from_found.__func__  # type: ignore[attr-defined]  # of a classmethod
    encoders: list[weakref.ref[torch.nn.Module]] = []
    ballast: list[weakref.ref[mmap.mmap]] = []

    def from_found(
        cls: type, family: Any, spec: Any, found: Any, *rest: Any, **more: Any
    ) -> Any:
        is_empty = more.get("empty") or True in rest
        if not is_empty and "dit" in found.files:
            assert [encoder() for encoder in encoders] == [None]
            assert [pages() for pages in ballast] == [None]
        pipeline = real(cls, family, spec, found, *rest, **more)
        if not is_empty and "dit" not in found.files:
            text_encoder = pipeline.components["text_encoder"]
            pages = mmap.mmap(-1, BALLAST)
            ballast.append(weakref.ref(pages))
            text_encoder.register_buffer(
                "ballast", torch.frombuffer(pages, dtype=torch.uint8)
            )
            # Nothing but the collector frees what refers to itself.
            text_encoder.__dict__["circle"] = [text_encoder]
            encoders.append(weakref.ref(text_encoder))
        return pipeline

    monkeypatch.setattr(Pipeline, "from_found", classmethod(from_found))
    gc.disable()
    try:
        assert main(words(cached(here, tmp_path))) == 0
    finally:
        gc.enable()
    assert "encoders freed" in capfd.readouterr().err
    assert "encoders freed" in (tmp_path / "cache/dstrain.log").read_text()


def test_two_processes_run_both_stages(here: Path, tmp_path: Path) -> None:
    def line(way: str, **more: Any) -> list[str]:
        return words(cached(here, tmp_path / way, batch_size=1, **more))

    stages = [line("two", task=f"sft:{stage}") for stage in ("data_process", "train")]
    assert in_processes(2, commands(*stages), tmp_path).codes == (0, 0)
    ended = in_processes(2, commands(line("one"), line("one", resume=True)), tmp_path)
    assert ended.codes == (0, 0), ended.said
    said = ended.said[0]
    assert "each of 2 processes computes up to 3 of them" in said
    assert said.count("encoders freed") == 1
    assert "precomputing 0 of 6 samples" in said and "nothing left to do" in said
    assert log(tmp_path / "one/out") == log(tmp_path / "two/out")
    assert same(files(tmp_path / "one/out"), files(tmp_path / "two/out"))


def test_a_launchers_sharding_holds_for_stage_2(here: Path, tmp_path: Path) -> None:
    given = flags(here, trainable_models="dit", batch_size=1, max_steps=2)
    two = {
        **given,
        "feature_cache": tmp_path / "cache",
        "output_path": tmp_path / "two",
    }
    one = {**given, "gradient_accumulation_steps": 2, "output_path": tmp_path / "one"}
    assert main(words(one)) == 0
    settings = {**FSDP_2, "mixed_precision": "no"}
    ended = in_processes(2, launched((settings, words(two))), tmp_path)
    assert ended.codes == (0, 0), ended.said
    assert "sharding: dit sharded over all processes" in ended.said[0]
    for a, b in zip(log(tmp_path / "two"), log(tmp_path / "one"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


@pytest.mark.parametrize("order", ["unsplit one", "one unsplit", "one two", "two one"])
def test_each_way_resumes_what_another_began(
    order: str, here: Path, tmp_path: Path
) -> None:
    given = flags(here, lora_rank=2)
    cache = {"feature_cache": tmp_path / "cache"}
    ways: dict[str, list[dict[str, Any]]] = {
        "unsplit": [{}],
        "one": [cache],
        "two": [{**cache, "task": "sft:data_process"}, {**cache, "task": "sft:train"}],
    }
    assert main(words({**given, "output_path": tmp_path / "whole"})) == 0
    given["output_path"] = tmp_path / "out"
    lengths = ({"num_epochs": 1}, {"resume": True})
    for way, length in zip(order.split(), lengths, strict=True):
        for stage in ways[way]:
            assert main(words({**given, **length, **stage})) == 0
    assert log(tmp_path / "out") == log(tmp_path / "whole")
    assert same(files(tmp_path / "out"), files(tmp_path / "whole"))


def without_the_dataset(line: dict[str, Any], folder: Path) -> None:
    line["dataset_base_path"] = folder / "gone"


def without_the_denoiser(line: dict[str, Any], folder: Path) -> None:
    paths = json.loads(line["model_paths"])
    line["model_paths"] = json.dumps([["gone.safetensors"], *paths[1:]])


def with_other_layers(line: dict[str, Any], folder: Path) -> None:
    line["lora_target_modules"] = "to_x"


def with_a_run_in_the_way(line: dict[str, Any], folder: Path) -> None:
    unsplit = {**line, "feature_cache": None, "max_steps": 1}
    assert main(words(unsplit)) == 0


def with_a_file_in_the_way(line: dict[str, Any], folder: Path) -> None:
    (folder / "file").touch()
    line["output_path"] = folder / "file/out"


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (without_the_dataset, 2, "--dataset_base_path: "),
        (without_the_denoiser, 3, "gone.safetensors: does not exist"),
        (with_other_layers, 2, "to_x"),
        (with_a_run_in_the_way, 3, "already contains a run"),
        (with_a_file_in_the_way, 4, "file"),
    ],
)
def test_what_stage_2_would_refuse_is_refused_before_anything_is_computed(
    change: Callable[[dict[str, Any], Path], None],
    code: int,
    said: str,
    here: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    line = cached(here, tmp_path)
    change(line, tmp_path)
    assert main(words(line)) == code
    assert said in capfd.readouterr().err
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ({}, '"rows": "7"'),
        ({"learning_rate": 1e-3}, 'saved: {"learning_rate": 0.01,'),
    ],
    ids=["a dataset that changed", "another flag"],
)  # fmt: skip
def test_a_resume_that_stage_2_would_refuse_is_refused_before_anything_is_computed(
    flag: dict[str, Any], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    project(tmp_path)
    line = cached(tmp_path, tmp_path, max_steps=1)
    assert main(words(line)) == 0
    # Of the same rows, more steps are a resume.
    assert main([*words({**line, "max_steps": 2}), "--resume"]) == 0
    rows = json.loads((tmp_path / "data/metadata.json").read_text())
    rows.append({**rows[0], "prompt": "a bird"})
    (tmp_path / "data/metadata.json").write_text(json.dumps(rows))
    before = sorted((tmp_path / "cache").rglob("*"))
    capfd.readouterr()
    more = {**line, "max_steps": 3, **flag}
    assert main([*words(more), "--resume"]) == 3
    told = capfd.readouterr().err
    assert said in told
    assert sorted((tmp_path / "cache").rglob("*")) == before
    state = str(tmp_path / "out/states/step-2")
    elsewhere = {**more, "output_path": tmp_path / "new"}
    assert main([*words(elsewhere), "--resume", state]) == 3
    assert sorted((tmp_path / "cache").rglob("*")) == before
    assert main([*words(more), "--overwrite"]) == 0


def test_a_task_of_a_plugin_gets_it(
    here: Path, tmp_path: Path, fake_plugin: FakePlugin
) -> None:
    fake_plugin("extra", {"extra": "extra_task"}, {"extra_task": TASK}, group="dstrain")
    given = flags(here, task="of_a_plugin", lora_rank=2)
    assert main(words({**given, "output_path": tmp_path / "unsplit"})) == 0
    cached = {**given, "feature_cache": tmp_path / "cache"}
    assert main(words({**cached, "output_path": tmp_path / "one"})) == 0
    stage_2 = {**cached, "task": "of_a_plugin:train", "output_path": tmp_path / "two"}
    assert main(words(stage_2)) == 0
    for way in ("one", "two"):
        assert same(files(tmp_path / way), files(tmp_path / "unsplit"))
        assert log(tmp_path / way) == log(tmp_path / "unsplit")
