"""A state of a run with other numbers, or of other data, is refused, saying what differs."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from dstrain import StateError
from dstrain.config import CONFIG
from dstrain.config.options import options_affecting
from dstrain.models.device import ATTENTION, NATIVE_ATTENTION
from dstrain.runs.checkpoints.directory import states
from dstrain.runs.checkpoints.state import load_state
from dstrain.storage import read_tensors
from PIL import Image

from tests.support.family import PIPELINES
from tests.support.runs import PowerCut, log, project, stop_at, train

pytestmark = pytest.mark.usefixtures("tiny")

OTHER: tuple[dict[str, Any], ...] = (
    {"variant": "other"},
    {"extra_inputs": "prompt"},
    {"data_file_keys": "image"},
    {"seed": 1},
    {"dataset_repeat": 2},
    {"learning_rate": 1e-3},
    {"weight_decay": 0.5},
    {"lr_scheduler": "cosine"},
    {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 3},
    {"max_grad_norm": 0.1},
    {"timestep_sampling": "uniform"},
    {"timestep_sampling": "sigmoid", "timestep_mean": 0.5},
    {"timestep_sampling": "logit_normal", "timestep_std": 2.0},
    {"timestep_shift": 2.0},
    {"loss_weighting": "none"},
    {"loss_weighting": "min_snr", "min_snr_gamma": 2.0},
    {"loss": "mae"},
    {"loss": "huber", "huber_delta": 0.2},
    {"loss": "huber", "huber_schedule": "snr"},
    {"noise_offset": 0.1},
    {"input_perturbation": 0.1},
    {"min_timestep_boundary": 0.5},
    {"max_timestep_boundary": 0.5},
    {"height": 16, "width": 16},
    {"max_pixels": 128},
    {"resolution": "16", "bucket_step": 8},
    {"resolution": "16", "bucket_min_side": 16},
    {"resolution": "16", "bucket_max_side": 24},
    {"resolution": "16", "bucket_upscale": True},
    {"flip": True},
    {"crops": 2},
    {"caption_dropout": 0.1},
    {"caption_lines": True},
    {"shuffle_tags": True, "keep_tags": 1},
    {"shuffle_tags": True, "caption_variants": 4},
    {"trigger_word": "sks"},
    {"caption_prefix": "old "},
    {"caption_suffix": " now"},
    {"batch_size": 2},
    {"gradient_accumulation_steps": 2},
    {"mixed_precision": "bf16"},
    {"mask_column": "image", "unmasked_weight": 0.5},
    {"lora_rank": 4},
    {"lora_target_modules": "to_q"},
    {"lora_base_model": "text_encoder"},
    {"trainable_models": "dit"},
)
"""Options of a run that is not the one that was saved."""


@pytest.fixture(scope="module")
def held(here: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a short run."""
    return train(here, output_path=tmp_path_factory.mktemp("held"), max_steps=2)


def differing(folder: Path, **flags: Any) -> dict[str, tuple[Any, Any]]:
    """What a refused resume names, with both values."""
    with pytest.raises(StateError) as caught:
        train(folder, **{"resume": "auto", **flags})
    assert caught.value.where == "--resume"
    saved, now = (
        json.loads(line.partition(": ")[2]) for line in caught.value.help_lines[:2]
    )
    names = caught.value.what.partition(": ")[2].split(", ")
    assert names == [*saved] == [*now]
    return {name: (saved[name], now[name]) for name in names}


