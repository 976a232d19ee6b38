"""Previews: the same images in both ways of training, and a training that is the same
with and without them.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dstrain import GenerateConfig, Interrupted, StateError, UsageError, generate
from dstrain.cache import FeatureCache
from dstrain.config import LoraFile, with_run_options
from dstrain.generation.pipeline_source import open_source
from dstrain.plugin.noise import diffusers_sampler
from dstrain.runs.resolve import resolve
from dstrain_memory import compilation
from PIL import Image
from torch import Tensor

from tests.support import family
from tests.support.family import weights_of
from tests.support.runs import (
    PowerCut,
    config,
    outcome,
    same,
    stop_at,
    train,
    train_in_two_stages,
)

pytestmark = pytest.mark.usefixtures("tiny")
TWO: dict[str, Any] = {"preview_prompt": ("a red dog", "cat"), "preview_at_start": True}


def made(folder: Path) -> dict[str, bytes]:
    paths = sorted((folder / "previews").glob("*.png"))
    return {path.name: path.read_bytes() for path in paths}


def pixels(path: Path) -> Any:
    with Image.open(path) as image:
        return np.asarray(image).astype(int)


def without_previews(folder: Path) -> dict[str, Any]:
    printed = outcome(folder)
    names = [name for name in printed["names"] if not name.startswith("previews")]
    return {**printed, "names": names}


def generated(here: Path, output: Path, **flags: Any) -> Any:
    """The pixels of an image that inference makes."""
    paths = json.dumps(list(weights_of(here / "model").values()))
    given: dict[str, Any] = {"model": "tiny", "variant": "base", "model_paths": paths}
    generate(GenerateConfig(**given, output=output, overwrite=True, **flags))
    return pixels(output)


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({"preview_steps": 2}, [0, 2, 4, 6]),
        ({"preview_steps": 4}, [0, 4]),
        ({}, [0, 6]),
        ({"save_steps": 3}, [0, 3, 6]),
        ({"save_steps": 4}, [0, 4, 6]),
    ],
)
def test_previews_are_made_at_the_start_and_every_so_many_steps_or_where_the_run_saves(
    flags: dict[str, Any], steps: list[int], here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, **TWO, **flags)
    assert list(made(tmp_path)) == [
        f"step-{step:06}-{number}.png" for step in steps for number in (0, 1)
    ]
    assert not list((tmp_path / "previews").glob(".*"))


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"use_gradient_checkpointing": True, "gradient_accumulation_steps": 2},
        {"mixed_precision": "bf16"},
        {"trainable_models": "text_encoder,dit.blocks.0"},
        {"dataset_num_workers": 1},
    ],
    ids=lambda flags: " ".join(flags) or "LoRA",
)
def test_training_is_the_same_with_and_without_previews(
    flags: dict[str, Any], dropping: Path, tmp_path: Path
) -> None:
    both = []
    for name, asked in (("with", TWO | {"preview_steps": 1}), ("without", {})):
        place = {"output_path": tmp_path / name, "max_steps": 4}
        both.append(without_previews(train(dropping, **place, **asked, **flags)))
    assert same(*both)
    assert len(made(tmp_path / "with")) == 10


@pytest.mark.parametrize(
    "flags",
    [{}, {"trainable_models": "text_encoder"}, {"trainable_models": "vae,dit"}],
    ids=["LoRA", "text_encoder", "vae and dit"],
)
def test_split_and_unsplit_previews_are_equal(
    flags: dict[str, Any], dropping: Path, tmp_path: Path
) -> None:
    asked = {**TWO, "preview_steps": 3, **flags}
    whole = train(dropping, output_path=tmp_path / "whole", **asked)
    split = train_in_two_stages(dropping, tmp_path, **asked)
    assert made(split) == made(whole) != {}
    # Training shows.
    assert len(set(made(whole).values())) == 6


def test_a_preview_is_what_inference_with_the_saved_weights_makes(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, seed=5, **TWO)
    trained = LoraFile(tmp_path / "epoch-0.safetensors")
    for name, loras in (("step-000000-0", ()), ("step-000006-0", (trained,))):
        given = {"prompt": "a red dog", "seed": 5, "lora": loras}
        wanted = generated(here, tmp_path / "wanted.png", **given)
        assert np.array_equal(wanted, pixels(tmp_path / f"previews/{name}.png"))


def test_previews_show_the_average_over_the_steps_and_leave_the_weights(
    here: Path, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"max_steps": 2, "save_steps": 1, **TWO}
    shown = train(here, output_path=tmp_path / "ema", ema_decay=0.9, **flags)
    plain = train(here, output_path=tmp_path / "plain", **flags)
    first, last = "step-000000-0.png", "step-000002-0.png"
    assert made(shown)[first] == made(plain)[first]
    assert made(shown)[last] != made(plain)[last]
    weights = [(out / "step-2.safetensors").read_bytes() for out in (shown, plain)]
    assert weights[0] == weights[1]
    average = LoraFile(shown / "step-2.ema.safetensors")
    given = {"prompt": TWO["preview_prompt"][0], "lora": (average,)}
    wanted = generated(here, tmp_path / "image.png", **given)
    assert np.array_equal(wanted, pixels(shown / "previews" / last))
    recorded = json.loads((shown / "previews/prompts.json").read_text())
    assert recorded["0"][0]["ema_decay"] == 0.9


ADAPTED: tuple[dict[str, Any], ...] = (
    {},
    {"task": "split"},
    {"blocks_to_swap": 1},
    {"fp8_models": "dit"},
    {"compile": True},
)
"""Runs on top of a training adapter."""


@pytest.mark.parametrize("flags", ADAPTED, ids=lambda flags: " ".join(flags))
def test_a_preset_for_training_only_is_in_no_preview_and_no_image_of_the_run(
    flags: dict[str, Any],
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Training is the same as with one for both, bit for bit, and may be resumed so."""
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    strong = {"lora_alpha": 64.0, "learning_rate": 0.3, "max_steps": 1}
    preset = train(here, output_path=tmp_path / "p", **strong) / "step-1.safetensors"
    flags = {"max_steps": 2, "save_steps": 1, **flags}
    outputs = {}
    for name, mark in (("both", ""), ("training", "@training_only")):
        flags["preset_lora_path"] = f"{preset}:0.5{mark}"
        given = {**flags, "output_path": tmp_path / name, **TWO}
        if flags.get("task"):
            place = {"feature_cache": tmp_path / "cache"}
            train(here, **{**given, **place, "task": "sft:data_process"})
            given |= {**place, "task": "sft:train"}
        capfd.readouterr()
        outputs[name] = train(here, **given)
        said = capfd.readouterr().err
        assert said.count(f"preset {preset}:0.5 merged into dit") == 1
        assert ("generated is without it" in said) == bool(mark)
    both, training = outputs.values()
    assert same(without_previews(both), without_previews(training))
    stored = {"fp8_models": flags.get("fp8_models")}
    for step in range(3):
        name = f"previews/step-{step:06}-0.png"
        trained = (LoraFile(training / f"step-{step}.safetensors"),) if step else ()
        given = {"prompt": TWO["preview_prompt"][0], "lora": trained, **stored}
        wanted = generated(here, tmp_path / "image.png", **given)
        off, far = (abs(wanted - pixels(one / name)) for one in (training, both))
        assert off.mean() < far.mean() / 3
        # The weights were rounded with it.
        assert off.max() <= 1 or stored["fp8_models"]
    for out, presets in ((both, ["dit"]), (training, [])):
        run = with_run_options(GenerateConfig(model="", run=out, output=out / "x.png"))
        with open_source(run, ["prompt"]) as source:
            assert list(source.presets) == presets
    if not flags.get("task"):
        train(here, output_path=both, resume="auto", **{**flags, "max_steps": 3})


