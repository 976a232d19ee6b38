"""Resume exactly: what a state contains, and how it is put back; or start a new run from
saved weights of what is trained: --resume_from_checkpoint.
"""

import json
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from dstrain.config import split_commas
from dstrain.console import get_logger
from dstrain.errors import StateError, UsageError, first_few
from dstrain.lora import is_lora_file
from dstrain.models import Found
from dstrain.models.component_files import saved_weights
from dstrain.models.configs import differing_entries
from dstrain.models.weights import find_weights
from dstrain.runs.checkpoints.run_identity import config_digest, refuse_other_run
from dstrain.runs.checkpoints.state import TrainingState, load_state
from dstrain.runs.setup import Setup
from dstrain.runs.training_run import TrainingRun
from dstrain.storage import verify_file
from dstrain.training import Position
from dstrain.training.sharded_networks import read_own_rows

logger = get_logger(__name__)

FLAG = "--resume_from_checkpoint"

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


def initial_weights(setup: Setup, found: Found) -> tuple[Found, list[Path]]:
    """Return what was found, with the weights that the flag names in place of published
    ones, and the LoRA files that it names.

    Raises StateError, before any model is loaded, for a file that is absent, damaged, of
    something else than what is trained, or of another configuration; names and shapes
    are checked when they are loaded.
    """
    files = dict(found.files)
    loras: list[Path] = []
    components: set[str] = set()
    for name in split_commas(str(setup.config.resume_from_checkpoint or "")):
        path = Path(name)
        header = _read_header(path, setup)
        component = header["component"]
        if component in components:
            raise UsageError(FLAG, f"names two files for {component}; one is {path}")
        components.add(component)
        is_lora = is_lora_file(find_weights((path,)), header)
        _check_trained(path, component, is_lora, setup)
        if not is_lora:
            if setup.preset is not None and component in setup.preset.components:
                # They have the preset of the run that trained them in them.
                what = f"cannot be merged into {component}: {FLAG} {path} replaces it"
                raise UsageError("--preset_lora_path", what, "leave it out")
            recorded = json.loads(header.get("config", "{}"))
            used = found.configs.get(component, {})
            if differing := differing_entries(recorded, used):
                pairs = differing.items()
                words = [
                    f"{key}: {one}, this run {other}" for key, (one, other) in pairs
                ]
                what = f"has a different configuration: {'; '.join(words)}"
                raise StateError(path, what)
            files[component] = saved_weights(setup.family, component, path)
        elif setup.config.lora_checkpoint is None:
            loras.append(path)
        else:
            what = f"fills the same LoRA layers as {FLAG} {path}; give one of them"
            raise UsageError("--lora_checkpoint", what)
    return replace(found, files=files), loras


def _read_header(path: Path, setup: Setup) -> dict[str, str]:
    if not path.is_file():
        raise StateError(path, f"is no file; {FLAG} takes weights that a run saved")
    header = verify_file(path)
    family = header.get("family")
    if family != setup.spec.family:
        raise StateError(path, f"is for family {family}, not for {setup.spec.family}")
    if not header.get("component"):
        what = "its header does not name its component, as that of saved weights does"
        raise StateError(path, what, "a LoRA file can be given with --lora_checkpoint")
    return header


def _check_trained(path: Path, component: str, is_lora: bool, setup: Setup) -> None:
    """Refuse weights of what is not trained, and LoRA layers where all is trained or
    the other way round.
    """
    layers = {one.component for one in setup.trainables.lora}
    kinds = {True: "LoRA layers", False: "all"}
    trained = [
        f"{kinds[name in layers]} of {name}" for name in setup.trainables.components
    ]
    content = f"{kinds[is_lora]} of {component}"
    if content not in trained:
        what = f"contains {content}, but this run trains {', '.join(trained)}"
        raise StateError(path, what)
