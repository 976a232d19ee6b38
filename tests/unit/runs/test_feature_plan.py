"""Stage 2 finds the plan it asks for, or says in words what differs and how to refill."""

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import SFT, StateError, Task
from dstrain.cache import FeatureCache
from dstrain.models import Found
from dstrain.runs import feature_plan
from dstrain.runs.feature_plan import CacheInfo, check_configs
from dstrain.runs.plan_identity import plan_identity

from tests.support import caching_family
from tests.support.caching_family import GUIDED
from tests.support.caching_project import (
    Place,
    log_units,
    noise_image,
    write_place,
    write_rows,
)


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_units(monkeypatch, tmp_path)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return write_place(tmp_path / "place")


def refusal(
    place: Place, task: Task = SFT, variant: str = "base", **config: Any
) -> str:
    with pytest.raises(StateError) as caught:
        place.stored(task, variant, **config)
    assert caught.value.exit_code == 3
    return str(caught.value)


def titles(place: Place, **config: Any) -> list[str]:
    return [values["title"][1] for values in place.values(**config)]


def test_a_folder_that_is_no_cache_is_refused_with_the_command_that_fills_it(
    place: Place,
) -> None:
    words = refusal(place)
    assert f"{place.cache}: is not a feature cache" in words
    assert "with --feature_cache" in words


def test_a_cache_that_was_never_finished_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            "dstrain.runs.stage_1.precompute.write_plan",
            lambda *_: (_ for _ in ()).throw(KeyboardInterrupt),
        )
        with pytest.raises(KeyboardInterrupt):
            place.fill()
    assert place.shards
    words = refusal(place)
    assert "contains no plan for this run" in words
    assert "no finished plan" in words


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"variant": "other"}, "variant: cache base, this run other"),
        (
            {"height": 16, "width": 16},
            "--height: cache None, this run 16; --width: cache None, this run 16",
        ),
        ({"max_pixels": 4096}, "--max_pixels: cache 1048576, this run 4096"),
        ({"mixed_precision": "bf16"}, "dtype: cache float32, this run bfloat16"),
        ({"data_file_keys": "image"}, "--data_file_keys: cache None, this run image"),
        ({"task": GUIDED}, "task: cache sft, this run guided"),
    ],
)
def test_a_cache_of_another_plan_is_refused_in_words(
    place: Place, asked: dict[str, Any], words: str
) -> None:
    place.fill()
    assert words in refusal(place, **asked)


