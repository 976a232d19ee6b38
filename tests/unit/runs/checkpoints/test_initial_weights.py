"""--resume_from_checkpoint: saved weights begin a new run, or it is said why not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import StateError, UsageError
from dstrain.storage import CHECKSUM, read_tensors, write_tensors

from tests.support.runs import config, files, log, train, training_run

LORA: Mapping[str, Any] = {}
FULL = {"trainable_models": "dit"}
BOTH = {"trainable_models": "text_encoder", "lora_base_model": "dit"}
KINDS = {"lora": LORA, "full": FULL, "both": BOTH}


@pytest.fixture(scope="module")
def saved(here: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What is trained -> the output folder of a run of two steps."""
    return {
        name: train(
            here, output_path=tmp_path_factory.mktemp(name), max_steps=2, **flags
        )
        for name, flags in KINDS.items()
    }


def changed(path: Path, to: Path, drop: str = "", **header: str) -> Path:
    """A copy of a weights file with another header, sealed anew; '' drops an entry."""
    tensors, printed = read_tensors(path)
    entries = {**printed, **header}
    entries = {name: value for name, value in entries.items() if value}
    entries.pop(CHECKSUM)
    kept = {name: one for name, one in tensors.items() if not drop or drop not in name}
    write_tensors(to, kept, entries, checksum=True)
    return to


@pytest.mark.parametrize("name", KINDS)
def test_a_run_begins_from_the_weights_with_a_new_optimizer_at_step_0(
    name: str, here: Path, saved: dict[str, Path], tmp_path: Path
) -> None:
    paths = sorted(saved[name].glob("*.safetensors"))
    start = {"resume_from_checkpoint": Path(",".join(map(str, paths))), **KINDS[name]}
    ready = training_run(config(here, learning_rate=1e-3, **start))
    assert (ready.step, ready.learning_rate) == (0, 1e-3)
    assert ready.optimizer.state_dict()["state"] == {}
    for path in paths:
        tensors, header = read_tensors(path)
        component = header["component"]
        network = ready.module.pipeline.components[component].state_dict()
        if component in ready.module.trained.lora:
            network = {
                f"transformer.{name.replace('.default.', '.')}": value
                for name, value in network.items()
            }
        assert all(torch.equal(network[name], one) for name, one in tensors.items())
    plain = training_run(config(here, **KINDS[name])).module.trained.parameters
    begun = ready.module.trained.parameters
    assert any(not torch.equal(begun[name], value) for name, value in plain.items())
    out = train(here, output_path=tmp_path, max_steps=1, **start)
    assert [row["step"] for row in log(out)] == [1]
    assert len(files(out)) == len(paths)


MORE = {"config": '{"width": 8, "depth": 2, "dropout": 0.0, "heads": 2}'}
DEEPER = {"config": '{"width": 8, "depth": 3, "dropout": 0.0}'}
REFUSED: dict[str, tuple[str, dict[str, str] | None, Mapping[str, Any], str]] = {
    "another component": ("full", {"component": "vae"}, FULL, "vae.* dit"),
    "another family": ("full", {"family": "huge"}, FULL, "huge.* tiny"),
    "no component": ("full", {"component": ""}, FULL, "component"),
    "LoRA for full": ("lora", None, FULL, "LoRA layers of dit.* all of dit"),
    "full for LoRA": ("full", None, LORA, "all of dit.* LoRA layers of dit"),
    "another configuration": ("full", DEEPER, FULL, "depth: .*3.*2"),
    "another entry": ("full", MORE, FULL, "heads: .*2"),
    "missing weights": ("full", {"drop": "blocks.1"}, FULL, "Dit"),
    "another rank": ("lora", None, {"lora_rank": 4}, "rank"),
    "other layers": ("lora", None, {"lora_target_modules": "to_q"}, "to_out"),
}
"""The file, what is changed in it, the flags of the new run, and what is named."""


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_do_not_fit_are_refused_by_name(
    name: str, here: Path, saved: dict[str, Path], tmp_path: Path
) -> None:
    source, change, flags, named = REFUSED[name]
    path = saved[source] / "step-2.safetensors"
    if change is not None:
        path = changed(path, tmp_path / "changed.safetensors", **change)
    given = {"output_path": tmp_path / "out", "resume_from_checkpoint": path, **flags}
    with pytest.raises(StateError, match=named) as caught:
        train(here, max_steps=1, **given)
    assert str(path) in caught.value.where or name == "missing weights"
    assert not files(tmp_path / "out")


@pytest.mark.parametrize("path", ["nothing.safetensors", "states/step-2", ""])
def test_what_is_no_weights_file_is_refused(
    path: str, here: Path, saved: dict[str, Path], tmp_path: Path
) -> None:
    given = {"output_path": tmp_path / "out", **FULL}
    with pytest.raises(StateError, match="--resume_from_checkpoint") as caught:
        train(here, resume_from_checkpoint=saved["full"] / path, **given)
    assert caught.value.where == str(saved["full"] / path)
    assert not files(tmp_path / "out")


def test_two_files_of_one_component_and_two_ways_to_fill_lora_are_refused(
    here: Path, saved: dict[str, Path], tmp_path: Path
) -> None:
    path = saved["lora"] / "step-2.safetensors"
    with pytest.raises(UsageError, match=f"dit.*{path}") as caught:
        train(here, output_path=tmp_path, resume_from_checkpoint=Path(f"{path},{path}"))
    assert caught.value.where == "--resume_from_checkpoint"
    both = {"resume_from_checkpoint": path, "lora_checkpoint": path}
    with pytest.raises(UsageError, match="--resume_from_checkpoint") as caught:
        train(here, output_path=tmp_path, **both)
    assert caught.value.where == "--lora_checkpoint"


def test_a_preset_is_not_dropped_where_weights_take_the_place_of_what_it_is_for(
    here: Path, saved: dict[str, Path]
) -> None:
    lora, full = (saved[name] / "step-2.safetensors" for name in ("lora", "full"))
    with pytest.raises(UsageError, match=str(full)) as caught:
        training_run(
            config(here, resume_from_checkpoint=full, preset_lora_path=lora, **FULL)
        )
    assert caught.value.where == "--preset_lora_path"
    training_run(config(here, resume_from_checkpoint=lora, preset_lora_path=lora))