@pytest.mark.parametrize("flags", OTHER, ids=lambda flags: " ".join(flags))
def test_a_run_with_other_numbers_is_not_resumed_and_what_must_be_equal_is_named(
    flags: dict[str, Any], here: Path, held: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "variant" in flags:
        # Else its denoiser would be refused first.
        like_base = replace(PIPELINES["other"], denoiser_config={})
        monkeypatch.setitem(PIPELINES, "other", like_base)
    found = differing(here, output_path=held, **{"max_steps": 4, **flags})
    for name, value in flags.items():
        assert found[name][1] == value != found[name][0]
    ends_at_last_step = flags == {"lr_scheduler": "cosine"}
    assert found.get("max_steps") == ((2, 4) if ends_at_last_step else None)
    assert load_state(states(held)[0]).step == 2
    assert len(log(held)) == 2


def test_columns_in_any_order_are_of_the_same_run(here: Path, tmp_path: Path) -> None:
    for step, names in enumerate(("prompt,input_image", "input_image,prompt"), 1):
        given = {"extra_inputs": names, "max_steps": step, "resume": "auto"}
        train(here, output_path=tmp_path, **given)
    assert len(log(tmp_path)) == 2


def test_an_option_that_the_saved_run_did_not_know_yet_is_named(
    here: Path, held: Path, tmp_path: Path
) -> None:
    old = shutil.copytree(held, tmp_path / "old")
    written = json.loads((old / CONFIG).read_bytes())
    del written["loss"]
    (old / CONFIG).write_text(json.dumps(written))
    found = differing(here, output_path=old, max_steps=4, loss="mae")
    assert found == {"loss": ("mse", "mae")}


def test_every_flag_that_decides_is_tried() -> None:
    deciding = set(options_affecting("training"))
    # This family reads no videos, so it takes no such flag.
    tried = {name for flags in OTHER for name in flags}
    assert deciding - {"model", *options_affecting("video")} <= tried


def test_a_state_that_is_named_is_compared_with_the_run_that_wrote_it(
    here: Path, held: Path, tmp_path: Path
) -> None:
    other = {"output_path": tmp_path / "other", "learning_rate": 0.5}
    with pytest.raises(PowerCut):
        train(here, stop_at(0), max_steps=2, **other)
    for name in ("other", "new"):
        given = {"output_path": tmp_path / name, "resume": str(states(held)[0])}
        assert differing(here, max_steps=4, seed=1, **given) == {"seed": (0, 1)}


def test_what_only_the_saved_run_has_is_named_with_how_to_have_it(
    here: Path, held: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = shutil.copytree(held, tmp_path / "copy") / "logs/config.json"
    recorded = json.loads(config.read_text("utf-8"))
    recorded |= {"quant_options": "dit:int8", "lora_type": "dora"}
    config.write_text(json.dumps({**recorded, "task": "own:train", "gone": 2}))
    expected = {"seed": (0, 1), "task": ("own", "sft"), "gone": (2, None)}
    expected |= {"quant_options": ("dit:int8", None), "lora_type": ("dora", "lora")}
    given: dict[str, Any] = {"output_path": tmp_path / "copy", "seed": 1}
    assert differing(here, **given) == expected
    monkeypatch.setattr("dstrain.installed._is_there", lambda *_: False)
    with pytest.raises(StateError) as caught:
        train(here, resume="auto", **given)
    advice = "\n".join(caught.value.help_lines[2:-1])
    for option, plugin in (("quant_options", "memory"), ("lora_type", "formats")):
        assert re.search(f"^{option}: .* pip install .*/{plugin}$", advice, re.M)


def test_what_was_saved_may_be_written_in_other_ways_but_for_the_preset(
    here: Path, held: Path, tmp_path: Path
) -> None:
    columns = ("prompt=prompt", "image=image")
    preset = {"preset_lora_path": held / "step-2.safetensors"}
    saved: dict[str, Any] = {"batch_size": 2, "column": columns, **preset}
    saved |= {"optimizer": "torch.optim.AdamW", "extra_inputs": "prompt,input_image"}
    now: dict[str, Any] = {"column": columns[::-1], "learning_rate": 1e-2, **preset}
    now |= {"gradient_accumulation_steps": 2, "trainable_dtype": "fp32"}
    now |= {"customized_optimizer": "torch.optim.AdamW"}
    now |= {"extra_inputs": "input_image,prompt"}
    given: dict[str, Any] = {"output_path": tmp_path / "out", "resume": "auto"}
    for steps, rates in enumerate(("dit=1e-2", "1,dit=1e-2"), 1):
        train(here, max_steps=steps, **given, **saved, learning_rate=rates)
    train(here, max_steps=3, **given, **now)
    other = train(here, output_path=tmp_path / "other", max_steps=1)
    now["preset_lora_path"] = other / "step-1.safetensors"
    with pytest.raises(StateError, match="--resume"):
        train(here, max_steps=4, **given, **now)


@pytest.mark.parametrize("saved", [True, False])
def test_a_run_with_another_attention_is_not_resumed(
    saved: bool, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_module("diffusers.models.attention_dispatch")  # takes the variable as it is
    names = [NATIVE_ATTENTION, "_native_math"]
    used: list[Any] = names[::-1] if saved else names
    given = {"output_path": tmp_path / "out", "resume": "auto"}
    for steps in (1, 2):
        monkeypatch.setenv(ATTENTION, used[0])
        train(here, max_steps=steps, **given)
    # Unset is torch's own, which runs before there was a choice had.
    monkeypatch.setenv(ATTENTION, used[1])
    if not saved:
        first_step = train(here, output_path=tmp_path / "new", max_steps=1)
        header = read_tensors(first_step / "step-1.safetensors")[1]
        assert header[f"version.{ATTENTION}"] == used[1]
    del given["resume"]
    assert differing(here, max_steps=3, **given) == {ATTENTION: tuple(used)}
    if used[0] == NATIVE_ATTENTION:
        monkeypatch.delenv(ATTENTION)
        train(here, max_steps=3, resume="auto", **given)


def test_a_schedule_that_ends_with_the_run_cannot_be_continued_for_longer(
    here: Path, tmp_path: Path
) -> None:
    flags = {"output_path": tmp_path, "lr_scheduler": "cosine"}
    train(here, max_steps=2, **flags)
    assert differing(here, max_steps=4, **flags) == {"max_steps": (2, 4)}
    train(here, max_steps=2, num_epochs=3, resume="auto", **flags)


def rewritten(data: Path, change: Callable[[Any], object]) -> None:
    """Change the rows of a dataset."""
    rows = json.loads((data / "metadata.json").read_text())
    change(rows)
    (data / "metadata.json").write_text(json.dumps(rows))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a row less": (
        lambda data: rewritten(data, lambda rows: rows.pop()),
        "metadata, rows",
    ),
    "a caption": (
        lambda data: rewritten(data, lambda rows: rows[0].update(prompt="a bird")),
        "metadata",
    ),
    "an image": (lambda data: Image.new("RGB", (16, 16)).save(data / "0.png"), "files"),
}
"""How a dataset is changed, and what is named."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_dataset_is_refused(name: str, held: Path, tmp_path: Path) -> None:
    change, named = CHANGES[name]
    project(tmp_path)
    shutil.copytree(held, tmp_path / "out")
    change(tmp_path / "data")
    os.utime(tmp_path / "data/metadata.json", (2**32, 2**32))
    with pytest.raises(StateError, match=named) as caught:
        train(tmp_path, output_path=tmp_path / "out", max_steps=4, resume="auto")
    assert caught.value.where == "--resume"
    assert len(log(tmp_path / "out")) == 2


def test_a_refused_resume_names_the_numbers_of_processes(
    here: Path, held: Path, tmp_path: Path
) -> None:
    shutil.copytree(held, tmp_path / "out")
    record = tmp_path / "out/logs/config.json"
    written = json.loads(record.read_text())
    assert written["versions"]["processes"] == "1"
    written["versions"]["processes"] = "2"
    record.write_text(json.dumps(written))
    found = differing(here, output_path=tmp_path / "out", batch_size=3)
    assert found["processes"] == ("2", "1")


def test_cached_values_that_changed_are_not_resumed(tmp_path: Path) -> None:
    project(tmp_path)
    cache = {"feature_cache": tmp_path / "cache"}
    fill = {"task": "sft:data_process", **cache}
    second = {"task": "sft:train", **cache}
    train(tmp_path, **fill)
    train(tmp_path, **second, max_steps=2)
    train(tmp_path, **fill)
    train(tmp_path, **second, max_steps=3, resume="auto")
    Image.new("RGB", (16, 16), "red").save(tmp_path / "data/0.png")
    train(tmp_path, **fill)
    with pytest.raises(StateError, match="cached values") as caught:
        train(tmp_path, **second, max_steps=4, resume="auto")
    assert caught.value.where == "--resume"


def test_files_touched_or_moved_are_the_same(held: Path, tmp_path: Path) -> None:
    project(tmp_path)
    shutil.copytree(held, tmp_path / "out")
    for path in (tmp_path / "data").iterdir():
        os.utime(path, (1, 1))
    train(tmp_path, output_path=tmp_path / "out", max_steps=3, resume="auto")
    assert len(log(tmp_path / "out")) == 3


def test_variants_of_samples_have_the_files_of_the_samples(
    here: Path, held: Path, tmp_path: Path
) -> None:
    out = train(here, output_path=tmp_path, max_steps=1, shuffle_tags=True, flip=True)
    ours, plain = (load_state(states(folder)[0]).content for folder in (out, held))
    assert ours == plain


def of_dataset(**options: Any) -> dict[str, Any]:
    return {"dataset": [options]}


IMAGES = {"mask_column": "image"}


@pytest.mark.parametrize(
    ("saved", "now", "named"),
    [
        (IMAGES, {"mask_column": "copy"}, "mask_column"),
        (of_dataset(**IMAGES), of_dataset(mask_column="copy"), "dataset"),
        (of_dataset(alpha_mask=True), of_dataset(**IMAGES), "dataset"),
        (of_dataset(**IMAGES, unmasked_weight=0.5), of_dataset(**IMAGES), "dataset"),
        (of_dataset(flip=True), of_dataset(), "dataset"),
        ({**of_dataset(), "flip": True}, of_dataset(flip=True), "flip"),
        (of_dataset(), {"dataset": [{}, {}]}, "dataset"),
    ],
)
def test_an_option_is_named_of_the_run_or_of_the_dataset_that_has_it(
    saved: dict[str, Any], now: dict[str, Any], named: str, tmp_path: Path
) -> None:
    data = project(tmp_path) / "data"
    rewritten(data, lambda rows: [row.update(copy=row["image"]) for row in rows])
    for path in data.glob("*.png"):
        Image.open(path).convert("RGBA").save(path)

    def flags(given: dict[str, Any]) -> dict[str, Any]:
        if "dataset" not in given:
            return given
        entries = [{"dataset_base_path": str(data), **one} for one in given["dataset"]]
        entries = tuple(map(json.dumps, entries))
        return {"dataset_base_path": None, **given, "dataset": entries}

    for steps in (1, 2):
        train(tmp_path, max_steps=steps, resume="auto", **flags(saved))
    assert named in differing(tmp_path, max_steps=3, **flags(now))