def test_other_values_stored_are_named(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.fill()
    monkeypatch.setattr(caching_family, "UNITS", caching_family.UNITS[:3])
    assert len(place.stored().rows) == 4  # a unit nobody needs makes no difference
    setup = place.setup()
    input_sets = [frozenset(setup.dataset.rows[0])]
    cached_values = set(plan_identity(setup, input_sets)["cached values"])
    task = Task.of("sft", needs_less)
    assert "cached values: cache ['facts'," in refusal(place, task)
    assert "input_latents" in cached_values


def describe_anew(prompt: str, *, dit_config: Any) -> caching_family.Description:
    """A unit in the place of `describe`."""
    return caching_family.describe(prompt, dit_config=dit_config)


def test_a_unit_of_one_side_alone_is_named_without_its_record(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.fill()
    first, _, *others = caching_family.UNITS
    monkeypatch.setattr(caching_family, "UNITS", (first, describe_anew, *others))
    words = refusal(place)
    assert "unit describe: in the cache alone" in words
    assert "unit describe_anew: in this run alone" in words
    assert "reads" not in words


def test_a_long_list_of_differences_is_cut(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.fill()
    monkeypatch.setattr(feature_plan, "MOST_FACTS", 2)
    words = refusal(place, variant="other", height=16, width=16, max_pixels=8)
    assert "variant: cache base, this run other; " in words
    assert "; and 2 more\n" in words


def needs_less(predict: Any) -> Any:
    """A loss that reads no latents."""


@pytest.mark.parametrize(
    "knobs",
    [
        {
            "learning_rate": 1.0,
            "num_epochs": 3,
            "dataset_repeat": 9,
            "batch_size": 4,
            "seed": 3,
        },
        {
            "use_gradient_checkpointing": True,
            "min_timestep_boundary": 0.2,
            "max_timestep_boundary": 0.7,
        },
        {
            "output_path": Path("elsewhere"),
            "dataset_num_workers": 2,
            "gradient_accumulation_steps": 4,
        },
    ],
)
def test_knobs_of_training_are_no_part_of_a_plan_and_stored_with_no_sample(
    place: Place, knobs: dict[str, Any]
) -> None:
    place.fill()
    assert place.values(**knobs) == place.values()
    assert set(place.values()[0]) == set(
        place.setup().plan(frozenset(place.setup().dataset.rows[0])).cached_values
    )


def test_the_nearest_plan_is_the_one_compared(place: Place) -> None:
    place.fill()
    place.fill(variant="other", mixed_precision="bf16")
    words = refusal(place, variant="other", height=16, width=16, mixed_precision="bf16")
    assert "--height" in words
    assert "variant" not in words


def test_stage_2_needs_neither_images_nor_metadata_nor_encoders(place: Place) -> None:
    place.fill()
    want = place.values()
    shutil.rmtree(place.data)
    shutil.rmtree(place.folder / "model")
    assert place.values() == want
    moved = place.folder / "moved"
    shutil.move(place.cache, moved)
    assert place.values(feature_cache=moved) == want
    assert place.values(feature_cache=moved, dataset_base_path=None) == want
    assert place.values(feature_cache=None, dataset_base_path=moved) == want


@pytest.mark.parametrize("named", [True, False])
def test_metadata_that_changed_since_is_refused(place: Place, named: bool) -> None:
    place.fill()
    metadata = {"dataset_metadata_path": place.data / "metadata.csv"} if named else {}
    assert len(titles(place, **metadata)) == 4
    place.rows[0]["prompt"] = "changed"
    write_rows(place.data, place.rows)
    words = refusal(place, **metadata)
    assert (
        f"{place.data / 'metadata.csv'}: is not what the feature cache {place.cache} was filled from, or has changed"
        in words
    )
    place.fill()
    assert titles(place, **metadata)[0] == "Changed"


def test_the_newest_fill_of_a_dataset_is_used(place: Place) -> None:
    place.fill()
    old = (place.data / "metadata.csv").read_bytes()
    write_rows(place.data, place.rows[:2])
    place.fill()
    (place.data / "metadata.csv").unlink()
    assert len(titles(place)) == 2
    (place.data / "metadata.csv").write_bytes(old)
    assert len(titles(place)) == 4
    place.fill()
    (place.data / "metadata.csv").unlink()
    assert len(titles(place)) == 4
    assert len(place.plans) == 2


def test_two_datasets_of_one_plan_must_be_distinguished(
    place: Place, tmp_path: Path
) -> None:
    place.fill()
    second = tmp_path / "second"
    shutil.copytree(place.data, second)
    write_rows(second, place.rows[:1])
    place.fill(dataset_base_path=second)
    nowhere = {"dataset_base_path": None}
    words = refusal(place, **nowhere)
    assert "contains this plan for 2 datasets: " in words
    for folder in (place.data, second):
        assert f"{folder / 'metadata.csv'} with files in {folder}" in words
    assert "--dataset_metadata_path" in words
    assert (
        len(titles(place, **nowhere, dataset_metadata_path=second / "metadata.csv"))
        == 1
    )
    assert len(titles(place)) == 4
    assert len(titles(place, dataset_base_path=second)) == 1


def test_two_datasets_with_equal_metadata_are_distinguished_by_their_place(
    place: Place, tmp_path: Path
) -> None:
    second = tmp_path / "second"
    shutil.copytree(place.data, second)
    noise_image(50).save(second / "0.png")
    place.fill()
    place.fill(dataset_base_path=second)
    first_values, second_values = place.values(), place.values(dataset_base_path=second)
    assert first_values[0]["input_latents"] != second_values[0]["input_latents"]
    assert first_values[1:] == second_values[1:]


def test_a_dataset_that_moved_is_found_by_its_metadata(
    place: Place, tmp_path: Path
) -> None:
    place.fill()
    want = place.values()
    moved = tmp_path / "moved"
    shutil.move(place.data, moved)
    assert place.values(dataset_base_path=moved) == want


def test_values_that_are_gone_are_counted_before_training(place: Place) -> None:
    place.fill()
    for path in place.shards:
        path.unlink()
    words = refusal(place)
    assert "lacks values of 4 of 4 rows; the first is metadata.csv:2" in words


def test_inputs_that_are_no_files_are_stored_in_the_row(place: Place) -> None:
    for row in place.rows:
        row["label"] = "0001"
    write_rows(place.data, place.rows)
    place.fill()
    row = place.stored().rows[0]["values"]
    assert row["label"] == {"value": "0001"}
    assert row["height"] == {"value": 32}


def test_rows_with_other_inputs_keep_their_own_presence_and_signature(
    place: Place,
) -> None:
    place.rows[1]["reference"] = "0.png"
    write_rows(place.data, place.rows)
    place.fill()
    rows = place.stored()
    samples = [rows.sample(row) for row in range(4)]
    assert ["reference" in sample.inputs for sample in samples] == [
        False,
        True,
        False,
        False,
    ]
    assert ["reference" in sample.values for sample in samples] == [
        False,
        True,
        False,
        False,
    ]
    groups = [row["group"] for row in rows.rows]
    assert groups == [0, 1, 0, 0]


def found(**content: Any) -> Found:
    return Found({}, {"dit": content})


def test_a_denoiser_of_another_configuration_is_refused_naming_what_differs() -> None:
    configs = {"dit": {"depth": 3, "axes": [1, 2], "_name_or_path": "a"}}
    about = CacheInfo({}, (), (), {}, configs, {}, {}, {})
    check_configs(
        about, found(depth=3, axes=(1, 2), _name_or_path="b")
    )  # a tuple is a list in JSON
    check_configs(
        about, Found({}, {"vae": {"depth": 1}})
    )  # stage 1 did not read this one
    with pytest.raises(
        StateError,
        match="dit: has another configuration than when the feature cache was filled: depth, extra",
    ):
        check_configs(about, found(depth=4, axes=[1, 2], extra=1))


def test_what_is_recorded_comes_back_and_keeps_the_words_of_the_format(
    place: Place,
) -> None:
    place.fill()
    (stored,) = FeatureCache.open(place.cache).plans()
    about = stored[1]["about"]
    assert list(about) == [
        *("dataset", "columns", "inputs", "components", "configs", "models"),
        *("files", "versions", "previews", "sizes", "config", "repeatable"),
    ]
    info = CacheInfo(**about)
    assert asdict(info) == about
    assert info.dataset["rows"] == len(place.rows)
    assert CacheInfo(
        **{name: value for name, value in about.items() if name != "previews"}
    ) == replace(info, previews=())
