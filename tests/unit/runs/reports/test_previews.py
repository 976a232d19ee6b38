"""Previews: the same images in both ways of training, and a training that is the same
with and without them.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dstrain import GenerateConfig, Pipeline, StateError, UsageError, generate
from dstrain.cache import FeatureCache
from dstrain.config import LoraFile
from dstrain.distributed import ProcessGroup
from dstrain.runs import open_training_data
from dstrain.runs.reports import previews
from dstrain.runs.reports.preview_plans import plan_previews
from dstrain.runs.resolve import resolve
from dstrain.storage import temporary
from PIL import Image

from tests.support.family import weights_of
from tests.support.runs import (
    PowerCut,
    config,
    outcome,
    project,
    same,
    stop_at,
    train,
    training_run,
)

pytestmark = pytest.mark.usefixtures("tiny")
TWO: dict[str, Any] = {"preview_prompt": ("a red dog", "cat")}
STAGES = ("sft:data_process", "sft:train")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"), dropout=0.3)


def made(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted((folder / "previews").glob("*.png"))
    }


def pixels(path: Path) -> Any:
    with Image.open(path) as image:
        return np.asarray(image).astype(int)


def split(here: Path, place: Path, **changes: Any) -> Path:
    for task in STAGES:
        train(
            here,
            task=task,
            feature_cache=place / "cache",
            output_path=place / "out",
            **changes,
        )
    return place / "out"


def without_previews(folder: Path) -> dict[str, Any]:
    printed = outcome(folder)
    names = [name for name in printed["names"] if not name.startswith("previews")]
    return {**printed, "names": names}


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
        {"dataset_num_workers": 1, "max_steps": 3},
    ],
    ids=lambda flags: " ".join(flags) or "LoRA",
)
def test_training_is_the_same_with_and_without_previews(
    flags: dict[str, Any], here: Path, tmp_path: Path
) -> None:
    both = {}
    for name, asked in (("with", TWO | {"preview_steps": 1}), ("without", {})):
        train(
            here,
            output_path=tmp_path / name,
            **{"num_epochs": None, "max_steps": 4, **asked, **flags},
        )
        both[name] = without_previews(tmp_path / name)
    assert same(both["with"], both["without"])
    assert len(made(tmp_path / "with")) >= 8


@pytest.mark.parametrize(
    "flags",
    [{}, {"trainable_models": "text_encoder"}, {"trainable_models": "vae,dit"}],
    ids=["LoRA", "text_encoder", "vae and dit"],
)
def test_split_and_unsplit_previews_are_equal(
    flags: dict[str, Any], here: Path, tmp_path: Path
) -> None:
    asked = {**TWO, "preview_steps": 3, **flags}
    whole = train(here, output_path=tmp_path / "whole", **asked)
    assert made(split(here, tmp_path, **asked)) == made(whole) != {}
    assert len(set(made(whole).values())) == 6  # training shows


def test_a_preview_is_what_inference_with_the_saved_weights_makes(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, seed=5, **TWO)
    files = json.dumps(list(weights_of(here / "model").values()))
    for name, loras in (
        ("step-000000-0", ()),
        ("step-000006-0", (LoraFile(tmp_path / "epoch-0.safetensors"),)),
    ):
        wanted = GenerateConfig(
            model="tiny", variant="base", model_paths=files, prompt="a red dog", seed=5, lora=loras,
            output=tmp_path / "wanted.png", overwrite=True,
        )  # fmt: skip
        generate(wanted)
        assert np.array_equal(
            pixels(wanted.output), pixels(tmp_path / f"previews/{name}.png")
        ), name


def test_the_seed_alone_draws_the_noise(here: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(
            here,
            output_path=tmp_path / name,
            max_steps=1,
            learning_rate=1e-9,
            seed=seed,
            **TWO,
        )
    a, b, c = (made(tmp_path / name) for name in "abc")
    assert a == b
    assert a["step-000000-0.png"] != c["step-000000-0.png"]
    before, after = (
        pixels(tmp_path / f"a/previews/step-00000{step}-0.png") for step in (0, 1)
    )
    assert np.abs(before - after).max() <= 1


def test_stage_1_stores_prompts_under_the_keys_of_rows_and_a_changed_prompt_refills_no_row(
    here: Path, tmp_path: Path
) -> None:
    place = {"task": STAGES[0], "feature_cache": tmp_path}
    train(here, **place)
    rows = set(FeatureCache.open(tmp_path))
    train(here, **place, preview_prompt=("dog", "cat"))  # both are captions
    assert set(FeatureCache.open(tmp_path)) == rows
    train(here, **place, preview_prompt=("new",))
    assert len(set(FeatureCache.open(tmp_path)) - rows) == 2
    assert len(list((tmp_path / "plans").glob("*.json"))) == 1


def test_a_prompt_the_cache_lacks_is_refused_naming_the_flag_of_stage_1(
    here: Path, tmp_path: Path
) -> None:
    place = {"feature_cache": tmp_path / "cache", "output_path": tmp_path / "out"}
    train(here, task=STAGES[0], preview_prompt=("dog",), **place)
    with pytest.raises(StateError) as caught:
        train(here, task=STAGES[1], preview_prompt=("dog", "a bird"), **place)
    assert (caught.value.exit_code, caught.value.what) == (
        3,
        "contains no values for previews of 'a bird'",
    )
    stage_1, both = caught.value.help_lines[-2:]
    assert "--task sft:data_process" in stage_1
    for advice in (stage_1, both):
        assert "--preview_prompt 'a bird'" in advice
    for shard in (tmp_path / "cache/shards").iterdir():
        shard.unlink()
    train(here, task=STAGES[0], **place)  # the rows' values alone
    with pytest.raises(StateError, match="contains no values for previews of 'dog'"):
        train(here, task=STAGES[1], preview_prompt=("dog",), **place)


def test_stage_2_loads_a_decoder_for_previews_alone_and_no_encoder(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[set[str]] = []
    monkeypatch.setattr(Pipeline, "from_found", noting(Pipeline.from_found, loaded))
    split(here, tmp_path, **TWO)
    assert loaded[1:] == [{"dit"}, {"vae"}]
    train(
        here,
        task=STAGES[1],
        feature_cache=tmp_path / "cache",
        output_path=tmp_path / "none",
    )
    assert loaded[1:] == [{"dit"}, {"vae"}, {"dit"}]
    assert not (tmp_path / "none/previews").exists()


def noting(load: Any, loaded: list[set[str]]) -> Any:
    def noted(family: Any, spec: Any, found: Any, *more: Any, **named: Any) -> Any:
        loaded.append(set(found.files))
        return load(family, spec, found, *more, **named)

    return noted


def test_a_resumed_run_makes_the_previews_that_are_due_and_not_those_made_already(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {**TWO, "preview_steps": 2, "save_steps": 2}
    whole = made(train(here, output_path=tmp_path / "whole", **asked))
    with pytest.raises(PowerCut):
        train(here, stop_at(5), output_path=tmp_path / "cut", **asked)
    (tmp_path / "cut/previews/step-000004-1.png").unlink()
    temporary(tmp_path / "cut/previews/step-000004-1.png").write_bytes(b"half")
    writes: list[str] = []
    write = previews.save_image_or_video
    monkeypatch.setattr(
        previews,
        "save_image_or_video",
        lambda image, path: (writes.append(path.name), write(image, path)),
    )
    train(here, output_path=tmp_path / "cut", resume="auto", **asked)
    assert writes == ["step-000004-1.png", "step-000006-0.png", "step-000006-1.png"]
    assert made(tmp_path / "cut") == whole
    assert not list((tmp_path / "cut/previews").glob(".*"))
    train(
        here,
        output_path=tmp_path / "cut",
        resume="auto",
        **{**asked, "preview_prompt": ("new", "cat")},
    )
    assert writes[3:] == [
        "step-000006-0.png",
        "step-000006-1.png",
    ]  # other prompts by these numbers


def test_prompts_are_noted_by_the_step_from_which_they_hold_and_no_file_is_of_others(
    here: Path, tmp_path: Path
) -> None:
    def go(
        folder: str, steps: int, *prompts: str, **flags: Any
    ) -> list[tuple[str, list[str]]]:
        given = {
            "preview_prompt": prompts,
            "preview_steps": 2,
            "save_steps": 2,
            **flags,
        }
        out = train(
            here,
            output_path=tmp_path / folder,
            num_epochs=None,
            max_steps=steps,
            **given,
        )
        noted = json.loads((out / "previews/prompts.json").read_bytes()).items()
        return [
            (step, [preview["prompt"] for preview in prompts])
            for step, prompts in noted
        ]

    dog = [("0", ["dog"])]
    assert go("out", 4, "dog") == dog
    assert go("dogs", 8, "dog", keep_checkpoints=9) == dog
    assert go("cats", 8, "cat", keep_checkpoints=9) == [("0", ["cat"])]
    dogs, cats = made(tmp_path / "dogs"), made(tmp_path / "cats")
    mixed = {
        **dogs,
        **{
            name: cats[name]
            for name in ("step-000004-0.png", "step-000006-0.png", "step-000008-0.png")
        },
    }

    assert go("out", 8, "cat", resume="auto", keep_checkpoints=9) == [
        *dog,
        ("4", ["cat"]),
    ]
    assert made(tmp_path / "out") == mixed
    assert go("out", 8, "cat", resume="auto", keep_checkpoints=9) == [
        *dog,
        ("4", ["cat"]),
    ]
    assert made(tmp_path / "out") == mixed
    for name in ("states/step-4", "states/step-6", "states/step-8"):
        shutil.rmtree(tmp_path / "out" / name)
    assert (
        go("out", 2, "dog", resume="auto") == dog
    )  # from step 2, before there were cats
    assert made(tmp_path / "out") == {
        name: dogs[name] for name in ("step-000000-0.png", "step-000002-0.png")
    }


def test_the_prompts_and_what_decides_a_preview_are_noted_by_number(
    here: Path, tmp_path: Path
) -> None:
    train(here, output_path=tmp_path, max_steps=1, seed=3, height=24, width=16, **TWO)
    first, second = json.loads((tmp_path / "previews/prompts.json").read_text())["0"]
    assert first == {
        "prompt": "a red dog", "seed": 3, "height": 24, "width": 16, "num_inference_steps": 4, "guidance_scale": 1.0,
        "rand_device": "cpu",
    }  # fmt: skip
    assert second["prompt"] == "cat"
    assert pixels(tmp_path / "previews/step-000001-0.png").shape == (24, 16, 3)
    assert json.loads((tmp_path / "logs/config.json").read_text())[
        "preview_prompt"
    ] == [
        "a red dog",
        "cat",
    ]


def test_without_a_size_a_preview_has_the_variants_bounded(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(here, preview_prompt=("dog",))
    setup = resolve(asked)
    large = replace(
        setup.spec, defaults={**setup.spec.defaults, "height": 1024, "width": 2048}
    )
    assert _size(replace(setup, spec=large)) == (
        360,
        720,
    )  # at most 512 x 512 pixels, in multiples of 8
    bounded = replace(
        setup,
        spec=large,
        config=config(here, preview_prompt=("dog",), max_pixels=64 * 64),
    )
    assert _size(bounded) == (40, 88)
    assert _size(setup) == (16, 16)


def _size(setup: Any) -> tuple[int, int]:
    (preview,) = plan_previews(setup)
    return preview.cells["height"].literal, preview.cells["width"].literal


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate"),
        OSError(28, "No space left on device"),
    ],
)
def test_a_preview_that_fails_is_a_warning_with_its_reason_and_training_continues(
    error: Exception,
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    finish = Pipeline.finish
    calls: list[int] = []

    def failing(pipeline: Any, plan: Any, values: Any, sampling: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise error
        return finish(pipeline, plan, values, sampling)

    monkeypatch.setattr(Pipeline, "finish", failing)
    train(here, output_path=tmp_path / "out", preview_steps=2, **TWO)
    printed = capsys.readouterr().err
    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    assert (
        f"dstrain: warning: no preview {tmp_path}/out/previews/step-000000-1.png: {reason}\n"
        in printed
    )
    assert len(made(tmp_path / "out")) == 7
    train(here, output_path=tmp_path / "plain")
    assert same(
        without_previews(tmp_path / "out"), without_previews(tmp_path / "plain")
    )


def test_a_run_that_is_asked_to_stop_leaves_its_previews_to_the_resumed_run(
    here: Path, tmp_path: Path
) -> None:
    ready = training_run(config(here, output_path=tmp_path, max_steps=1, **TWO))
    opened = previews.open_previews(ready.setup, open_training_data(ready.setup))
    opened.load(ready)
    opened.make_if_due(ready, True, lambda: True)
    assert not made(tmp_path)
    opened.make_if_due(ready, True, lambda: False)
    assert len(made(tmp_path)) == 2


def test_processes_beside_the_main_one_load_and_make_nothing_and_wait(
    here: Path, tmp_path: Path
) -> None:
    ready = training_run(config(here, output_path=tmp_path, **TWO))
    waits: list[int] = []
    other = SimpleNamespace(
        process_index=1, num_processes=2, wait_for_everyone=lambda: waits.append(1)
    )
    ready.processes = ProcessGroup(other)
    opened = previews.open_previews(ready.setup, open_training_data(ready.setup))
    opened.load(ready)
    assert opened.pipeline is None
    opened.make_if_due(ready, False, lambda: False)
    assert not waits
    opened.make_if_due(ready, True, lambda: False)
    assert len(waits) == 1
    assert not (tmp_path / "previews").exists()


def test_modes_generators_and_gradients_are_as_they_were_after_a_preview(
    here: Path,
) -> None:
    pipeline = training_run(config(here)).module.pipeline
    dit = pipeline.components["dit"]
    modes = [module.training for module in dit.modules()]
    opened = [parameter.requires_grad for parameter in dit.parameters()]
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), previews.undisturbed(pipeline):
        assert not torch.is_grad_enabled()
        assert not any(module.training for module in dit.modules())
        torch.rand(3)
        raise ZeroDivisionError
    assert torch.is_grad_enabled()
    assert any(modes)
    assert [module.training for module in dit.modules()] == modes
    assert [parameter.requires_grad for parameter in dit.parameters()] == opened
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("flags", "where", "what"),
    [
        (
            {"preview_steps": 3},
            "--preview_steps",
            "has no effect without --preview_prompt",
        ),
        ({"preview_prompt": ("dog",), "preview_steps": 0}, "--preview_steps", "0"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    flags: dict[str, Any], where: str, what: str, here: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        train(here, output_path=tmp_path / "out", **flags)
    assert caught.value.where == where
    assert what in caught.value.what
    assert not (tmp_path / "out").exists()


def test_previews_show_the_average_over_the_steps_and_leave_the_weights(
    here: Path, tmp_path: Path
) -> None:
    flags: dict[str, Any] = {"max_steps": 2, "save_steps": 1, **TWO}
    shown = train(here, output_path=tmp_path / "ema", ema_decay=0.9, **flags)
    plain = train(here, output_path=tmp_path / "plain", **flags)
    assert made(shown)["step-000000-0.png"] == made(plain)["step-000000-0.png"]
    assert made(shown)["step-000002-0.png"] != made(plain)["step-000002-0.png"]
    assert (shown / "step-2.safetensors").read_bytes() == (
        plain / "step-2.safetensors"
    ).read_bytes()
    generate(
        GenerateConfig(
            model="tiny",
            model_paths=json.dumps(list(weights_of(here / "model").values())),
            prompt=TWO["preview_prompt"][0],
            output=tmp_path / "image.png",
            lora=(LoraFile(shown / "step-2.ema.safetensors"),),
        )
    )
    image = pixels(shown / "previews/step-000002-0.png")
    assert np.array_equal(pixels(tmp_path / "image.png"), image)
    recorded = json.loads((shown / "previews/prompts.json").read_text())
    assert recorded["0"][0]["ema_decay"] == 0.9
