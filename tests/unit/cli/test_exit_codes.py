"""Every exit code, in several ways each, through the command line; one line says why,
and the user's files stay.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import TrainingModule
from dstrain.cli.main import main
from safetensors.torch import load_file, save_file

from tests.support import ROOT
from tests.support.runs import project

FakePlugin = Callable[..., Path]
DATA = ("--dataset_base_path", "data")
TRAIN = ("--model", "tiny", "--toy", *DATA, "--lora_rank", "2", "--output_path", "out")
SHORT = (*TRAIN, "--max_steps", "1")
LONGER = (*TRAIN, "--max_steps", "2", "--resume")
STORE = ("--feature_cache", "cache", "--task")
STAGE_1 = (
    "--model",
    "tiny",
    "--toy",
    *DATA,
    "--lora_rank",
    "2",
    *STORE,
    "sft:data_process",
)
STAGE_2 = (*SHORT, *STORE, "sft:train")
FILES = json.dumps([f"model/{name}/model-1-of-1.safetensors" for name in ("text_encoder", "vae")]
                   + [[f"model/transformer/model-{i}-of-2.safetensors" for i in (1, 2)]])  # fmt: skip
TRAIN_FILES = ("--model", "tiny", "--model_paths", FILES, "--tokenizer_path", "model/tokenizer", *DATA,
               "--output_path", "out", "--max_steps", "2", "--lora_rank", "2")  # fmt: skip
MODELS = ("models", "-p", "no:tiny", "-p", "no:flux", "-p", "no:wan")
"""Of one family: the import of each takes a process."""
GENERATE = (
    *("generate", "--model", "tiny", "--toy", "--prompt", "dog"),
    *("--output", "x.png", "--num_inference_steps", "1"),
)
Words = tuple[str, ...]
Prepare = Callable[[Path, pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Way:
    """A command line, after `first` ones that succeed and `prepare`; the first line of
    the error begins with `said`.
    """

    words: Words
    said: str = ""
    first: tuple[Words, ...] = ()
    prepare: Prepare | None = None


def written(name: str, text: str) -> Prepare:
    def prepare(here: Path, patch: pytest.MonkeyPatch) -> None:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)

    return prepare


def gone(name: str) -> Prepare:
    return lambda here, patch: (here / name).unlink()


def spoiled(pattern: str, value: float) -> Prepare:
    """Put a number into every weight of some files."""

    def spoil(here: Path, patch: pytest.MonkeyPatch) -> None:
        for path in here.glob(pattern):
            save_file(
                {
                    name: torch.full_like(tensor, value)
                    for name, tensor in load_file(path).items()
                },
                path,
            )

    return spoil


def without(folder: str) -> Prepare:
    """Delete a folder."""
    return lambda here, patch: shutil.rmtree(here / folder)


def damaged(pattern: str) -> Prepare:
    """Flip bits of every tensor in some safetensors files."""

    def damage(here: Path, patch: pytest.MonkeyPatch) -> None:
        for path in here.glob(pattern):
            content = bytearray(path.read_bytes())
            start = 8 + int.from_bytes(content[:8], "little")
            for place in range(start, len(content), 4):
                content[place] ^= 1
            path.write_bytes(content)

    return damage


def at_forward(body: Callable[[], Any]) -> Prepare:
    """Do something at the first forward pass."""

    def prepare(here: Path, patch: pytest.MonkeyPatch) -> None:
        forward = TrainingModule.forward
        patch.setattr(
            TrainingModule,
            "forward",
            lambda self, batch: (body(), forward(self, batch))[1],
        )

    return prepare


def raising(error: BaseException) -> Callable[..., Any]:
    def body(*given: Any, **named: Any) -> Any:
        raise error

    return body


def at(place: str, error: BaseException) -> Prepare:
    return lambda here, patch: patch.setattr(place, raising(error))


def allocate() -> None:
    torch.empty(2**50)


WRITE = "dstrain.generation.run.save_image_or_video"
FULL = OSError(28, "No space left on device")
WAYS: tuple[tuple[int, str, Way], ...] = (
    (0, "help", Way(("--help",))),
    (0, "models", Way(MODELS)),
    (0, "a plan", Way((*TRAIN, "--dry_run"))),
    (0, "a run", Way(SHORT)),
    (0, "nothing left to do", Way((*SHORT, "--resume"), first=(SHORT,))),
    (0, "stage 1 again", Way(STAGE_1, first=(STAGE_1,))),
    (0, "an image", Way(GENERATE)),
    (1, "a defect in a step", Way(SHORT, "", prepare=at_forward(raising(ValueError("deep\ninside"))))),
    (1, "a defect while it loads", Way(SHORT, "", prepare=at("dstrain.runs.loop.prepare", KeyError("deep")))),
    (1, "a defect of a sampler", Way(GENERATE, "", prepare=at(WRITE, RuntimeError("deep")))),
    (1, "a defect in a data loader's process", Way(
        (*SHORT, "--dataset_num_workers", "1"), "data loader: ValueError: deep",
        prepare=at("dstrain.training.loader.load_cell", ValueError("deep")))),
    (2, "unknown command", Way(("trian",), "command line: no command named 'trian'")),
    (2, "unknown flag", Way((*SHORT, "--batchsize", "2"), "--batchsize: no such option; did you mean '--batch_size'?")),
    (2, "a flag of the reference", Way((*SHORT, "--loss_type", "l1"), "--loss_type: no such option")),
    (2, "a tracker that is not installed", Way((*SHORT, "--report_to", "swanlab"),
                                               "--report_to: swanlab is not installed")),
    (2, "unknown family", Way(("--model", "tinny"), "--model: no model named 'tinny'")),
    (2, "unknown task", Way((*SHORT, "--task", "sfr"), "--task: no task named 'sfr'; tasks: sft")),
    (2, "unknown component", Way((*SHORT, "--lora_base_model", "ditt"),
                              "--lora_base_model: tiny base has no component 'ditt'; did you mean 'dit'?")),
    (2, "value out of range", Way((*SHORT, "--batch_size", "0"), "--batch_size: expected 1 or more, got 0")),
    (2, "file of flags", Way(("--config", "a.toml", *SHORT), "a.toml:sed: no such option; did you mean 'seed'?",
                             prepare=written("a.toml", "sed = 1"))),
    (2, "no such image", Way(SHORT, "data/metadata.json: ", prepare=gone("data/0.png"))),
    (2, "no data set", Way((*SHORT, "--dataset_base_path", "dat"), "--dataset 1: --dataset_base_path: dat does")),
    (3, "output in use by a run", Way(SHORT, "out: already contains a run", first=(SHORT,))),
    *((3, f"the user's {name}", Way(words, f"out: contains {name}, which no", prepare=written(f"out/{name}", "mine")))
      for name, words in (("logs/config.json", SHORT), ("logs/loss.csv", SHORT),
                          ("run.json", (*SHORT, "--overwrite")))),
    (3, "no state to go on from", Way((*LONGER, "--resume"), "out: ", first=(SHORT,), prepare=without("out/states"))),
    (3, "another run's state", Way((*LONGER, "--seed", "9"), "--resume: ", first=(SHORT,))),
    (3, "damaged states", Way(LONGER, "out", first=(SHORT,),
                              prepare=damaged("out/**/*.safetensors"))),
    (3, "no feature cache", Way(STAGE_2, "cache: ")),
    (3, "another plan", Way((*STAGE_2, "--max_pixels", "99999"), "cache: contains no plan", first=(STAGE_1,))),
    (3, "a damaged store", Way(STAGE_2, "cache", first=(STAGE_1,), prepare=damaged("cache/shards/*.safetensors"))),
    (3, "a LoRA that does not fit", Way((*GENERATE, "--lora", "model/vae/model-1-of-1.safetensors"), "model/vae/")),
    (4, "output below a file", Way((*SHORT, "--output_path", "a.txt/out"), "a.txt", prepare=written("a.txt", "mine"))),
    (4, "a file as output", Way((*SHORT, "--output_path", "a.txt"), "a.txt: is a file",
                                prepare=written("a.txt", "mine"))),
    (4, "store below a file", Way((*STAGE_1, "--feature_cache", "a.txt/c"), "a.txt", prepare=written("a.txt", "mine"))),
    (4, "disk full", Way(SHORT, "", prepare=at("dstrain.storage.files.os.fsync", FULL))),
    (4, "a data loader's process ends", Way((*SHORT, "--dataset_num_workers", "1"), "data loader: ",
                                            prepare=at("dstrain.training.loader.load_cell", SystemExit(9)))),
    (5, "learning rate", Way((*TRAIN, "--learning_rate", "1e30"), "step 2: loss")),
    (5, "learning rate, from the cache", Way(
        (*TRAIN, *STORE, "sft:train", "--learning_rate", "1e30"), "step 2: loss", first=(STAGE_1,))),
    (5, "weights of the denoiser", Way(TRAIN_FILES, "step 1: loss nan",
                                       prepare=spoiled("model/transformer/*.safetensors", 1e38))),
    (3, "weights that are no numbers", Way(TRAIN_FILES, "step 1: its loss is not finite: the weights of vae in",
                                           prepare=spoiled("model/vae/*.safetensors", float("nan")))),
    (6, "the device's memory in a step", Way(
        SHORT, "step 1: out of memory", prepare=at_forward(raising(torch.OutOfMemoryError("CUDA out of memory"))))),
    (6, "the machine's memory in a step", Way(SHORT, "step 1: out of memory", prepare=at_forward(allocate))),
    (6, "memory in stage 1", Way(STAGE_1, "", prepare=at("tests.support.family.Vae.__init__", MemoryError()))),
    (6, "memory while it loads", Way(
        SHORT, "", prepare=at("tests.support.family.Dit.__init__", torch.OutOfMemoryError("CUDA out of memory")))),
    (6, "memory in inference", Way(GENERATE, "",
                                   prepare=at("dstrain.pipeline.pipeline.Pipeline.sample", MemoryError()))),
    (75, "SIGTERM in training", Way(TRAIN, "out: interrupted after step 1",
                                    prepare=at_forward(lambda: os.kill(os.getpid(), signal.SIGTERM)))),
    (75, "SIGINT in training", Way(TRAIN, "out: interrupted after step 1",
                                   prepare=at_forward(lambda: os.kill(os.getpid(), signal.SIGINT)))),
    (75, "Ctrl-C while it loads", Way(SHORT, "", prepare=at("tests.support.family.Dit.__init__", KeyboardInterrupt()))),
    (75, "Ctrl-C in stage 1", Way(STAGE_1, "", prepare=at("dstrain.training.loader.load_cell", KeyboardInterrupt()))),
    (75, "Ctrl-C in inference", Way(GENERATE, "", prepare=at(WRITE, KeyboardInterrupt()))),
)  # fmt: skip


@pytest.fixture
def here(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and a dataset; it is the working directory."""
    project(tmp_path / "here")
    for path in (tmp_path / "here/model").glob("*/model-*"):
        assert path.is_file()
    for name in (
        "config.yaml",
        "model.safetensors",
        "previews/cat.png",
        "states/of-mind/record.json",
    ):
        (tmp_path / "here/out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here/out" / name).write_text("mine")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def digests(here: Path) -> dict[str, str]:
    """Everything that is the user's: dataset, model, files beside them, and in the
    output folder what says so.
    """
    files = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    ours = ("out", "cache", "x.png")
    mine = (
        path
        for path in files
        if path.relative_to(here).parts[0] not in ours or files[path] == b"mine"
    )
    return {str(path): hashlib.sha256(files[path]).hexdigest() for path in mine}


