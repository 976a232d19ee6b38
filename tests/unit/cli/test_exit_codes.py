"""Every exit code, in several ways each; one line says where, and users' files stay."""

import hashlib
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain.cli.main import main
from dstrain.installed import installed
from dstrain.models.device import ATTENTION
from safetensors.torch import load_file, save_file

from tests.support import ROOT
from tests.support.runs import project

MODEL = "--model tiny --toy --dataset_base_path data --lora_rank 2"
TRAIN = f"{MODEL} --output_path out"
SHORT = f"{TRAIN} --max_steps 1"
LONGER = f"{TRAIN} --max_steps 2 --resume"
STORE = "--feature_cache cache --task"
STAGE_1 = f"{MODEL} {STORE} sft:data_process"
STAGE_2 = f"{SHORT} {STORE} sft:train"
WORKER = f"{SHORT} --dataset_num_workers 1"
FILES = [
    [f"model/transformer/model-{i}-of-2.safetensors" for i in (1, 2)],
    *(f"model/{name}/model-1-of-1.safetensors" for name in ("text_encoder", "vae")),
]
TRAIN_FILES = (
    f"--model tiny --model_paths {json.dumps(FILES, separators=(',', ':'))} --tokenizer_path model/tokenizer "
    "--dataset_base_path data --output_path out --max_steps 2 --lora_rank 2"
)
MODELS = " -p no:".join(["models", *(one.name for one in installed()[1:])])
"""Of one family: the import of each takes a process."""
GENERATE = (
    "generate --model tiny --toy --prompt dog --output x.png --num_inference_steps 1"
)
Prepare = Callable[[Path, pytest.MonkeyPatch], object]


@dataclass(frozen=True)
class Way:
    """A command line after `first` and `prepare`; its error begins with `place`."""

    words: str
    place: str = ""
    prepare: Prepare | None = None
    first: tuple[str, ...] = ()


def written(name: str, text: str = "mine") -> Prepare:
    def prepare(here: Path, patch: pytest.MonkeyPatch) -> None:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)

    return prepare


def spoiled(pattern: str, value: float) -> Prepare:
    """Put a number into every weight of some files."""

    def spoil(here: Path, patch: pytest.MonkeyPatch) -> None:
        for path in here.glob(pattern):
            weights = load_file(path).items()
            save_file(
                {name: torch.full_like(one, value) for name, one in weights}, path
            )

    return spoil


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


def before(place: str, body: Callable[[], object]) -> Prepare:
    """Do something before each call of what stands at a dotted place."""

    def prepare(here: Path, patch: pytest.MonkeyPatch) -> None:
        real = pkgutil.resolve_name(place)
        patch.setattr(place, lambda *given, **named: (body(), real(*given, **named))[1])

    return prepare


def at(place: str, error: BaseException) -> Prepare:
    def body() -> None:
        raise error

    return before(place, body)


