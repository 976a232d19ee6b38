"""Resume exactly: what a state contains, and how it is put back."""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from dstrain.console import get_logger
from dstrain.errors import StateError, first_few
from dstrain.runs.checkpoints.other_run import refuse_other_run
from dstrain.runs.checkpoints.run_identity import config_digest
from dstrain.runs.checkpoints.state import TrainingState, load_state
from dstrain.runs.training_run import TrainingRun
from dstrain.training import Position
from dstrain.training.sharded_networks import read_own_rows

logger = get_logger(__name__)


OF_PARAMETER = re.compile(r"optimizer/state/(\d+)/")
"""Names of an optimizer's tensors that belong to its parameter of this number."""


def training_state(run: TrainingRun, content: Mapping[str, str]) -> TrainingState:
    """Return what a run needs to resume exactly.

    There is no generator state, since every draw is keyed by its place.
    """
    parameters = run.module.trained.parameters
    return TrainingState(
        step=run.step,
        trainable={
            name: value.detach()
            for name, value in {**parameters, **run.module.trained_buffers}.items()
        },
        optimizer=run.optimizer.state_dict(),
        scheduler=run.lr_scheduler.state_dict(),
        config_digest=config_digest(run),
        versions=run.setup.versions,
        content=content,
        average=run.ema.tensors,
        average_facts=run.ema.facts,
        position=asdict(run.position) if run.position else {},
        observers=run.keep(),
    )


def read_state(run: TrainingRun, folder: Path) -> TrainingState:
    """Read a state; where the run is sharded, of each tensor this process's rows."""
    if not run.is_sharded:
        return load_state(folder)
    trained = run.module.trained.parameters
    groups = run.optimizer.param_groups
    numbered = [parameter for group in groups for parameter in group["params"]]

    def owner_of(name: str) -> nn.Parameter | None:
        found = OF_PARAMETER.match(name)
        return numbered[int(found[1])] if found else trained.get(name)

    return load_state(folder, lambda path: read_own_rows(path, owner_of))


@torch.no_grad()
def load_training_state(
    run: TrainingRun, state: TrainingState, content: Mapping[str, str]
) -> None:
    """Put a saved state back, bit for bit; raises StateError if it is of another run,
    or of another dataset.
    """
    refuse_other_run(run, state.config_digest, state.content, content)
    # That of states from before units had versions, whose keys followed another rule.
    if "cached values" in state.content:
        logger.warning("an older version saved this state: values are not compared")
    parameters = run.module.trained.parameters
    buffers = run.module.trained_buffers
    own = {name: parameter.shape for name, parameter in parameters.items()}
    saved = {name: tensor.shape for name, tensor in state.trainable.items()}
    saved = {name: shape for name, shape in saved.items() if name not in buffers}
    if saved != own:
        names = [name for name in saved | own if saved.get(name) != own.get(name)]
        what = f"the saved run trains others, or of other shapes: {first_few(names)}"
        raise StateError("--resume", what)
    for name, parameter in parameters.items():
        parameter.copy_(state.trainable[name])
    for name, buffer in buffers.items():
        # States of networks that had none lack it.
        if name in state.trainable:
            buffer.copy_(state.trainable[name])
    run.optimizer.load_state_dict(state.optimizer)
    run.lr_scheduler.load_state_dict(state.scheduler)
    _load_average(run, state)
    run.step = state.step
    run.observer_states = state.observers
    if state.position:
        run.passed = deque([Position(**state.position)])


def _load_average(run: TrainingRun, state: TrainingState) -> None:
    """Continue the average of the saved run; where it kept none, begin one with the
    weights of the state.
    """
    averaged = run.ema
    if not state.average_facts:
        averaged.restart()
        return
    decay = float(state.average_facts["decay"])
    if not averaged:
        logger.info(f"without --ema_decay {decay:g}, the average of the run ends here")
        return
    if decay != averaged.decay:
        what = f"--ema_decay: saved {decay:g}, this run {averaged.decay:g}"
        raise StateError("--resume", what, "give it as saved, or leave it out")
    averaged.load(state.average, int(state.average_facts["steps"]))