@pytest.mark.parametrize(
    ("code", "way"),
    [(code, way) for code, _, way in WAYS],
    ids=[f"{c} {n}" for c, n, _ in WAYS],
)
def test_a_way_to_each_exit_code(
    code: int,
    way: Way,
    here: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for words in way.first:
        assert main(words) == 0
    if way.prepare is not None:
        way.prepare(here, monkeypatch)
    before = digests(here)
    capfd.readouterr()
    assert main(way.words) == code
    printed = capfd.readouterr()
    assert "Traceback" not in printed.out + printed.err
    errors = [
        line for line in printed.err.splitlines() if line.startswith("dstrain: error: ")
    ]
    assert len(errors) == (code != 0), printed.err
    assert not errors or errors[0].startswith(f"dstrain: error: {way.said}"), errors
    assert code != 2 or printed.err.startswith("dstrain: error: ")
    assert digests(here) == before


def test_every_code_is_produced_in_three_ways_at_least() -> None:
    counts = {
        code: sum(one == code for one, _, _ in WAYS)
        for code in (0, 1, 2, 3, 4, 5, 6, 75)
    }
    assert min(counts.values()) >= 3 and set(counts) == {code for code, _, _ in WAYS}


def start(
    here: Path, tiny: Path, *words: str, **settings: Any
) -> "subprocess.Popen[str]":
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tiny), str(ROOT)])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings}
    return subprocess.Popen(
        [sys.executable, "-m", "dstrain", *words], cwd=here, env=env, text=True, **pipes
    )


