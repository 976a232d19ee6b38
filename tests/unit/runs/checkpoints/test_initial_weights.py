"""--resume_from_checkpoint: saved weights begin a new run, or it is said why they
cannot.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import StateError, UsageError
from dstrain.lora.export import export
from dstrain.storage import CHECKSUM, read_tensors, with_checksum, write_tensors

from tests.support.runs import config, files, log, project, train, training_run

pytestmark = pytest.mark.usefixtures("tiny")

LORA: Mapping[str, Any] = {}
FULL = {"trainable_models": "dit"}
BOTH = {"trainable_models": "text_encoder", "lora_base_model": "dit"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def saved(here: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What is trained -> the output folder of a run of two steps."""
    places = {
        name: tmp_path_factory.mktemp("saved") for name in ("lora", "full", "both")
    }
    for name, flags in (("lora", LORA), ("full", FULL), ("both", BOTH)):
        train(here, output_path=places[name], max_steps=2, **flags)
    return places


def changed(path: Path, to: Path, drop: str = "", **header: str) -> Path:
    """A copy of a weights file with another header, sealed anew; '' drops an entry."""
    tensors, printed = read_tensors(path)
    printed = {
        name: value
        for name, value in {**printed, **header}.items()
        if value and name != CHECKSUM
    }
    tensors = {
        name: tensor for name, tensor in tensors.items() if not drop or drop not in name
    }
    write_tensors(to, tensors, with_checksum(tensors, printed))
    return to


@pytest.mark.parametrize(
    ("name", "flags"), [("lora", LORA), ("full", FULL), ("both", BOTH)]
)
def test_a_run_begins_from_the_weights_with_a_new_optimizer_at_step_0(
    name: str, flags: dict[str, Any], here: Path, saved: dict[str, Path], tmp_path: Path
) -> None:
    paths = sorted(saved[name].glob("*.safetensors"))
    given = config(
        here,
        resume_from_checkpoint=Path(",".join(map(str, paths))),
        learning_rate=1e-3,
        **flags,
    )
    ready = training_run(given)
    assert (ready.step, ready.learning_rate, ready.optimizer.state_dict()["state"]) == (
        0,
        1e-3,
        {},
    )
    plain = training_run(config(here, **flags)).module.trained.parameters
    network = {
        name: ready.module.pipeline.components[name].state_dict()
        for name in ready.module.trained.components
    }
    for path in paths:
        tensors, header = read_tensors(path)
        if header["component"] in ready.module.trained.lora:
            own = {
                key.removeprefix("transformer."): tensor
                for key, tensor in tensors.items()
            }
            have = {
                key.replace(".default.", "."): tensor
                for key, tensor in network["dit"].items()
            }
        else:
            own, have = tensors, network[header["component"]]
        assert all(torch.equal(have[key], tensor) for key, tensor in own.items())
    assert any(
        not torch.equal(ready.module.trained.parameters[key], value)
        for key, value in plain.items()
    )
    out = train(
        here,
        output_path=tmp_path,
        max_steps=1,
        resume_from_checkpoint=given.resume_from_checkpoint,
        **flags,
    )
    assert [row["step"] for row in log(out)] == [1]
    assert len(files(out)) == len(paths)


def test_a_start_from_weights_continues_the_loss(
    here: Path, saved: dict[str, Path], tmp_path: Path
) -> None:
    flags = {"learning_rate": 1e-30, "max_steps": 3, **FULL}
    plain = log(train(here, output_path=tmp_path / "plain", **flags))
    started = {"resume_from_checkpoint": saved["full"] / "step-2.safetensors"}
    begun = log(train(here, output_path=tmp_path / "begun", **started, **flags))
    assert [row["loss"] for row in plain] != [row["loss"] for row in begun]


