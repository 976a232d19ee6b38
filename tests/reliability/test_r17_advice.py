"""R17: every advice that a message gives works when it is typed."""

import importlib
import json
import re
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from dstrain import SystemFault
from dstrain.cli.main import main
from dstrain.runs.checkpoints import outputs
from dstrain.storage.temporaries import set_aside
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.family import PIPELINES, Prompt, encode_prompt
from tests.support.processes import commands, in_processes
from tests.support.runs import project
from tests.support.videos import film, steady

pytestmark = [
    pytest.mark.promise("R17", "every advice works when typed"),
    pytest.mark.usefixtures("tiny"),
]

TOY = ("--model", "tiny", "--toy", "--dataset_base_path", "data")
LORA = (*TOY, "--lora_rank", "2", "--output_path", "out")
SHORT = (*LORA, "--max_steps", "2", "--save_steps", "1")
CACHE = (*LORA, "--feature_cache", "cache", "--max_steps", "1")
STAGE_1 = (*CACHE, "--task", "sft:data_process")
STAGE_2 = (*CACHE, "--task", "sft:train")
FILES = (
    "--model", "tiny", "--dataset_base_path", "data", "--lora_rank", "2", "--output_path", "out", "--max_steps", "1",
    "--model_paths", '[["model/transformer/model-1-of-2.safetensors", "model/transformer/model-2-of-2.safetensors"], '
    '"model/text_encoder/model-1-of-1.safetensors", "model/vae/model-1-of-1.safetensors"]',
    "--feature_cache", "cache",
)  # fmt: skip
"""Both stages, of model files."""
Words = tuple[str, ...]
Patch = Callable[[pytest.MonkeyPatch], None]


def nothing(*_: Any) -> None:
    """Change nothing."""


@dataclass(frozen=True)
class Case:
    """A message and what it advises.

    words: the command that ends with the message, and `code` as its exit code.
    first: commands that run before it.
    prepare: what happens to the files in between.
    patch: what goes wrong while the command runs.
    advice: a pattern that finds the advice in what is printed. Its group is either a
        whole command or the flag to add to the one that was typed.
    instead: the flag that the advice replaces, with its value.
    value: the value of the flag to add.
    mend: what else the message asks for, done before the advice is typed.
    """

    name: str
    words: Words
    advice: str
    code: int = 3
    first: tuple[Words, ...] = ()
    prepare: Callable[[], Any] = nothing
    patch: Patch = nothing
    instead: Words = ()
    value: Words = ()
    mend: Callable[[], Any] = nothing


def remove(pattern: str) -> Callable[[], None]:
    def act() -> None:
        found = list(Path().glob(pattern))
        assert found
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return act


def damage(pattern: str, at: int = -2) -> Callable[[], None]:
    def act() -> None:
        found = list(Path().glob(pattern))
        assert found
        for path in found:
            content = bytearray(path.read_bytes())
            content[at] ^= 1
            path.write_bytes(content)

    return act


def caption() -> None:
    rows = json.loads(Path("data/metadata.json").read_text())
    rows[0]["prompt"] = "another"
    Path("data/metadata.json").write_text(json.dumps(rows))


def raising(place: str, error: BaseException, after: int = 0) -> Patch:
    """Raise an error in a function, after so many calls."""

    def act(patch: pytest.MonkeyPatch) -> None:
        module, _, name = place.rpartition(".")
        real = getattr(importlib.import_module(module), name)
        calls = iter(range(1000))
        fails = Mock(
            side_effect=lambda *a, **k: (
                real(*a, **k) if next(calls) < after else (_ for _ in ()).throw(error)
            )
        )
        patch.setattr(place, fails)

    return act


def full(place: str, after: int = 0) -> Patch:
    """Fill the disk in a function, after so many calls."""
    what = "cannot be written: No space left on device"
    return raising(place, SystemFault("file", what), after)


def without_alpha() -> None:
    save_file(load_file("out/step-1.safetensors"), "lost file.safetensors")


