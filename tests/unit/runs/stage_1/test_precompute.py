"""Stage 1 computes each value once, what changed and nothing else."""

import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dstrain import Pipeline, StateError, UsageError
from dstrain.cache import ShardWriter
from dstrain.runs import data_process
from dstrain.storage import temporary

from tests.support import caching_family
from tests.support.caching_family import runs
from tests.support.caching_project import (
    Place,
    change_weights,
    log_units,
    noise_image,
    together,
    write_place,
    write_rows,
)

ALL = Counter({"encode_prompt": 3, "describe": 3, "encode_image": 4})


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_units(monkeypatch, tmp_path)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return write_place(tmp_path / "place")


def test_each_different_input_is_computed_once_and_what_nobody_needs_never(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is no file of the denoiser.
    assert not list(place.folder.rglob("dit*"))
    monkeypatch.setattr("dstrain.runs.stage_1.keyed_samples.BATCH_ROWS", 3)
    assert place.fill() == ALL  # 4 images; 3 prompts in 4 rows; unit `idle` not at all
    assert place.fill() == Counter()


def test_what_is_new_is_work_of_the_first_row_that_needs_it(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the components that compute it are loaded."""
    caplog.set_level("INFO")
    place.fill()
    noise_image(9).save(place.data / "new.png")
    noise_image(10).save(place.data / "newer.png")
    first, *_ = place.rows
    new = {**first, "image": "new.png"}
    write_rows(place.data, [first, new, {**new, "image": "0.png"}])
    caplog.clear()
    assert place.fill() == {"encode_image": 1}
    assert "loading vae" in caplog.messages
    write_rows(place.data, [{**new, "image": "newer.png", "prompt": "new"}, new])
    assert place.fill() == {"encode_image": 1, "encode_prompt": 1, "describe": 1}
    assert "loading text_encoder, tokenizer, vae" in caplog.messages


def test_what_processes_left_that_saw_other_files_is_computed_in_the_end(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process believes that its part is there."""
    monkeypatch.setattr("dstrain.runs.stage_1.computing.VISIBLE", 0.0)
    place.fill(feature_cache=place.folder / "seen by the second")
    (place.data / "0.png").touch()
    setups = [
        place.setup(),
        place.setup(feature_cache=place.folder / "seen by the second"),
    ]
    together(2, lambda one: data_process(setups[one.rank], one))
    assert runs() == ALL
    assert len(place.values()) == 4


def test_a_damaged_plan_is_refused_before_anything_is_computed(place: Place) -> None:
    """And after marks of processes that died were removed."""
    place.fill()
    mark = place.cache / ".reading-node-7-0123abcd.json"
    mark.touch()
    os.utime(mark, (1, 1))
    place.plans[0].write_bytes(b"{}")
    noise_image(9).save(place.data / "0.png")
    with pytest.raises(StateError) as caught:
        place.fill()
    assert caught.value.where == str(place.plans[0])
    assert runs() == {} and not mark.exists()


def test_a_cache_can_be_read_while_it_is_filled(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.fill()
    want = place.values()
    write = ShardWriter.flush
    seen = []

    def flush(writer: ShardWriter) -> None:
        temporary(place.cache / "shards/half.safetensors").write_bytes(b"half")
        temporary(place.cache / "plans/half.jsonl").write_bytes(b"half")
        seen.append(place.values())
        write(writer)
        seen.append(place.values())

    monkeypatch.setattr(ShardWriter, "flush", flush)
    (place.folder / "new").mkdir()
    write_rows(place.folder / "new", [{"image": "0.png", "prompt": "new"}])
    place.fill(dataset_metadata_path=place.folder / "new/metadata.csv")
    assert seen == [want, want]


def test_a_secret_in_a_row_of_either_dataset_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = shutil.copytree(place.data, place.folder / "second")
    write_rows(second, [{"image": "0.png", "prompt": "with v4lue-of-it"}])
    monkeypatch.setenv("HF_TOKEN", "v4lue-of-it")
    with pytest.raises(UsageError, match="HF_TOKEN") as caught:
        place.fill(validation_dataset_base_path=second)
    assert "metadata.csv:2:prompt" in caught.value.where


@pytest.mark.parametrize("what", ["0.png", "vae"])
def test_a_file_that_changes_after_its_key_was_made_stops_stage_1(
    place: Place, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    load = Pipeline.from_found

    def late(*arguments: Any, **named: Any) -> Any:
        if what == "vae":
            change_weights("vae", place)
        else:
            noise_image(7).save(place.data / what)
        return load(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "from_found", late)
        with pytest.raises(StateError, match=what):
            place.fill()
    # Nothing was stored under a key that is not its own.
    assert place.fill()["encode_image"] == 4
    fresh = place.values()
    assert place.fill(feature_cache=place.folder / "fresh") == ALL
    assert place.values(feature_cache=place.folder / "fresh") == fresh


def test_what_was_computed_before_a_refusal_is_kept_and_the_row_is_named(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also in the log in the feature cache, which has every fill."""
    caplog.set_level("INFO", "dstrain")
    bad = place.rows[2]["prompt"]

    def lossy(prompt: str, *, dit_config: Any) -> caching_family.Description:
        made = caching_family.describe(prompt, dit_config=dit_config)
        if prompt == bad:
            made["title"] = np.str_("a")
        return made

    lossy.__name__ = "describe"
    others = [one for one in caching_family.UNITS if one is not caching_family.describe]
    with monkeypatch.context() as patch:
        patch.setattr(caching_family, "UNITS", (lossy, *others))
        patch.setattr(caching_family, "VERSIONS", {"describe": 1})
        with pytest.raises(UsageError, match=r"describe.*'title'") as caught:
            place.fill()
    assert caught.value.where == "metadata.csv:4"
    runs()
    again = place.fill()
    assert sum(again.values()) < sum(ALL.values())
    assert again["encode_image"] == 2
    log = (place.cache / "dstrain.log").read_text()
    assert re.findall(r" (\d) of 4 samples", log) == ["4", "4"]
    assert re.findall("ERROR.*metadata.csv:(.)", log) == ["4"]
