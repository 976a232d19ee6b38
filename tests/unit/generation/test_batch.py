"""`dstrain generate --dataset`: an image per row from its own noise, kept, continued
or refused; then trained on.
"""

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
from dstrain import (
    DIRECT_DISTILL,
    GenerateConfig,
    Pipeline,
    StateError,
    UsageError,
    generate,
)
from dstrain.config import LoraFile, NamedInput
from dstrain.generation.batch import generate_dataset
from dstrain.pipeline import seeded_noise
from PIL import Image, ImageChops
from safetensors.torch import load_file, save_file

from tests.support.family import weights_of, write
from tests.support.runs import train

pytestmark = pytest.mark.usefixtures("tiny")

ROWS = [
    {"prompt": "dog", "seed": 3, "num_inference_steps": 2, "note": 'a "b", c'},
    {"prompt": "", "seed": 4, "num_inference_steps": 1, "note": ""},
    {"prompt": "dog", "seed": 4, "num_inference_steps": 2, "note": "line\nbreak"},
]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return rewritten(tmp_path / "prompts.json", ROWS)


def rewritten(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(rows))
    return path


def config(model: Path, output: Path, **changes: Any) -> GenerateConfig:
    given = {
        "model": "tiny",
        "variant": "base",
        "model_paths": json.dumps(list(weights_of(model).values())),
    }
    return GenerateConfig(
        **{**given, "output": output, "num_inference_steps": 3, **changes}
    )


def made(folder: Path) -> list[dict[str, str]]:
    with (folder / "metadata.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def images(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        path.name: (path.stat().st_mtime_ns, path.read_bytes())
        for path in (folder / "image").iterdir()
    }


def equal(one: Path, other: Path) -> bool:
    return ImageChops.difference(Image.open(one), Image.open(other)).getbbox() is None


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Pipeline]:
    """Each image that is made adds its pipeline."""
    calls: list[Pipeline] = []
    call = Pipeline.__call__

    def counted(self: Pipeline, **arguments: Any) -> Any:
        calls.append(self)
        return call(self, **arguments)

    monkeypatch.setattr(Pipeline, "__call__", counted)
    return calls


def test_each_row_gives_the_image_that_its_prompt_and_seed_give_alone(
    model: Path, table: Path, tmp_path: Path, loads: list[Pipeline]
) -> None:
    generate(config(model, tmp_path / "set", dataset=table))
    assert len(loads) == 3
    assert len({id(pipe) for pipe in loads}) == 1
    rows = made(tmp_path / "set")
    assert [{name: row[name] for name in ROWS[0]} for row in rows] == [
        {name: str(value) for name, value in row.items()} for row in ROWS
    ]
    for i, row in enumerate(ROWS):
        alone = tmp_path / f"{i}.png"
        generate(config(model, alone, prompt=str(row["prompt"]), seed=row["seed"]))
        assert equal(alone, tmp_path / "set" / rows[i]["image"])
    assert len({row["image"] for row in rows}) == 3


