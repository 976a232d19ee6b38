"""Processes send each other what is trained, and nothing of what all have read."""

import os
from pathlib import Path

import pytest
import torch
from dstrain import Batch, TrainingModule
from torch import Tensor

from tests.support.processes import in_processes
from tests.support.runs import project, train


class Apart(TrainingModule):
    """Its frozen weights differ between the processes, and gloo cannot send one."""

    def switch_to_training_mode(self, *arguments: object) -> None:
        super().switch_to_training_mode(*arguments)
        rank = int(os.environ["RANK"])
        network = self.pipeline.components["dit"]
        for parameter in network.parameters():
            parameter.data.fill_(rank)
        network.register_buffer("table", torch.full((1,), rank), persistent=False)
        network.time.bias.data = network.time.bias.data.to(torch.float8_e4m3fn)

    def forward(self, batch: Batch) -> Tensor:
        """Look what the other processes have changed."""
        rank = int(os.environ["RANK"])
        network = self.networks["dit"]
        for parameter in network.parameters():
            wanted = 0 if parameter.requires_grad else rank
            assert (parameter.float() == wanted).all()
        assert network.table.item() == rank
        network.time.bias.data = network.time.bias.data.float()
        return super().forward(batch)


@pytest.mark.usefixtures("tiny")
def test_frozen_weights_are_not_sent_even_such_that_cannot_be(tmp_path: Path) -> None:
    here = project(tmp_path / "project")

    def work(rank: int) -> None:
        train(here, Apart, max_steps=1)

    ended = in_processes(2, work, tmp_path)
    assert ended.codes == (0, 0), ended.said