@pytest.mark.parametrize("kind", ["lokr", "dora"])
def test_an_adapter_that_previews_cannot_leave_out_is_refused_with_previews(
    kind: str, here: Path, tmp_path: Path
) -> None:
    first = train(here, output_path=tmp_path / "p", lora_type=kind, max_steps=1)
    flags = {"preset_lora_path": f"{first / 'step-1.safetensors'}@training_only"}
    flags |= {"output_path": tmp_path / "out", "max_steps": 1}
    train(here, **flags)
    with pytest.raises(StateError, match=r"step-1\.safetensors"):
        train(here, overwrite=True, **flags, **TWO)


def test_stage_1_stores_prompts_under_the_keys_of_rows_and_a_changed_prompt_refills_no_row(
    here: Path, tmp_path: Path
) -> None:
    place = {"task": "sft:data_process", "feature_cache": tmp_path}
    train(here, **place)
    rows = set(FeatureCache.open(tmp_path))
    # Both are captions.
    train(here, **place, preview_prompt=("dog", "cat"))
    assert set(FeatureCache.open(tmp_path)) == rows
    train(here, **place, preview_prompt=("new",))
    assert len(set(FeatureCache.open(tmp_path)) - rows) == 2
    assert len(list((tmp_path / "plans").glob("*.json"))) == 1


