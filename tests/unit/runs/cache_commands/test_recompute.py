"""`dstrain cache verify --recompute` compares what is stored with what is computed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import Frames, StateError, UsageError
from dstrain.cache import exclusive, readers
from dstrain.runs import recompute
from dstrain.runs.cache_commands.recompute import compare, spread
from safetensors.torch import load_file, save_file

from tests.support.caching_project import noise_image
from tests.support.runs import project, train, weights_of

Printed = pytest.CaptureFixture[str]
ONE = torch.ones(2, 3)
VAE = "model/vae/model-1-of-1.safetensors"


@pytest.fixture(scope="module")
def here(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project whose cache is filled; a test that changes it puts it back."""
    folder = project(tmp_path_factory.mktemp("project"))
    train(folder, task="sft:data_process", feature_cache=folder / "cache")
    yield folder


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (ONE.clone(), ""),
        (ONE + torch.tensor([0.0, 0.0, 0.5]), "largest difference 0.5"),
        (ONE * float("nan"), "largest difference inf"),
        (ONE.bfloat16(), "stored torch.float32 [2, 3], computed torch.bfloat16 [2, 3]"),
        (ONE[:1], "stored torch.float32 [2, 3], computed torch.float32 [1, 3]"),
        ("text", "stored torch.float32 [2, 3], computed none"),
    ],
)
def test_values_are_compared_bit_for_bit(other: Any, words: str) -> None:
    assert compare(ONE, other) == words


def test_every_kind_of_value_can_be_compared() -> None:
    image = noise_image(1)
    record = {"a": [ONE, "x"], "b": image, "c": Frames(ONE.byte(), 8.0)}
    assert compare(record, {**record, "a": [ONE.clone(), "x"]}) == ""
    assert "largest difference" in compare(image, noise_image(2))
    assert "stored" in compare(record, {**record, "a": [ONE, "y"]})
    assert compare("dog", "cat") == "stored 'dog', computed 'cat'"
    assert compare(torch.zeros(1), -torch.zeros(1)) == "largest difference 0"


def test_samples_are_spread_and_chosen_by_the_seed() -> None:
    assert spread(3, 5, 0) == [0, 1, 2]
    found = spread(1000, 10, 0)
    assert [number // 100 for number in found] == list(range(10))
    assert found == spread(1000, 10, 0) != spread(1000, 10, 1)


def test_what_stage_1_stored_is_what_is_computed(here: Path, capsys: Printed) -> None:
    recompute(here / "cache", 4, 0, [], {})
    printed = capsys.readouterr().out
    assert "recomputed 4 of 6 samples; 12 of 12 values are equal" in printed


def test_a_value_that_differs_is_named_with_its_row(
    here: Path, capsys: Printed
) -> None:
    path = here / VAE
    whole = path.read_bytes()
    weights = {name: value * 1.001 for name, value in load_file(path).items()}
    try:
        save_file(weights, path)
        with pytest.raises(StateError, match="has changed"):
            recompute(here / "cache", 2, 0, [], {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "dstrain.runs.cache_commands.recompute.check_components",
                lambda *_: None,
            )
            with pytest.raises(StateError, match="differ from what was computed"):
                recompute(here / "cache", 2, 0, [], {})
    finally:
        path.write_bytes(whole)
    printed = capsys.readouterr().out
    assert printed.count("input_latents: largest difference") == 2
    assert printed.startswith("metadata.json:")
    assert "prompt_emb" not in printed


def test_it_is_a_reader_under_which_nothing_is_removed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def look(*given: object) -> None:
        seen.append(len(readers(here / "cache")))

    monkeypatch.setattr("dstrain.runs.cache_commands.recompute.check_components", look)
    recompute(here / "cache", 1, 0, [], {})
    assert seen == [1]
    assert readers(here / "cache") == []
    with (
        exclusive(here / "cache"),
        pytest.raises(StateError, match="values are being removed"),
    ):
        recompute(here / "cache", 1, 0, [], {})


def test_models_and_data_may_be_elsewhere(here: Path, capsys: Printed) -> None:
    (here / "data").rename(here / "moved")
    (here / "model").rename(here / "model_2")
    try:
        with pytest.raises((UsageError, StateError)):
            recompute(here / "cache", 2, 0, [], {})
        paths = json.dumps(list(weights_of(here / "model_2").values()))
        places = {"dataset_base_path": here / "moved", "model_paths": paths}
        recompute(here / "cache", 2, 0, [], places)
        del places["model_paths"]
        places["model_id"] = str(here / "model_2")
        recompute(here / "cache", 2, 0, [], places)
    finally:
        (here / "moved").rename(here / "data")
        (here / "model_2").rename(here / "model")
    assert capsys.readouterr().out.count("6 of 6 values are equal") == 2


def test_other_metadata_is_refused(here: Path) -> None:
    path = here / "data/metadata.json"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"cat", b"cow"))
    try:
        with pytest.raises(StateError, match="is not the dataset"):
            recompute(here / "cache", 2, 0, [], {})
    finally:
        path.write_bytes(whole)