REFUSED: dict[str, tuple[str, dict[str, str] | None, dict[str, Any], str]] = {
    "another component": ("full", {"component": "vae"}, FULL, "contains all of vae, but this run trains all of dit"),
    "another family": ("full", {"family": "huge"}, FULL, "is for family huge, not for tiny"),
    "no component": ("full", {"component": ""}, FULL, "its header does not name its component"),
    "LoRA for full": ("lora", None, FULL, "contains LoRA layers of dit, but this run trains all of dit"),
    "full for LoRA": ("full", None, LORA, "contains all of dit, but this run trains LoRA layers of dit"),
    "another configuration": (
        "full", {"config": '{"width": 8, "depth": 3, "dropout": 0.0}'}, FULL,
        "a different configuration\n  depth: file 3, this run 2",
    ),
    "missing weights": ("full", {"drop": "blocks.1"}, FULL, "these files do not fit Dit"),
    "another rank": ("lora", None, {"lora_rank": 4}, "rank"),
    "other layers": ("lora", None, {"lora_target_modules": "to_q"}, "does not fit"),
}  # fmt: skip
"""The file, what is changed in it, the flags of the new run, and what is said."""


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_do_not_fit_are_refused_by_name(
    name: str, here: Path, saved: dict[str, Path], tmp_path: Path
) -> None:
    source, change, flags, words = REFUSED[name]
    path = saved[source] / "step-2.safetensors"
    if change is not None:
        path = changed(path, tmp_path / "changed.safetensors", **change)
    with pytest.raises(StateError) as caught:
        train(
            here,
            output_path=tmp_path / "out",
            max_steps=1,
            resume_from_checkpoint=path,
            **flags,
        )
    assert words in str(caught.value)
    assert str(path) in caught.value.where or name == "missing weights"
    assert not files(tmp_path / "out")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nothing.safetensors", "no such file"),
        (
            "states/step-2",
            "is a folder; --resume_from_checkpoint takes weights that a run saved",
        ),
        ("", "is a folder"),
    ],
)
def test_what_is_no_weights_file_is_refused_before_any_model_is_loaded(
    path: str,
    words: str,
    here: Path,
    saved: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "dstrain.pipeline.pipeline.Pipeline.from_found",
        lambda *_: pytest.fail("a model is loaded"),
    )
    with pytest.raises(StateError) as caught:
        train(
            here,
            output_path=tmp_path / "out",
            max_steps=1,
            resume_from_checkpoint=saved["full"] / path,
            **FULL,
        )
    assert words in str(caught.value)


def test_two_files_of_one_component_and_two_ways_to_fill_lora_are_refused(
    here: Path, saved: dict[str, Path], tmp_path: Path
) -> None:
    path = saved["lora"] / "step-2.safetensors"
    with pytest.raises(UsageError, match="names two files for dit"):
        train(
            here,
            output_path=tmp_path,
            max_steps=1,
            resume_from_checkpoint=Path(f"{path},{path}"),
        )
    with pytest.raises(UsageError, match="fills the same LoRA layers"):
        train(
            here,
            output_path=tmp_path,
            max_steps=1,
            resume_from_checkpoint=path,
            lora_checkpoint=path,
        )


def test_a_lora_in_the_names_of_another_program_is_a_start_and_no_full_weights(
    here: Path, saved: dict[str, Path], tmp_path: Path
) -> None:
    path, kohya = saved["lora"] / "step-2.safetensors", tmp_path / "kohya.safetensors"
    export(path, kohya, "kohya")
    own, other = (
        training_run(config(here, resume_from_checkpoint=one)).module.trained.parameters
        for one in (path, kohya)
    )
    assert all(torch.equal(own[name], parameter) for name, parameter in other.items())
    with pytest.raises(
        StateError, match="contains LoRA layers of dit, but this run trains all of dit"
    ):
        training_run(config(here, resume_from_checkpoint=kohya, **FULL))


def test_a_preset_is_not_dropped_where_weights_take_the_place_of_what_it_is_for(
    here: Path, saved: dict[str, Path]
) -> None:
    lora, full = (saved[name] / "step-2.safetensors" for name in ("lora", "full"))
    words = (
        rf"--preset_lora_path: cannot be merged into dit: .*{full} replaces all of it"
    )
    with pytest.raises(UsageError, match=words) as caught:
        training_run(
            config(here, resume_from_checkpoint=full, preset_lora_path=lora, **FULL)
        )
    assert (
        "weights that were trained on a preset already include it"
        in caught.value.help_lines[0]
    )
    training_run(config(here, resume_from_checkpoint=lora, preset_lora_path=lora))