@pytest.mark.parametrize(("of_run", "own"), [(None, ["sks", "x"]), ("sks", ["x"])])
def test_prompts_have_the_runs_trigger_word_or_that_of_the_first_dataset_with_one(
    of_run: str | None, own: list[str], here: Path
) -> None:
    base = str(here / "data")
    entries = [{"dataset_base_path": base, "trigger_word": word} for word in own]
    flags = {"trigger_word": of_run, "dataset": entries, "dataset_base_path": None}
    setup = resolve(config(here, preview_prompt="a [trigger] dog", **flags))
    assert [row.prompt for row in setup.prompt_rows] == ["a sks dog"]


def test_a_prompt_the_cache_lacks_is_refused_naming_the_flag_of_stage_1(
    here: Path, tmp_path: Path
) -> None:
    stage_1 = {"task": "sft:data_process", "feature_cache": tmp_path / "cache"}
    stage_2 = {"task": "sft:train", "feature_cache": tmp_path / "cache"}
    train(here, preview_prompt=("dog",), **stage_1)
    for dry_run in (False, True):
        with pytest.raises(StateError, match="--preview_prompt 'a bird'") as caught:
            prompts = ("dog", "a bird")
            train(here, preview_prompt=prompts, dry_run=dry_run, **stage_2)
        assert caught.value.exit_code == 3
        fill = caught.value.help_lines[-1]
        assert "--task sft:data_process" in fill and "--preview_prompt 'a bird'" in fill
    for shard in (tmp_path / "cache/shards").iterdir():
        shard.unlink()
    # The rows' values alone.
    train(here, **stage_1)
    with pytest.raises(StateError, match="--preview_prompt 'dog'"):
        train(here, preview_prompt=("dog",), **stage_2)


def test_stage_2_needs_a_decoder_for_previews_alone_and_no_encoder(
    here: Path, tmp_path: Path
) -> None:
    shutil.copytree(here / "model", tmp_path / "model")
    cache = {"feature_cache": tmp_path / "cache", "max_steps": 1}
    train(here, task="sft:data_process", **cache, **TWO)
    files = weights_of(tmp_path / "model")
    for name, needed, asked in (("a", ("dit", "vae"), TWO), ("b", ("dit",), {})):
        shutil.rmtree(tmp_path / "model" / {"a": "text_encoder", "b": "vae"}[name])
        paths = json.dumps([files[component] for component in needed])
        given = {"model_paths": paths, "output_path": tmp_path / name, **cache}
        out = train(here, task="sft:train", **given, **asked)
        assert (out / "previews").exists() == (name == "a")


