"""What a training run is built from: its steps, its learning rates, what is loaded how."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dstrain import TrainConfig, UsageError
from dstrain.runs import open_training_data
from dstrain.runs.build import total_steps
from dstrain.runs.resolve import resolve
from torch import nn

from tests.support.runs import config, project, training_run


def test_the_start_of_a_run_does_not_import_transformers() -> None:
    code = "import sys, dstrain.runs.runner; print('transformers' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("epochs", "most", "want"),
    [(None, None, 7), (3, None, 21), (None, 5, 5), (2, 5, 5), (2, 50, 14)],
)
def test_the_smaller_of_epochs_and_steps_ends_a_run(
    epochs: int | None, most: int | None, want: int
) -> None:
    settings = TrainConfig(model="tiny", num_epochs=epochs, max_steps=most)
    assert total_steps(settings, 7) == want


@pytest.fixture
def here(tiny: None, tmp_path: Path) -> Path:
    return project(tmp_path)


def test_rows_of_one_signature_share_a_group(here: Path) -> None:
    data = open_training_data(resolve(config(here)))
    assert data.groups.tolist() == [0, 1, 0, 1, 0, 1]  # two sizes, in turns
    assert data.sample_ids.tolist() == [[row, 0] for row in range(6)]
    assert data.cache_info is None


def test_what_is_trained_in_full_is_fp32_and_the_rest_is_not(here: Path) -> None:
    run = training_run(config(here, trainable_models="dit", mixed_precision="bf16"))
    dtypes = {
        name: next(module.parameters()).dtype
        for name, module in run.module.pipeline.components.items()
        if isinstance(module, nn.Module) and list(module.parameters())
    }
    assert dtypes.pop("dit") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}


def test_checkpointing_is_refused_for_a_trained_network_that_has_none(
    here: Path,
) -> None:
    settings = config(here, trainable_models="vae.encoder")
    with pytest.raises(UsageError):
        training_run(
            TrainConfig(**{**vars(settings), "use_gradient_checkpointing": True})
        )
