"""A run: one function of plain data, the same from the command line, a launcher or a notebook."""

import os
from dataclasses import replace
from typing import get_args

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from dstrain.checks import validate
from dstrain.config import Precision, TrainConfig
from dstrain.data_process import data_process
from dstrain.dataset import columns_read, find_metadata
from dstrain.dry_run import as_summary
from dstrain.errors import UsageError
from dstrain.graph import as_text
from dstrain.memory import STAGE_1_ADVICE, explained
from dstrain.metadata import read_metadata
from dstrain.module import TrainingModule
from dstrain.plan import Plan
from dstrain.setup import Setup, resolve
from dstrain.sources import Size
from dstrain.tasks import Task
from dstrain.toys import toy_models
from dstrain.train import train
from dstrain.wiring import Wiring
from dstrain.world import World, together


def run(config: TrainConfig, module_class: type[TrainingModule] = TrainingModule) -> None:
    """Run a task or one stage of it, with a TrainingModule of your own if you give one.

    Raises a DstrainError, whose exit code says what kind of thing went wrong.
    """
    validate(config)
    check_launcher(config)
    setup = resolve(config)
    if config.dry_run:
        print(as_text(setup.plan(_inputs(setup)), setup.wiring, setup.task) + as_summary(setup), end="")
        return
    # Of several experts in training, one step of a process may need only one.
    unused = config.find_unused_parameters or setup.trains_experts
    ddp = DistributedDataParallelKwargs(find_unused_parameters=unused)
    accelerator = Accelerator(mixed_precision="no", kwargs_handlers=[ddp])
    setup = replace(setup, device=accelerator.device)
    with together(accelerator) as world, toy_models(setup, world) as ready:
        warn_of_one_process(world)
        if ready.stage == "data_process":
            with explained("stage 1", *STAGE_1_ADVICE):
                data_process(ready, world)
        else:
            train(ready, world, module_class)


def check_launcher(config: TrainConfig) -> None:
    """Refuse flags that contradict what `accelerate launch` was told; raises UsageError naming both."""
    for name, plain in (("mixed_precision", "no"), ("gradient_accumulation_steps", "1")):
        told = os.environ.get(f"ACCELERATE_{name.upper()}", plain)
        asked = getattr(config, name)
        if name == "mixed_precision" and told not in get_args(Precision):
            raise UsageError("accelerate's configuration", f"mixed precision {told} is not supported; use no or bf16")
        if told != plain and asked is not None and str(asked) != told:
            raise UsageError(f"--{name}", f"is {asked}, but accelerate's configuration says {told}; change one of them")


def warn_of_one_process(world: World) -> None:
    """`accelerate launch --cpu` starts one process whatever it is told; what it leaves behind gives it away."""
    if world.size == 1 and "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ:
        world.warn("the launcher was told to start several processes and started one; on CPUs: "
                  "ACCELERATE_USE_CPU=1 torchrun --nproc_per_node N -m dstrain ...")  # fmt: skip


def plan_of(config: TrainConfig) -> tuple[Plan, Wiring, Task]:
    """The plan of a command line: for the columns of its metadata, or without a data set for every column."""
    setup = resolve(replace(config, dry_run=True))
    return setup.plan(_inputs(setup)), setup.wiring, setup.task


def _inputs(setup: Setup) -> frozenset[str]:
    config = setup.config
    if config.dataset_base_path is None or setup.stage == "train":
        return setup.all_inputs()
    path = config.dataset_metadata_path or find_metadata(config.dataset_base_path)
    columns = columns_read(read_metadata(path), setup.data_config, setup.wiring.inputs)
    sizes = (n for n, source in setup.wiring.inputs.items() if isinstance(source, Size) and source.of in columns)
    return frozenset([*columns, *sizes, *setup.wiring.settings])
