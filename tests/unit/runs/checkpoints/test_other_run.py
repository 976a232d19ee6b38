"""A state of a run with other numbers, or of other data, is refused, saying what differs."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import StateError, run
from dstrain.config.options import options_affecting
from dstrain.runs.checkpoints.state import load_state, states
from PIL import Image

from tests.support.family import PIPELINES
from tests.support.runs import (
    PowerCut,
    config,
    log,
    project,
    stop_at,
    train,
)

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


OTHER: dict[str, dict[str, Any]] = {
    "variant": {"variant": "other"},
    "extra_inputs": {"extra_inputs": "prompt"},
    "data_file_keys": {"data_file_keys": "image"},
    "seed": {"seed": 1},
    "dataset_repeat": {"dataset_repeat": 2},
    "learning_rate": {"learning_rate": 1e-3},
    "weight_decay": {"weight_decay": 0.5},
    "lr_scheduler": {"lr_scheduler": "cosine"},
    "lr_warmup_steps": {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 3},
    "max_grad_norm": {"max_grad_norm": 0.1},
    "timestep_sampling": {"timestep_sampling": "uniform"},
    "loss_weighting": {"loss_weighting": "none"},
    "min_timestep_boundary": {"min_timestep_boundary": 0.5},
    "max_timestep_boundary": {"max_timestep_boundary": 0.5},
    "height": {"height": 16, "width": 16},
    "width": {"height": 16, "width": 24},
    "max_pixels": {"max_pixels": 128},
    "resolution": {"resolution": "16"},
    "bucket_step": {"resolution": "16", "bucket_step": 8},
    "bucket_min_side": {"resolution": "16", "bucket_min_side": 16},
    "bucket_max_side": {"resolution": "16", "bucket_max_side": 24},
    "bucket_upscale": {"resolution": "16", "bucket_upscale": True},
    "flip": {"flip": True},
    "crops": {"crops": 2},
    "caption_dropout": {"caption_dropout": 0.1},
    "caption_lines": {"caption_lines": True},
    "shuffle_tags": {"shuffle_tags": True},
    "keep_tags": {"shuffle_tags": True, "keep_tags": 1},
    "caption_variants": {"shuffle_tags": True, "caption_variants": 4},
    "trigger_word": {"trigger_word": "sks"},
    "caption_prefix": {"caption_prefix": "old "},
    "caption_suffix": {"caption_suffix": " now"},
    "batch_size": {"batch_size": 2},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
    "mixed_precision": {"mixed_precision": "bf16"},
    "mask_column": {"mask_column": "image"},
    "unmasked_weight": {"mask_column": "image", "unmasked_weight": 0.5},
    "what is trained": {"lora_rank": 4},
}


@pytest.fixture(scope="module")
def held(here: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a short run."""
    return train(here, output_path=tmp_path_factory.mktemp("held"), max_steps=2)


@pytest.mark.parametrize("name", OTHER)
def test_a_run_with_other_numbers_is_not_resumed_and_what_must_be_equal_is_named(
    name: str, here: Path, held: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "variant":
        # Else its denoiser would be refused first.
        like_base = replace(PIPELINES["other"], denoiser_config={})
        monkeypatch.setitem(PIPELINES, "other", like_base)
    with pytest.raises(StateError) as caught:
        train(here, output_path=held, resume="auto", **{"max_steps": 4, **OTHER[name]})
    assert "--resume: the saved run had different settings" in str(caught.value)
    printed = caught.value.help_lines[0]
    assert all(
        f"--{flag}: saved " in printed and f"this run {value}" in printed
        for flag, value in OTHER[name].items()
    )
    assert ("--max_steps: saved 2, this run 4" in printed) == (
        name == "lr_scheduler"
    )  # which ends at the last step
    assert "None" not in str(caught.value)
    offers_new_run = "start a new run from the saved weights" in str(caught.value)
    assert offers_new_run == (name != "what is trained")  # weights of other shapes
    assert load_state(states(held)[0]).step == 2
    assert len(log(held)) == 2


def test_a_state_that_is_named_is_compared_with_the_run_that_wrote_it(
    here: Path, held: Path, tmp_path: Path
) -> None:
    with pytest.raises(PowerCut):
        train(
            here,
            stop_at(0),
            output_path=tmp_path / "other",
            max_steps=2,
            learning_rate=0.5,
        )
    for name in ("other", "new"):
        with pytest.raises(StateError) as caught:
            train(
                here,
                output_path=tmp_path / name,
                resume=str(states(held)[0]),
                max_steps=4,
                seed=1,
                # Other ways to write what was saved.
                lora_alpha=2.0,
                mixed_precision="no",
                loraplus_lr_ratio=1.0,
            )
        assert caught.value.help_lines[0] == "--seed: saved 0, this run 1"


def test_the_place_of_weights_may_change_where_others_are_quantized(
    here: Path, tmp_path: Path
) -> None:
    given = {"output_path": tmp_path / "out", "quant_options": "text_encoder:fp8"}
    train(here, max_steps=1, **given)
    train(here, max_steps=2, resume="auto", blocks_to_swap=1, **given)
    assert len(log(tmp_path / "out")) == 2


def test_a_rate_for_the_only_component_is_that_for_all(
    here: Path, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"output_path": tmp_path, "resume": "auto"}
    train(here, **given, max_steps=1, learning_rate="dit=1e-2")
    train(here, **given, max_steps=2, learning_rate=1e-2)
    train(here, **given, max_steps=3, learning_rate="1,dit=1e-2")
    with pytest.raises(StateError) as caught:
        train(here, **given, max_steps=4, learning_rate=1e-2, seed=1)
    assert caught.value.help_lines[0] == "--seed: saved 0, this run 1"


def test_a_schedule_that_ends_with_the_run_cannot_be_continued_for_longer(
    here: Path, tmp_path: Path
) -> None:
    flags = {"output_path": tmp_path, "lr_scheduler": "cosine"}
    train(here, max_steps=2, **flags)
    with pytest.raises(StateError, match="--max_steps"):
        train(here, max_steps=4, resume="auto", **flags)
    train(here, max_steps=2, num_epochs=3, resume="auto", **flags)  # the same steps


def test_every_flag_that_decides_is_tried() -> None:
    deciding = set(options_affecting("training"))
    # This family reads no videos, so it takes no such flag.
    assert deciding - {"model", *options_affecting("video")} <= set(OTHER)


def test_other_rows_is_not_resumed(held: Path, tmp_path: Path) -> None:
    project(tmp_path)
    rows = json.loads((tmp_path / "data/metadata.json").read_text())
    (tmp_path / "data/metadata.json").write_text(json.dumps(rows[:-1]))
    with pytest.raises(StateError, match="6 rows then, 5 now") as caught:
        train(tmp_path, output_path=held, max_steps=4, resume="auto")
    assert "different settings" not in str(caught.value)


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a caption": (
        "metadata",
        lambda data: rewritten(data, lambda rows: rows[0].update(prompt="a bird")),
    ),
    "an image": (
        r"files \(by their sizes\)",
        lambda data: Image.new("RGB", (16, 16)).save(
            data / "0.png"
        ),  # of the same size in pixels
    ),
}