def test_a_run_that_was_stopped_resumes_and_one_that_is_done_makes_nothing(
    model: Path,
    table: Path,
    tmp_path: Path,
    loads: list[Pipeline],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped = config(model, tmp_path / "set", dataset=table)
    with monkeypatch.context() as patch:
        patch.setattr("dstrain.generation.batch.save_image_or_video", failing_at(2))
        with pytest.raises(KeyboardInterrupt):
            generate(stopped)
    assert not (tmp_path / "set/metadata.csv").exists()
    kept = {
        name: content
        for name, content in images(tmp_path / "set").items()
        if not name.startswith(".")
    }
    assert len(kept) == 1
    generate(stopped)
    assert len(loads) == 4
    finished = images(tmp_path / "set")
    assert len(finished) == 3  # and no leftover
    assert kept.items() <= finished.items()
    generate(stopped)
    assert (len(loads), images(tmp_path / "set")) == (4, finished)


def failing_at(call: int) -> Any:
    from dstrain.data import save_image_or_video

    calls = iter(range(1, 100))

    def failing(made: Any, path: Path) -> None:
        if next(calls) == call:
            raise KeyboardInterrupt
        save_image_or_video(made, path)

    return failing


def test_a_changed_row_is_regenerated_and_the_others_are_kept(
    model: Path, table: Path, tmp_path: Path, loads: list[Pipeline]
) -> None:
    generate(config(model, tmp_path / "set", dataset=table))
    before = images(tmp_path / "set")
    rewritten(
        table,
        [{**ROWS[0], "num_inference_steps": 9}, {**ROWS[1], "prompt": "cat"}, ROWS[2]],
    )
    generate(config(model, tmp_path / "set", dataset=table))
    assert len(loads) == 4
    assert before.items() <= images(tmp_path / "set").items()
    assert [row["num_inference_steps"] for row in made(tmp_path / "set")] == [
        "9",
        "1",
        "2",
    ]


def test_other_settings_are_refused_naming_the_difference(
    model: Path, table: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    generate(config(model, folder, dataset=table))
    for changes, words in (
        ({"num_inference_steps": 4}, "num_inference_steps: existing 3, this run 4"),
        ({"guidance_scale": 2.0}, "guidance_scale: existing None, this run 2.0"),
        (
            {"height": 8, "width": 8},
            "height: existing 16, this run 8; width: existing 16, this run 8",
        ),
    ):
        with pytest.raises(
            StateError, match="was generated with different settings"
        ) as caught:
            generate(config(model, folder, dataset=table, **changes))
        assert caught.value.help_lines[0] == words
    write(tmp_path / "other", seed=1)
    with pytest.raises(
        StateError,
        match=r"files of dit: existing .*; files of text_encoder: .*; files of vae: ",
    ):
        generate(config(tmp_path / "other", folder, dataset=table))
    lora = train(
        tmp_path,
        model_paths=json.dumps(list(weights_of(model).values())),
        max_steps=1,
        **data(tmp_path),
    )
    with pytest.raises(StateError, match="LoRA: existing "):
        generate(
            config(
                model,
                folder,
                dataset=table,
                lora=(LoraFile(lora / "step-1.safetensors"),),
            )
        )


def test_what_is_said_of_a_lora_where_it_is_named_is_a_setting(
    model: Path, table: Path, tmp_path: Path
) -> None:
    """With another alpha, or on another component, the same file makes other images."""
    lora = tmp_path / "lora.safetensors"
    trained = train(
        tmp_path,
        model_paths=json.dumps(list(weights_of(model).values())),
        max_steps=1,
        **data(tmp_path),
    )
    save_file(load_file(trained / "step-1.safetensors"), lora)
    folder = tmp_path / "set"
    as_given = {"dataset": table, "lora": (LoraFile(lora, alpha="rank"),)}
    generate(config(model, folder, **as_given))
    generate(config(model, folder, **as_given))
    for other in (
        LoraFile(lora, alpha=7.0),
        LoraFile(lora, alpha="rank", skip_missing=True),
        LoraFile(lora, alpha="rank", component="dit"),
    ):
        with pytest.raises(StateError, match="LoRA: existing "):
            generate(config(model, folder, dataset=table, lora=(other,)))


def data(folder: Path) -> dict[str, Any]:
    (folder / "pictures").mkdir()
    Image.new("RGB", (16, 16)).save(folder / "pictures/a.png")
    (folder / "pictures/metadata.csv").write_text("image,prompt\na.png,dog\n")
    return {"dataset_base_path": folder / "pictures", "save_steps": 1}


def test_what_is_made_is_a_dataset_for_distillation(
    model: Path, table: Path, tmp_path: Path
) -> None:
    generate(config(model, tmp_path / "set", dataset=table))
    files = json.dumps(list(weights_of(model).values()))
    given = {
        "model_paths": files,
        "dataset_base_path": tmp_path / "set",
        "output_path": tmp_path / "out",
    }
    train(tmp_path, task=DIRECT_DISTILL.name, max_steps=2, **given)
    assert (tmp_path / "out/logs/loss.csv").is_file()


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([{"prompt": "dog"}], "has no column 'seed'"),
        (
            [{"prompt": "dog", "seed": 1}, {"prompt": "dog", "seed": ""}],
            r"1 bad value\n  bad\.json:2:seed: is blank",
        ),
        ([{"prompt": "dog", "seed": "one"}], "'one' is not an integer"),
        (
            [{"prompt": "dog", "seed": 1, "rand_device": "mps"}],
            "noise cannot be drawn on device 'mps' here",
        ),
        (
            [{"prompt": "dog", "seed": 1, "image": "a.png"}],
            "has a column 'image', which is the one to generate",
        ),
        ([{"seed": 1}], "needs prompt_emb, and there is no column 'prompt'"),
        (
            [{"prompt": "dog", "seed": 1, "height": 16}],
            "--height: is also a column of ",
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused_before_anything_is_loaded_or_written(
    rows: list[dict[str, Any]], what: str, model: Path, tmp_path: Path
) -> None:
    flags = {"height": 16, "width": 16} if "height" in rows[0] else {}
    given = config(
        model, tmp_path / "set", dataset=rewritten(tmp_path / "bad.json", rows), **flags
    )
    with pytest.raises(UsageError, match=what):
        generate(given)
    assert not (tmp_path / "set/generated.json").exists()


def test_a_folder_with_a_dataset_of_the_user_is_left_as_it_is(
    model: Path, table: Path, tmp_path: Path
) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/metadata.csv").write_text("image,prompt\n")
    with pytest.raises(
        UsageError, match="belongs to a dataset that was not generated here"
    ):
        generate(config(model, tmp_path / "set", dataset=table))
    assert (tmp_path / "set/metadata.csv").read_text() == "image,prompt\n"


def test_a_table_is_not_overwritten_by_the_dataset(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "set/metadata.csv"
    path.parent.mkdir()
    path.write_text("prompt,seed\ndog,1\n")
    with pytest.raises(
        UsageError, match="belongs to a dataset that was not generated here"
    ):
        generate(config(model, tmp_path / "other/../set", dataset=path))
    assert path.read_text() == "prompt,seed\ndog,1\n"


def test_a_folder_is_bound_by_settings_once_something_was_made_by_them(
    model: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "set"
    for name in (
        "dstrain.pipeline.pipeline.Pipeline.from_found",
        "dstrain.pipeline.pipeline.Pipeline.__call__",
    ):  # while loading; the first image
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(name, stopping)
            generate(config(model, folder, dataset=table))
        assert not (folder / "generated.json").exists()
    generate(config(model, folder, dataset=table, num_inference_steps=2))
    assert len(made(folder)) == 3
    (folder / "metadata.csv").unlink()
    with pytest.raises(StateError, match="was generated with different settings"):
        generate(config(model, folder, dataset=table))


def stopping(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff"])
def test_damaged_settings_are_named_and_nothing_is_made(
    damage: bytes, model: Path, table: Path, tmp_path: Path, loads: list[Pipeline]
) -> None:
    generate(config(model, tmp_path / "set", dataset=table))
    (tmp_path / "set/generated.json").write_bytes(damage)
    with pytest.raises(StateError, match=r"generated\.json: is damaged"):
        generate(config(model, tmp_path / "set", dataset=table, num_inference_steps=9))
    assert len(loads) == 3


@pytest.mark.parametrize(
    ("scale", "unread"), [(None, ["negative_prompt", "promt"]), (2.0, ["promt"])]
)
def test_columns_that_neither_inference_nor_distillation_reads_are_named(
    scale: float | None,
    unread: list[str],
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {
        "prompt": "dog",
        "seed": 1,
        "cfg_scale": 1,
        "num_inference_steps": 2,
        "negative_prompt": "",
        "promt": "cat",
    }
    table = rewritten(tmp_path / "prompts.json", [row])
    generate(config(model, tmp_path / "set", dataset=table, guidance_scale=scale))
    printed = [
        line for line in capsys.readouterr().err.splitlines() if "warning" in line
    ]
    assert [line.partition(": column ")[2].partition(" ")[0] for line in printed] == [
        repr(name) for name in unread
    ]
    assert all(line.startswith(f"dstrain: warning: {table}: ") for line in printed)


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        ({"negative_prompt": "blurry"}, "--negative_prompt"),
        ({"num_frames": 5}, "--num_frames"),
        ({"input": (NamedInput("prompt", "cat"),)}, "--input prompt"),
    ],
)
def test_flags_that_no_row_uses_or_that_are_columns_are_refused(
    flags: dict[str, Any], where: str, model: Path, table: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        generate(config(model, tmp_path / "set", dataset=table, **flags))
    assert refused.value.where == where
    assert not (tmp_path / "set/generated.json").exists()


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"prompt": "a cat"}, "--prompt"),
        ({"seed": 7}, "--seed"),
        ({"dataset": None}, "--prompt"),
    ],
)
def test_prompt_and_table_exclude_each_other(
    changes: dict[str, Any], where: str, model: Path, table: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        generate(config(model, tmp_path / "set", **{"dataset": table, **changes}))
    assert caught.value.where == where


def test_two_runs_do_not_fill_one_folder(
    model: Path, table: Path, tmp_path: Path
) -> None:
    from dstrain.storage import lock

    with (
        lock(tmp_path / "set"),
        pytest.raises(StateError, match=f"is in use by process {os.getpid()}"),
    ):
        generate_dataset(config(model, tmp_path / "set", dataset=table), table)


def test_flags_give_what_all_rows_share(model: Path, tmp_path: Path) -> None:
    table = rewritten(tmp_path / "seeds.json", [{"seed": 1}, {"seed": 2}])
    given = (NamedInput("prompt", "cat"),)
    generate(
        config(model, tmp_path / "set", dataset=table, input=given, height=8, width=24)
    )
    generate(
        config(model, tmp_path / "one.png", prompt="cat", seed=2, height=8, width=24)
    )
    assert equal(
        tmp_path / "one.png", tmp_path / "set" / made(tmp_path / "set")[1]["image"]
    )


def trajectories(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "trajectory").iterdir()}


def test_trajectories_are_what_the_sampler_passed_through_from_the_rows_noise(
    model: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many steps as the student has, every state is stored as it was."""
    seen: list[Any] = []
    call = Pipeline.__call__

    def noticing(self: Pipeline, on_step: Any, **arguments: Any) -> Any:
        return call(
            self, on_step=lambda i, x: (seen.append(x), on_step(i, x)), **arguments
        )

    monkeypatch.setattr(Pipeline, "__call__", noticing)
    rows = [{**ROWS[0], "num_inference_steps": 3}]
    rewritten(table, rows)
    generate(config(model, tmp_path / "set", dataset=table, trajectory=True))
    (row,) = made(tmp_path / "set")
    latents = load_file(tmp_path / "set" / row["trajectory"])["latents"]
    noise = seeded_noise(seen[0].shape, 3)
    states = [noise, *seen]
    assert len(states) == 4
    assert all(latents[:, i].equal(state) for i, state in enumerate(states))


def test_trajectories_are_added_to_images_that_are_there_and_kept(
    model: Path, table: Path, tmp_path: Path, loads: list[Pipeline]
) -> None:
    folder = tmp_path / "set"
    generate(config(model, folder, dataset=table))
    before = images(folder)
    generate(config(model, folder, dataset=table, trajectory=True))
    assert (len(loads), images(folder)) == (6, before)
    stored = trajectories(folder)
    assert [row["trajectory"] for row in made(folder)] == [
        f"trajectory/{Path(row['image']).stem}-{row['num_inference_steps']}.safetensors"
        for row in made(folder)
    ]
    rewritten(table, [{**ROWS[0], "num_inference_steps": 1}, *ROWS[1:]])
    generate(config(model, folder, dataset=table, trajectory=True))
    assert (len(loads), images(folder)) == (7, before)
    assert stored.items() < trajectories(folder).items()
    generate(config(model, folder, dataset=table, trajectory=True))
    assert len(loads) == 7


def test_a_table_with_trajectories_or_without_steps_is_refused(
    model: Path, tmp_path: Path
) -> None:
    for row, what in (
        ({"num_inference_steps": 2, "trajectory": "a"}, "has a column 'trajectory'"),
        ({}, "has no column 'num_inference_steps'"),
    ):
        bad = rewritten(tmp_path / "bad.json", [{"prompt": "dog", "seed": 1, **row}])
        with pytest.raises(UsageError, match=what):
            generate(config(model, tmp_path / "set", dataset=bad, trajectory=True))
    assert not (tmp_path / "set/generated.json").exists()
