"""Run a configuration, in the same way from the command line, a launcher or a notebook."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import get_args

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

from dstrain.config.options.model import Precision
from dstrain.config.options.train import TrainConfig
from dstrain.config.serialize import refill_advice
from dstrain.config.validation import validate
from dstrain.distributed.world import distributed_run
from dstrain.errors import CacheError, SystemFault, UsageError
from dstrain.graph.render import as_text
from dstrain.models.kept import described
from dstrain.models.toy import write_toy
from dstrain.runs.loop import train
from dstrain.runs.precompute import data_process
from dstrain.runs.reports.dry_run import as_summary
from dstrain.runs.resolve import dataset_inputs, resolve
from dstrain.runs.setup import Setup
from dstrain.training.memory import STAGE_1_ADVICE, oom_as_error
from dstrain.training.module import TrainingModule


@contextmanager
def toy_models(setup: Setup) -> Iterator[Setup]:
    """Yield the setup, with the files of a toy model if --toy asks for one.

    Its weights depend on nothing else.
    """
    if not setup.config.toy:
        yield setup
        return
    with tempfile.TemporaryDirectory(prefix="dstrain-toy-") as folder:
        toy = write_toy(setup.family, setup.spec.variant, Path(folder))
        yield replace(setup, models=(*toy, *setup.models))


def run(
    config: TrainConfig, module_class: type[TrainingModule] = TrainingModule
) -> None:
    """Run a task or one stage of it, with a TrainingModule of your own if you give one.

    Raises a DstrainError, whose exit code says what kind of thing went wrong, or the
    OSError of files that cannot be removed.
    """
    validate(config)
    start(config, module_class)


def start(
    config: TrainConfig, module_class: type[TrainingModule] = TrainingModule
) -> None:
    """Run a configuration that is valid; see `run`."""
    check_launcher(config)
    try:
        _start(config, module_class)
    except CacheError as error:
        error.help_lines += (refill_advice(config),)
        raise
    except SystemFault as error:
        if config.stage == "data_process":
            advice = "once that is mended, run the same command again"
            error.help_lines += (f"computed values are kept: {advice}",)
        raise


def _start(config: TrainConfig, module_class: type[TrainingModule]) -> None:
    setup = resolve(config)
    if config.dry_run:
        with toy_models(setup) as ready:
            summary = as_summary(ready)
        plan = setup.plan(dataset_inputs(setup))
        kept = described(setup.kept, plan.components[""])
        print(as_text(plan, kept) + summary, end="")
        return
    # Of several experts in training, one step of a process may need only one.
    unused = config.find_unused_parameters or len(setup.trained_experts) > 1
    ddp = DistributedDataParallelKwargs(find_unused_parameters=unused)
    # Longer than the time after which a process that hangs is named, on GPUs too.
    limit = InitProcessGroupKwargs(timeout=timedelta(minutes=30))
    accelerator = Accelerator(mixed_precision="no", kwargs_handlers=[ddp, limit])
    setup = replace(setup, device=accelerator.device)
    with distributed_run(accelerator) as processes, toy_models(setup) as ready:
        if ready.stage == "data_process":
            with oom_as_error("stage 1", *STAGE_1_ADVICE):
                data_process(ready, processes)
        else:
            train(ready, processes, module_class)


def check_launcher(config: TrainConfig) -> None:
    """Refuse flags that contradict accelerate's configuration; raises UsageError naming
    both.
    """
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in get_args(Precision):
        raise UsageError(
            "accelerate's configuration",
            f"mixed precision {precision} is not supported; use no or bf16",
        )
    for name, default in (
        ("mixed_precision", "no"),
        ("gradient_accumulation_steps", "1"),
    ):
        configured = os.environ.get(f"ACCELERATE_{name.upper()}", default)
        value = getattr(config, name)
        if configured != default and value is not None and str(value) != configured:
            raise UsageError(
                f"--{name}",
                f"is {value}, but accelerate's configuration says {configured}; change one of them",
            )