def rewritten(data: Path, change: Callable[[Any], object]) -> None:
    rows = json.loads((data / "metadata.json").read_text())
    change(rows)
    (data / "metadata.json").write_text(json.dumps(rows))


@pytest.mark.parametrize("name", CHANGES)
def test_a_dataset_whose_content_changed_is_not_resumed(
    name: str, held: Path, tmp_path: Path
) -> None:
    words, change = CHANGES[name]
    project(tmp_path)
    shutil.copytree(held, tmp_path / "out")
    change(tmp_path / "data")
    with pytest.raises(
        StateError, match=f"has changed since the saved run read it: its {words}"
    ) as caught:
        train(tmp_path, output_path=tmp_path / "out", max_steps=4, resume="auto")
    assert "--resume_from_checkpoint" in str(caught.value)
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
    with pytest.raises(StateError, match="processes: saved 2, this run 1"):
        train(here, output_path=tmp_path / "out", batch_size=3, resume="auto")


def test_cached_values_that_changed_are_not_resumed(tmp_path: Path) -> None:
    project(tmp_path)
    cache = {"feature_cache": tmp_path / "cache"}
    first = {"task": "sft:data_process", **cache}
    second = {"task": "sft:train", "output_path": tmp_path / "out", **cache}
    run(config(tmp_path, **first))
    run(config(tmp_path, **second, max_steps=2))
    run(config(tmp_path, **first))
    run(config(tmp_path, **second, max_steps=3, resume="auto"))
    Image.new("RGB", (16, 16), "red").save(tmp_path / "data/0.png")
    run(config(tmp_path, **first))
    with pytest.raises(StateError, match="run read it: its cached values"):
        run(config(tmp_path, **second, max_steps=4, resume="auto"))


def test_files_that_are_touched_or_lie_elsewhere_are_the_same(
    here: Path, held: Path, tmp_path: Path
) -> None:
    project(tmp_path)
    shutil.copytree(held, tmp_path / "out")
    for path in (tmp_path / "data").iterdir():
        os.utime(path, (1, 1))
    train(tmp_path, output_path=tmp_path / "out", max_steps=3, resume="auto")
    assert len(log(tmp_path / "out")) == 3


def test_a_run_with_masks_of_another_column_is_not_resumed(tmp_path: Path) -> None:
    project(tmp_path)
    table = tmp_path / "data/metadata.json"
    rows = json.loads(table.read_text())
    table.write_text(json.dumps([{**row, "copy": row["image"]} for row in rows]))
    given: dict[str, Any] = {"output_path": tmp_path / "out", "resume": "auto"}
    train(tmp_path, **given, max_steps=1, mask_column="image")
    train(tmp_path, **given, max_steps=2, mask_column="image")
    with pytest.raises(StateError) as caught:
        train(tmp_path, **given, max_steps=3, mask_column="copy")
    assert caught.value.help_lines[0] == "--mask_column: saved image, this run copy"
