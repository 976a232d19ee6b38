"""One variant at toy sizes: its files, its rows, and what a run of it trains."""

from pathlib import Path

import torch
from dstrain.testing.family_under_test import FamilyUnderTest, gradients_enabled
from dstrain.testing.trained_sets import TrainedSet
from torch import nn


def test_the_toy_is_written_once_and_found_by_component(fine: FamilyUnderTest) -> None:
    assert not fine.model.exists()
    assert set(fine.files) == {"dit", "text_encoder", "vae"}
    assert all(path.is_file() for paths in fine.files.values() for path in paths)
    before = fine.model.stat().st_mtime_ns
    assert fine.models is fine.models
    assert fine.model.stat().st_mtime_ns == before


def test_a_project_has_the_components_asked_for_and_nothing_else(
    fine: FamilyUnderTest, tmp_path: Path
) -> None:
    (model,) = fine.alone(["vae"], tmp_path / "alone")
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["vae"]
    assert [Path(path).resolve() for path in model.path] == [*fine.files["vae"]]


def test_another_file_takes_the_place_of_one_components(
    fine: FamilyUnderTest, tmp_path: Path
) -> None:
    other = tmp_path / "other.safetensors"
    named = {str(path) for model in fine.with_file("vae", other) for path in model.path}
    kept = {
        str(path)
        for name, paths in fine.files.items()
        if name != "vae"
        for path in paths
    }
    assert named == {str(other), *kept}


def test_batches_have_rows_of_one_group_and_every_trained_layer_is_reached(
    fine: FamilyUnderTest,
) -> None:
    run = fine.run(fine.setup(TrainedSet(lora="dit")))
    groups = [
        {run.samples.groups[key.row] for key in batch} for batch in run.batches(2)
    ]
    assert groups and all(len(group) == 1 for group in groups)
    reached = run.reached(run.module.networks["dit"])
    assert set(reached) == {
        name.removeprefix("dit.") for name in run.module.trained.parameters
    }
    assert run.losses(run.batches(1)[0]).shape == (1,)


def test_gradients_are_asked_for_only_meanwhile() -> None:
    network = nn.Linear(2, 2)
    network.bias.requires_grad_(False)
    with gradients_enabled(network):
        network(torch.ones(1, 2)).sum().backward()
        assert network.bias.grad is not None
    assert (network.weight.requires_grad, network.bias.requires_grad) == (True, False)
    assert network.weight.grad is None and network.bias.grad is None