def test_a_resumed_run_makes_the_previews_that_are_due_and_not_those_made_already(
    here: Path, tmp_path: Path
) -> None:
    asked = {**TWO, "preview_steps": 2, "save_steps": 2}
    whole = made(train(here, output_path=tmp_path / "whole", **asked))
    cut = tmp_path / "cut"

    def marks() -> dict[str, int]:
        paths = (cut / "previews").glob("*.png")
        return {path.name: path.stat().st_mtime_ns for path in paths}

    with pytest.raises(PowerCut):
        train(here, stop_at(5), output_path=cut, **asked)
    (cut / "previews/step-000004-1.png").unlink()
    before = marks()
    train(here, output_path=cut, resume="auto", **asked)
    assert made(cut) == whole
    assert before.items() < marks().items()
    before = marks()
    # Other prompts by these numbers.
    others = {**asked, "preview_prompt": ("new", "cat")}
    train(here, output_path=cut, resume="auto", **others)
    again = [name for name, mark in sorted(marks().items()) if before[name] != mark]
    assert again == ["step-000006-0.png", "step-000006-1.png"]
    for damaged in ("{", "[]"):
        (cut / "previews/prompts.json").write_text(damaged)
        train(here, output_path=cut, resume="auto", **others)
        assert [*json.loads((cut / "previews/prompts.json").read_text())] == ["6"]


def test_prompts_are_noted_by_the_step_from_which_they_hold_and_no_file_is_of_others(
    here: Path, tmp_path: Path
) -> None:
    def go(folder: str, steps: int, prompt: str, **flags: Any) -> Mapping[str, str]:
        given = {"preview_steps": 2, "save_steps": 2, "keep_checkpoints": 9, **flags}
        given |= {"output_path": tmp_path / folder, "max_steps": steps}
        given["preview_at_start"] = True
        out = train(here, preview_prompt=(prompt,), **given)
        noted = json.loads((out / "previews/prompts.json").read_bytes())
        return {step: previews[0]["prompt"] for step, previews in noted.items()}

    assert go("out", 4, "dog") == {"0": "dog"}
    assert go("dogs", 8, "dog") == {"0": "dog"}
    assert go("cats", 8, "cat") == {"0": "cat"}
    dogs, cats = made(tmp_path / "dogs"), made(tmp_path / "cats")
    late = [name for name in dogs if name >= "step-000004"]
    mixed = {**dogs, **{name: cats[name] for name in late}}
    for _ in range(2):
        assert go("out", 8, "cat", resume="auto") == {"0": "dog", "4": "cat"}
        assert made(tmp_path / "out") == mixed
    for step in (4, 6, 8):
        shutil.rmtree(tmp_path / f"out/states/step-{step}")
    # From step 2, before there were cats.
    assert go("out", 2, "dog", resume="auto") == {"0": "dog"}
    early = {name: dogs[name] for name in dogs if name not in late}
    assert made(tmp_path / "out") == early


