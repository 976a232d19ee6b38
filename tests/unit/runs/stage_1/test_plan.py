"""The plan that stage 1 writes names what stage 2 reads, each file once, and the flags that
make it again.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from dstrain.cache import SourceFiles, open_samples, stored_plans
from dstrain.runs.stage_1.recorded_config import refill_command

from tests.support.caching_project import (
    log_units,
    noise_image,
    write_place,
    write_rows,
)
from tests.support.family import weights_of
from tests.support.runs import project, train


def plan_of(cache: Path) -> tuple[Path, dict[str, Any]]:
    ((path, record),) = stored_plans(cache / "plans")
    return path, record


def test_a_plan_has_a_line_for_each_row_and_each_file_once_by_its_place_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_units(monkeypatch, tmp_path)
    place = write_place(tmp_path / "place")
    other, link = tmp_path / "other", tmp_path / "link"
    for path in (place.data / "deep/4.png", other / "5.png"):
        path.parent.mkdir()
        noise_image(int(path.stem)).save(path)
    link.symlink_to(place.data)
    images = ["0.png", "0.png", str(place.data / "1.png"), str(link / "2.png")]
    images += ["deep/4.png", "5.png"]
    write_rows(place.data, [{"image": image, "prompt": "a"} for image in images])
    place.fill(dataset_root=(other,))
    path, record = plan_of(place.cache)
    rows = open_samples(path.parent, record)
    assert [(line["row"], line["line"]) for line in rows] == [
        (row, row + 2) for row in range(6)
    ]
    files = SourceFiles.open(path.parent, record)
    places = files.table.column("place").to_pylist()
    names = ["0.png", "1.png", "2.png", "5.png", "deep/4.png"]
    assert sorted(places) == [name.encode() for name in names]
    assert files.are_as_recorded([str(place.data), str(other)])


def recorded(folder: Path, **flags: Any) -> dict[str, Any]:
    """The flags that the plan of a new cache in a project records."""
    given = {"task": "sft:data_process", "feature_cache": folder / "cache", **flags}
    given = {"dataset_base_path": Path("data"), "model_paths": None, **given}
    train(folder, **given)
    found: dict[str, Any] = plan_of(folder / "cache")[1]["about"]["config"]
    return found


@pytest.mark.parametrize(
    "flags",
    [{}, {"recipe": "tiny-style-24gb"}, {"task": "sft", "max_steps": 1}],
    ids=["stage 1", "a recipe", "both stages"],
)
@pytest.mark.needs_plugin
def test_the_flags_of_stage_1_are_recorded_with_absolute_paths(
    flags: dict[str, Any], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    project(tmp_path)
    dit, encoder, vae = (
        [str(Path(path).relative_to(tmp_path)) for path in paths]
        for paths in weights_of(tmp_path / "model").values()
    )
    places = {
        "dataset_base_path": "data",
        "dataset_metadata_path": "data/metadata.json",
    }
    given = {
        "dataset_root": (Path("."),),
        "dataset": (json.dumps({**places, "repeats": 2}),),
        "model_paths": json.dumps([dit, encoder[0], vae]),
        "family_options": {"tokenizer_path": "model/tokenizer"},
        "offload_models": f"{vae[0]},text_encoder",
        "max_pixels": 4096,
        "preview_prompt": ("a dog", "a cat"),
        "disabled_plugins": ("other",),
    }
    found = recorded(tmp_path, overwrite=True, **{**given, **flags})
    assert json.loads(found.pop("model_paths")) == [
        [f"{tmp_path}/{path}" for path in dit],
        *(f"{tmp_path}/{path}" for path in (*encoder, *vae)),
    ]
    (dataset,) = map(json.loads, found.pop("dataset"))
    absolute = {name: f"{tmp_path}/{place}" for name, place in places.items()}
    assert dataset == {**absolute, "repeats": 2}
    found.pop("max_steps", None)
    assert found == {
        "model": "tiny",
        "task": "sft:data_process",
        "dataset_base_path": f"{tmp_path}/data",
        "dataset_root": [str(tmp_path)],
        "tokenizer_path": f"{tmp_path}/model/tokenizer",
        "offload_models": "vae,text_encoder",
        "max_pixels": 4096,
        "preview_prompt": ["a dog", "a cat"],
        "learning_rate": 0.01,
        "lora_rank": 2,
        "p": ["no:other"],
    }


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, ""),
        ({"model": "tiny", "trigger_word": "a\n  to fill it, run: x"}, ""),
        ({"model": "tiny", "trigger_word": "\x1b[2J"}, ""),
        ({"model": "$(x)", "toy": True}, "--model '$(x)' --toy"),
        ({"model": "tiny", "feature_cache": "/", "output_path": "/"}, "--model tiny"),
        ({"model": "a", "preview_prompt": ["-b", "c"]}, "--model a --preview_prompt=-b --preview_prompt c"),
        ({"model": "a", "max_pixels": 1, "p": ["no:b"]}, "--model a --max_pixels 1 -p no:b"),
        ({"model": "a", "x": {"b": "'"}}, """--model a --x '{'"'"'b'"'"': "'"'"'"}'"""),
    ],
)  # fmt: skip
def test_recorded_flags_are_a_quoted_command_of_one_line_or_none(
    flags: dict[str, Any], words: str
) -> None:
    command = refill_command(flags, Path("my cache"))
    assert command == (words and f"dstrain --feature_cache 'my cache' {words}")