STEP = "dstrain.TrainingModule.forward"
LOAD = "tests.support.family.Dit.__init__"
ENCODE = "tests.support.family.Vae.__init__"
SAMPLE = "dstrain.Sample.__init__"
INFER = "dstrain.Pipeline.sample"
FULL = OSError(28, "No space left on device")
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
INTERRUPT = KeyboardInterrupt()
VAE_FILE = "model/vae/model-1-of-1.safetensors"
WAYS: tuple[tuple[int, str, Way], ...] = (
    (0, "help", Way("--help")),
    (0, "models", Way(MODELS)),
    (0, "a plan", Way(f"{TRAIN} --dry_run")),
    (0, "a run", Way(SHORT)),
    (0, "a run that is over", Way(f"{SHORT} --resume", first=(SHORT,))),
    (0, "stage 1 again", Way(STAGE_1, first=(STAGE_1,))),
    (0, "an image", Way(GENERATE)),
    (1, "a defect in a step", Way(SHORT, "", before(STEP, lambda: {}["deep\ninside"]))),
    (1, "a defect while it loads", Way(SHORT, "", at(LOAD, KeyError("deep")))),
    (1, "a defect of a sampler", Way(GENERATE, f"{__file__}:", at(INFER, RuntimeError("deep")))),
    (1, "a defect in a data loader's process", Way(
        WORKER, "data loader: ValueError: deep", at(SAMPLE, ValueError("deep")))),
    (2, "unknown task", Way(f"{SHORT} --task sfr", "--task: ")),
    (2, "unknown component", Way(f"{SHORT} --lora_base_model ditt", "--lora_base_model: ")),
    (2, "file of flags", Way(f"--config a.toml {SHORT}", "a.toml:sed: ", written("a.toml", "sed = 1"))),
    (2, "no such image", Way(SHORT, "data/metadata.json: ", lambda here, patch: (here / "data/0.png").unlink())),
    (2, "no data set", Way(f"{SHORT} --dataset_base_path dat", "--dataset 1: --dataset_base_path: ")),
    (2, "no such table", Way(f"{SHORT} --dataset_metadata_path a.csv", "a.csv: no such metadata file; give its path")),
    (3, "no run to use", Way("generate --run no --prompt a --output x.png",
                             "no: is not the output folder of a run: it does not exist; name its")),
    (3, "output in use by a run", Way(SHORT, "out: ", first=(SHORT,))),
    (3, "the user's logs/config.json", Way(SHORT, "out: contains logs/config.json", written("out/logs/config.json"))),
    (3, "the user's logs/loss.csv", Way(SHORT, "out: contains logs/loss.csv", written("out/logs/loss.csv"))),
    (3, "the user's run.json", Way(f"{SHORT} --overwrite", "out: contains run.json", written("out/run.json"))),
    (3, "no state to go on from", Way(
        LONGER, "out: ", lambda here, patch: shutil.rmtree(here / "out/states"), (SHORT,))),
    (3, "another run's state", Way(f"{LONGER} --seed 9", "--resume: ", first=(SHORT,))),
    (3, "damaged states", Way(LONGER, "out", damaged("out/**/*.safetensors"), (SHORT,))),
    (3, "no feature cache", Way(STAGE_2, "cache: ")),
    (3, "another plan", Way(f"{STAGE_2} --max_pixels 99999", "cache: ", first=(STAGE_1,))),
    (3, "a damaged store", Way(STAGE_2, "cache", damaged("cache/shards/*.safetensors"), (STAGE_1,))),
    (3, "a LoRA that does not fit", Way(f"{GENERATE} --lora {VAE_FILE}", "model/vae/")),
    (3, "weights that are no numbers", Way(
        TRAIN_FILES, "step 1: ", spoiled("model/vae/*.safetensors", float("nan")))),
    (4, "output below a file", Way(f"{SHORT} --output_path a.txt/out", "a.txt", written("a.txt"))),
    (4, "a file as output", Way(f"{SHORT} --output_path a.txt", "a.txt: ", written("a.txt"))),
    (4, "store below a file", Way(f"{STAGE_1} --feature_cache a.txt/c", "a.txt", written("a.txt"))),
    (4, "a file that a family cannot read", Way(GENERATE, "x/y: ", at(INFER, OSError(5, "no", "x/y")))),
    (4, "disk full", Way(SHORT, "", at("os.fsync", FULL))),
    (4, "a data loader's process ends", Way(WORKER, "data loader: ", at(SAMPLE, SystemExit(9)))),
    (5, "learning rate", Way(f"{TRAIN} --learning_rate 1e30", "step 2: ")),
    (5, "learning rate, from the cache", Way(
        f"{TRAIN} {STORE} sft:train --learning_rate 1e30", "step 2: ", first=(STAGE_1,))),
    (5, "weights of the denoiser", Way(TRAIN_FILES, "step 1: ", spoiled("model/transformer/*.safetensors", 1e38))),
    (6, "the device's memory in a step", Way(SHORT, "step 1: ", at(STEP, NO_MEMORY))),
    (6, "the machine's memory in a step", Way(SHORT, "step 1: ", before(STEP, lambda: torch.empty(2**50)))),
    (6, "memory in stage 1", Way(STAGE_1, "", at(ENCODE, MemoryError()))),
    (6, "memory while it loads", Way(SHORT, "", at(LOAD, NO_MEMORY))),
    (6, "memory in inference", Way(GENERATE, "", at(INFER, MemoryError()))),
    (75, "SIGTERM in training", Way(TRAIN, "out: ", before(STEP, lambda: signal.raise_signal(signal.SIGTERM)))),
    (75, "SIGINT in training", Way(TRAIN, "out: ", before(STEP, lambda: signal.raise_signal(signal.SIGINT)))),
    (75, "Ctrl-C while it loads", Way(SHORT, "", at(LOAD, INTERRUPT))),
    (75, "Ctrl-C in stage 1", Way(STAGE_1, "", at(SAMPLE, INTERRUPT))),
    (75, "Ctrl-C in inference", Way(GENERATE, "", at(INFER, INTERRUPT))),
)  # fmt: skip