@pytest.mark.parametrize(
    ("flags", "size"),
    [({}, (360, 720)), ({"max_pixels": 64 * 64}, (40, 88)), ({"toy": True}, (88, 176))],
)
def test_without_a_size_a_preview_has_the_variants_bounded(
    flags: dict[str, Any],
    size: tuple[int, int],
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defaults = {**family.BASE.defaults, "height": 1024, "width": 2048}
    spec = replace(family.BASE, defaults={**defaults, "num_inference_steps": 1})
    monkeypatch.setitem(family.PIPELINES, "base", spec)
    given = {"output_path": tmp_path, "max_steps": 1, "preview_steps": 5}
    train(here, **given, preview_prompt=("dog",), preview_at_start=True, **flags)
    assert pixels(tmp_path / "previews/step-000000-0.png").shape == (*size, 3)


def in_inference(act: Any) -> Any:
    """A pipeline that acts before each prediction of an image."""

    def predict(
        noisy_latents: Tensor,
        timestep: Tensor,
        prompt_emb: Tensor,
        prompt_mask: Tensor,
        *,
        dit: Any,
    ) -> Tensor:
        if not torch.is_grad_enabled():
            act()
        return family.predict(noisy_latents, timestep, prompt_emb, prompt_mask, dit=dit)

    return replace(family.BASE, model_fn=predict)


def test_a_preview_that_fails_is_a_warning_with_its_reason_and_training_continues(
    dropping: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[int] = []

    def fail_once() -> None:
        calls.append(1)
        # The second of two previews of four steps each.
        if len(calls) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    plain = train(dropping, output_path=tmp_path / "plain")
    monkeypatch.setitem(family.PIPELINES, "base", in_inference(fail_once))
    out = train(dropping, output_path=tmp_path / "out", preview_steps=2, **TWO)
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if line.startswith("dstrain: warning: ")]
    assert line.endswith(f" {out}/previews/step-000000-1.png: CUDA out of memory.")
    assert len(made(out)) == 7
    assert same(without_previews(out), without_previews(plain))


def test_a_run_that_is_asked_to_stop_leaves_its_previews_to_the_resumed_run(
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ask_to_stop: Callable[[], None],
) -> None:
    asked = {**TWO, "preview_steps": 2, "output_path": tmp_path / "cut"}
    whole = made(train(here, **{**asked, "output_path": tmp_path / "whole"}))
    calls: list[int] = []

    def ask() -> None:
        calls.append(1)
        # The second step of the first preview after the second step.
        if len(calls) == 10:
            ask_to_stop()

    with monkeypatch.context() as patch:
        patch.setitem(family.PIPELINES, "base", in_inference(ask))
        with pytest.raises(Interrupted):
            train(here, **asked)
    assert sorted(made(tmp_path / "cut")) == sorted(whole)[:2]
    train(here, resume="auto", **asked)
    assert made(tmp_path / "cut") == whole


def test_a_preview_with_arguments_of_its_own_is_the_same_split_and_unsplit(
    here: Path, tmp_path: Path
) -> None:
    own = "cat --w 16 --h 24 --d 3 --s 2 --l 2 --n dark"
    flags = {"preview_prompt": (own, "cat", "cat --d 3", "cat --w 24"), "max_steps": 1}
    flags["preview_at_start"] = True
    whole = made(train(here, output_path=tmp_path / "whole", **flags))
    assert made(train_in_two_stages(here, tmp_path, **flags)) == whole
    assert len(set(whole.values())) == 8
    previews = tmp_path / "whole/previews"
    # A side that is not given is that of the other previews.
    sizes = [pixels(previews / f"step-000001-{n}.png").shape[:2] for n in (0, 1, 3)]
    assert sizes == [(24, 16), sizes[1], (sizes[1][0], 24)]
    assert sizes[1][1] != 24
    record = json.loads((tmp_path / "whole/previews/prompts.json").read_bytes())
    (first, *_) = record["0"]
    named = ("prompt", "seed", "num_inference_steps", "guidance_scale")
    assert [first[name] for name in named] == ["cat", 3, 2, 2.0]


def test_a_preview_has_its_own_sampler_or_the_variants(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = family.PIPELINES["base"]
    config = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    unipc = {"unipc": diffusers_sampler("UniPCMultistepScheduler", **config)}
    defaults = {**base.defaults, "sampler": "unipc"}
    changed = replace(base, samplers=unipc, defaults=defaults)
    monkeypatch.setitem(family.PIPELINES, "base", changed)
    flags = {"preview_prompt": ("cat --s 4", "cat --s 4 --ss euler"), "max_steps": 1}
    whole = made(train(here, output_path=tmp_path / "whole", **flags))
    assert made(train_in_two_stages(here, tmp_path, **flags)) == whole
    assert len(set(whole.values())) == 2
    with pytest.raises(UsageError, match="expected unipc, euler"):
        train(here, output_path=tmp_path / "not", preview_prompt=("cat --ss dpm",))