def with_more_layers() -> None:
    """Add a layer that no model has to the run's LoRA."""
    tensors = load_file("out/step-1.safetensors")
    with safe_open("out/step-1.safetensors", framework="pt") as file:
        header = file.metadata()
    more = {
        key.replace("to_q", "k_img"): value.clone()
        for key, value in tensors.items()
        if "to_q" in key
    }
    assert more
    header.pop("dstrain.sha256")
    save_file({**tensors, **more}, "more layers.safetensors", header)


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
RUN = r"run: (.+)"
EXPORT = ("export", "--format", "comfyui", "--model", "tiny")
STEP = "dstrain.runs.loop.update"
ONE_STEP = ("--num_inference_steps", "1", "--prompt", "a", "--output", "x.png")
GENERATE = ("generate", *TOY[:3], *ONE_STEP)

CASES = (
    Case("the end of stage 1", STAGE_1, RUN, 0),
    Case("the end of stage 1, as DiffSynth-Studio spells it", (*LORA, "--task", "sft:data_process"), RUN, 0),
    Case("the end of a run", SHORT, "try them: (.+)", 0),
    Case("no cache", STAGE_2, RUN),
    Case("no marker", STAGE_2, RUN, first=(STAGE_1,), prepare=remove("cache/store.json")),
    Case("a damaged marker", STAGE_2, RUN, first=(STAGE_1,),
         prepare=lambda: Path("cache/store.json").write_text("{"), mend=remove("cache/store.json")),
    Case("a damaged shard", STAGE_2, RUN, first=(STAGE_1,), prepare=damage("cache/shards/*", 20),
         mend=remove("cache/shards/*")),
    Case("a damaged plan", STAGE_2, RUN, first=(STAGE_1,), prepare=damage("cache/plans/*"),
         mend=remove("cache/plans/*")),
    Case("shards that are gone", STAGE_2, RUN, first=(STAGE_1,), prepare=remove("cache/shards/*")),
    Case("a damaged shard, removed", ("cache", "verify", "cache", "--repair"), "again, run in .*: (dstrain.+)",
         first=(STAGE_1,), prepare=damage("cache/shards/*", 20)),
    Case("another plan", (*STAGE_2, "--max_pixels", "99999"), RUN, first=(STAGE_1,)),
    Case("another plan, checked", (*STAGE_2, "--max_pixels", "99999", "--dry_run", "--device_memory", "24"), RUN,
         first=(STAGE_1,)),
    Case("a changed caption", STAGE_2, RUN, first=(STAGE_1,), prepare=caption),
    Case("a changed caption to start over elsewhere", (*SHORT, "--resume", "--max_steps", "3"),
         "give another (--output_path) in place", first=(SHORT,), prepare=caption, instead=("--resume",),
         value=("else",)),
    Case("a preview that stage 1 did not see", (*STAGE_2, "--preview_prompt", "-a 'dog'"), RUN, first=(STAGE_1,)),
    Case("a run that is there", SHORT, "resume it with (--resume)", first=(SHORT,)),
    Case("a run to start over", SHORT, "start over with (--overwrite)", first=(SHORT,)),
    Case("a run elsewhere", SHORT, "give another (--output_path)", first=(SHORT,), value=("else",)),
    Case("a file that no run wrote", SHORT, "give another (--output_path)", value=("else",),
         prepare=lambda: (Path("out").mkdir(), Path("out/step-1.safetensors").touch())),
    Case("states that are gone", (*SHORT, "--resume"), "with (--overwrite) in place of --resume",
         first=(SHORT,), prepare=remove("out/states"), instead=("--resume",)),
    Case("states that are damaged", (*SHORT, "--resume"), "with (--overwrite) in place of --resume",
         first=(SHORT,), prepare=damage("out/states/*/*"), instead=("--resume",)),
    Case("weights that are gone", ("generate", "--run", "out", "--prompt", "a", "--output", "x.png"), RUN,
         first=(SHORT,), prepare=remove("out/*.safetensors")),
    Case("a full disk while saving", SHORT, "same command with (--resume)", 4,
         patch=full("dstrain.runs.checkpoints.outputs.save_state", 1)),
    Case("a full disk at the first save", SHORT, "same command with (--resume)", 4,
         patch=full("dstrain.runs.checkpoints.component_weights.save_lora_for")),
    Case("a full disk in stage 1", STAGE_1, "run the same command (again)", 4,
         patch=full("dstrain.cache.store.write_shard")),
    Case("Ctrl-C before the first step", SHORT, "run the same command (again)", 75,
         patch=raising("dstrain.runs.start_training.prepare", KeyboardInterrupt())),
    Case("Ctrl-C before the first save", LORA, "same command with (--resume)", 75,
         patch=raising(STEP, KeyboardInterrupt(), 2)),
    Case("Ctrl-C after a save", SHORT, "same command with (--resume)", 75,
         patch=raising(STEP, KeyboardInterrupt(), 1)),
    Case("Ctrl-C after a save while overwriting", (*SHORT, "--overwrite"),
         "same command with (--resume) instead of --overwrite", 75, instead=("--overwrite",),
         patch=raising(STEP, KeyboardInterrupt(), 1)),
    Case("Ctrl-C in stage 1", STAGE_1, "run the same command (again)", 75,
         patch=raising("dstrain.runs.stage_1.precompute.compute", KeyboardInterrupt())),
    Case("both stages, an encoder gone", (*FILES, "--overwrite"), "with (--task sft:train)", first=(FILES,),
         prepare=remove("model/text_encoder")),
    Case("both stages without a dataset", ("--model", "tiny", "--toy", "--feature_cache", "cache", "--lora_rank", "2",
         "--output_path", "next"), "give (--task sft:train)", 2, first=(CACHE,)),
    Case("both stages, a damaged shard", CACHE, RUN, first=(STAGE_1,), prepare=damage("cache/shards/*", 20),
         mend=remove("cache/shards/*")),
    Case("both stages, a damaged plan", CACHE, RUN, first=(STAGE_1,), prepare=damage("cache/plans/*"),
         mend=remove("cache/plans/*")),
    Case("both stages, a full disk in the first", CACHE, "run the same command (again)", 4,
         patch=full("dstrain.cache.store.write_shard")),
    Case("both stages, Ctrl-C in the first", CACHE, "run the same command (again)", 75,
         patch=raising("dstrain.runs.stage_1.precompute.compute", KeyboardInterrupt())),
    Case("both stages, Ctrl-C between them", CACHE, "run the same command (again)", 75,
         patch=raising("dstrain.runs.start_training.prepare", KeyboardInterrupt())),
    Case("both stages, Ctrl-C after a save", (*CACHE, "--max_steps", "2", "--save_steps", "1"),
         "same command with (--resume)", 75, patch=raising(STEP, KeyboardInterrupt(), 1)),
    Case("Ctrl-C while generating", GENERATE, "run the same command (again)", 75,
         patch=raising("dstrain.generation.run.open_source", KeyboardInterrupt())),
    Case("no memory to load", SHORT, "or give (--use_gradient_checkpointing)", 6,
         patch=raising("dstrain.runs.start_training.prepare", NO_MEMORY)),
    Case("a LoRA without alpha", (*EXPORT, "lost file.safetensors", "x.safetensors"), "is named: (.+)",
         first=(SHORT,), prepare=without_alpha, instead=("lost file.safetensors",)),
    Case("a LoRA without alpha to generate with", (*GENERATE, "--lora", "lost file.safetensors"), "is named: (.+)",
         first=(SHORT,), prepare=without_alpha, instead=("lost file.safetensors",)),
    Case("a LoRA with layers that the model lacks", (*GENERATE, "--lora", "more layers.safetensors"),
         "lacks, give (.+)", first=(SHORT,), prepare=with_more_layers, instead=("more layers.safetensors",)),
    Case("a folder to export", (*EXPORT, "out", "x.safetensors"), r"give a file in it: (\S+/step-1\.safetensors)", 2,
         first=(SHORT,), instead=("out",), value=()),
    Case("a warm-up that has no effect", (*SHORT, "--lr_warmup_steps", "2"),
         "use (--lr_scheduler constant_with_warmup)", 2),
    Case("a misspelt flag", ("--hlep",), "did you mean '(--help)'", 2, instead=("--hlep",)),
)  # fmt: skip