def test_a_signal_from_outside_ends_a_run_where_it_can_resume(
    here: Path, tiny: Path
) -> None:
    child = start(
        here, tiny, *TRAIN, "--num_epochs", "100000", "--save_steps", "1000000"
    )
    log = here / "out/logs/loss.csv"
    while child.poll() is None and not (
        log.exists() and log.read_text().count("\n") > 2
    ):
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 75, said
    assert (
        "Traceback" not in said
        and "dstrain: error: out: interrupted after step " in said
    )


def test_a_reader_that_goes_away_is_no_error(here: Path, tiny: Path) -> None:
    for words in (MODELS, ("graph", "--model", "tiny")):
        read, write = os.pipe()
        os.close(read)
        child = start(here, tiny, *words, stdout=write)
        os.close(write)
        assert (child.communicate(timeout=60)[1], child.returncode) == ("", 0)


def test_output_that_cannot_be_written_is_an_error_of_the_system(
    here: Path, tiny: Path
) -> None:
    with open("/dev/full", "w") as full:
        child = start(here, tiny, *MODELS, stdout=full)
        said = child.communicate(timeout=60)[1]
    assert (child.returncode, said) == (
        4,
        "dstrain: error: standard output: No space left on device\n",
    )


def test_without_standard_output_a_command_still_ends_well(
    here: Path, tiny: Path
) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tiny), str(ROOT)])}
    done = subprocess.run(["sh", "-c", f"exec {sys.executable} -m dstrain {' '.join(MODELS)} >&-"], cwd=here, env=env,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.toml"], "for a file of options use --config run.toml"),
        (
            ["--model", "tiny", "--dataset_base_path", "a", "b"],
            "repeat --dataset_base_path for each folder",
        ),
    ],
)
def test_words_that_are_no_command_are_told_their_option(
    tiny: object, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err
