"""Processes send each other what is trained, and nothing of what all have read."""

import os
from pathlib import Path

import pytest
import torch
from dstrain import TrainingModule
from dstrain.distributed import ProcessGroup
from dstrain.runs import open_training_data, prepare
from dstrain.runs.launch.start import meet
from dstrain.runs.resolve import resolve
from dstrain.training.copies import frozen_names
from torch.nn.parallel import DistributedDataParallel

from tests.support.processes import in_processes
from tests.support.runs import config, project, training_run

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


def test_what_is_frozen_is_named(here: Path) -> None:
    module = training_run(config(here)).module
    names = frozen_names(module)
    of = dict(module.named_parameters())
    assert names
    assert {name for name in of if name not in names} == {
        f"networks.{name}" for name in module.trained.parameters
    }
    network = module.networks["dit"]
    network.register_buffer("table", torch.ones(1), persistent=False)
    network.register_buffer("mean", torch.ones(1))
    assert set(frozen_names(module)) - set(names) == {"networks.dit.table"}


class Apart(TrainingModule):
    """Its frozen weights differ between the processes, and gloo cannot send one."""

    def switch_to_training_mode(self, *arguments: object) -> None:
        """Change frozen and trained weights by the process's number."""
        super().switch_to_training_mode(*arguments)
        rank = int(os.environ["RANK"])
        first = True
        for parameter in self.pipeline.components["dit"].parameters():
            parameter.data.fill_(rank)
            if not parameter.requires_grad and first:
                parameter.data = parameter.data.to(torch.float8_e4m3fn)
                first = False


def test_frozen_weights_are_not_sent_even_such_that_cannot_be(
    here: Path, tmp_path: Path
) -> None:
    def work(rank: int) -> None:
        setup = resolve(config(here))
        processes = ProcessGroup(meet(os.environ, None, False, 1))
        run = prepare(setup, processes, open_training_data(setup), Apart)
        assert isinstance(run.model, DistributedDataParallel)
        for parameter in run.module.networks["dit"].parameters():
            wanted = 0 if parameter.requires_grad else rank
            assert (parameter.float() == wanted).all()

    ended = in_processes(2, work, tmp_path)
    assert ended.codes == (0, 0), ended.said