@pytest.fixture
def here(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, a dataset and the user's files; it is the working directory."""
    folder = project(tmp_path / "here")
    for name in (
        "config.yaml",
        "a.safetensors",
        "previews/a.png",
        "states/a/record.json",
    ):
        written(f"out/{name}")(folder, monkeypatch)
    monkeypatch.chdir(folder)
    return folder


def digests(here: Path) -> dict[str, str]:
    """Everything that is the user's, in the output folder what says so."""
    found = {}
    for path in here.rglob("*"):
        place = path.relative_to(here)
        content = path.read_bytes() if path.is_file() else b""
        if place.parts[0] not in ("out", "cache", "x.png") or content == b"mine":
            found[str(place)] = hashlib.sha256(content).hexdigest()
    return found


@pytest.mark.parametrize(
    ("code", "way"),
    [(code, way) for code, _, way in WAYS],
    ids=[f"{code} {name}" for code, name, _ in WAYS],
)
def test_a_way_to_each_exit_code(
    code: int,
    way: Way,
    here: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for words in way.first:
        assert main(words.split()) == 0
    if way.prepare is not None:
        way.prepare(here, monkeypatch)
    kept = digests(here)
    capfd.readouterr()
    assert main(way.words.split()) == code
    printed = capfd.readouterr()
    assert "Traceback" not in printed.out + printed.err
    lines = printed.err.splitlines()
    errors = [line for line in lines if line.startswith("dstrain: error: ")]
    assert len(errors) == (code != 0), printed.err
    assert not errors or errors[0].startswith(f"dstrain: error: {way.place}"), errors
    assert code != 2 or printed.err.startswith("dstrain: error: ")
    assert digests(here) == kept


def test_tracebacks_need_debug(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    at(LOAD, ValueError("deep inside"))(here, monkeypatch)
    assert main([*SHORT.split(), "--debug"]) == 1
    said = capfd.readouterr().err
    assert "ValueError: deep inside" in said
    assert "Traceback" in said


@pytest.fixture
def start(here: Path, tiny: Path) -> Callable[..., "subprocess.Popen[str]"]:
    def started(words: str, **settings: Any) -> "subprocess.Popen[str]":
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tiny), str(ROOT)])}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings}
        command = [sys.executable, "-m", "dstrain", *words.split()]
        return subprocess.Popen(command, cwd=here, env=env, text=True, **pipes)

    return started


@pytest.mark.parametrize(
    ("name", "words"), [("flashy", SHORT), ("_native_xla", GENERATE), ("", GENERATE)]
)
def test_an_attention_that_is_not_here_is_refused_by_name(
    name: str, words: str, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is unknown, its library is not installed, or the variable is blank."""
    monkeypatch.setenv(ATTENTION, name)
    child = start(words)
    said = child.communicate()[1]
    assert child.returncode == 2
    assert said.startswith(f"dstrain: error: {ATTENTION}: {name!r}")


@pytest.mark.parametrize("words", [MODELS, "graph --model tiny"])
def test_a_reader_that_goes_away_is_no_error(
    words: str, start: Callable[..., Any]
) -> None:
    read, write = os.pipe()
    os.close(read)
    child = start(words, stdout=write)
    os.close(write)
    assert (child.communicate()[1], child.returncode) == ("", 0)


def test_output_that_cannot_be_written_is_an_error_of_the_system(
    start: Callable[..., Any],
) -> None:
    with open("/dev/full", "w") as full:
        child = start(MODELS, stdout=full)
        said = child.communicate()[1]
    assert child.returncode == 4
    assert said.startswith("dstrain: error: standard output: ")
    assert len(said.splitlines()) == 1


def test_without_standard_output_a_command_ends_well(start: Callable[..., Any]) -> None:
    child = start(MODELS, preexec_fn=lambda: os.close(1))
    assert (child.communicate()[1], child.returncode) == ("", 0)