def follow(case: Case, said: str) -> Words:
    found = re.search(case.advice, said)
    assert found, said
    words = tuple(shlex.split(found[1]))
    if words[0] == "dstrain":
        return words[1:]
    if case.instead and not words[0].startswith("--"):
        return tuple(words[0] if one in case.instead else one for one in case.words)
    typed = tuple(word for word in case.words if word not in case.instead)
    if words == ("again",):
        return typed
    return (*typed, *words, *case.value)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_what_a_message_advises_works(
    case: Case,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    project(tmp_path)
    monkeypatch.chdir(tmp_path)
    for words in case.first:
        assert main(words) == 0
    case.prepare()
    capfd.readouterr()
    with monkeypatch.context() as patch:
        case.patch(patch)
        code = main(case.words)
    said = capfd.readouterr().err
    assert code == case.code, said
    case.mend()
    advised = follow(case, said)
    code = main(advised)
    assert code == 0, (said, advised, capfd.readouterr().err)


def encode_in_mood(
    prompt: str, mood: str, *, text_encoder: Any, tokenizer: Any
) -> Prompt:
    text = f"{mood} {prompt}"
    return encode_prompt(text, text_encoder=text_encoder, tokenizer=tokenizer)


def test_the_end_of_a_run_names_the_inputs_that_its_variant_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    other = PIPELINES["other"]
    moody = replace(other, units=(encode_in_mood, *other.units[1:]))
    monkeypatch.setitem(PIPELINES, "other", moody)
    project(tmp_path)
    monkeypatch.chdir(tmp_path)
    rows = json.loads(Path("data/metadata.json").read_text())
    rows = [{**row, "mood": "calm"} for row in rows]
    Path("data/metadata.json").write_text(json.dumps(rows))
    case = Case("its words", (*SHORT, "--variant", "other"), "try them: (.+)")
    assert main(case.words) == 0
    advised = follow(case, capfd.readouterr().err)
    assert "mood=..." in advised
    assert main(advised) == 0


@pytest.mark.parametrize(
    ("family", "variant"),
    (
        ("wan", "t2v"),
        ("wan", "i2v"),
        ("qwen_image", "base"),
        ("sdxl", "base"),
        ("z_image", "omni"),
        ("flux2", "klein"),
    ),
)
def test_a_toy_is_used_as_the_command_that_writes_it_says(
    family: str,
    variant: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    toy = ["toy", "--model", family, "--variant", variant, "--output", "toy"]
    assert main(toy) == 0
    advised = shlex.split(capsys.readouterr().out.partition("use it with ")[2])
    Path("data").mkdir()
    if family == "wan":
        film(Path("data/a.mp4"), steady(9, 16))
    else:
        Image.new("RGB", (16, 16)).save("data/a.png")
    Path("data/a.txt").write_text("x")
    run = ["--dataset_base_path", "data", "--lora_rank", "2", "--output_path", "out"]
    assert main(["graph", *advised, *run]) == 0
    assert capsys.readouterr().out.startswith(f"{family} {variant}, task")


def delayed_restore(rank: int) -> None:
    """Let the main process take its time before it puts back what a dead run left."""
    real = outputs.check_way

    def restore(folder: Path) -> None:
        if rank == 0:
            time.sleep(1)
        real(folder)

    outputs.check_way = restore


@pytest.mark.parametrize("left", ["nothing", "no state", "a state", "a replaced state"])
def test_one_command_of_a_job_script_serves_behind_a_launcher(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(tmp_path)
    monkeypatch.chdir(tmp_path)
    if left == "no state":
        with monkeypatch.context() as patch:
            full("dstrain.runs.checkpoints.component_weights.save_lora_for")(patch)
            assert main(SHORT) == 4
    elif left != "nothing":
        first = [*LORA, "--max_steps", "1"]
        assert in_processes(2, commands(first), tmp_path).codes == (0, 0)
    if left == "a replaced state":
        # As a process leaves it that dies while it saves the step again.
        state = Path("out/states/step-1")
        state.rename(set_aside(state))

    def work(rank: int) -> int:
        delayed_restore(rank)
        return commands([*SHORT, "--resume"])(rank)

    for _ in range(2):
        ended = in_processes(2, work, tmp_path)
        assert ended.codes == (0, 0), ended.said
    assert Path("out/states/step-2/record.json").is_file()
