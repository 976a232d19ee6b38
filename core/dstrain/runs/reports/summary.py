"""Log the start and the end of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import nn

from dstrain.console import fitted, get_logger, number_of, shell_command
from dstrain.graph.noise_process import EULER
from dstrain.graph.timestep_sampler import STRATA
from dstrain.lora import formats_where
from dstrain.models import StoredLinear, components_of
from dstrain.runs.build import without_effect
from dstrain.runs.datasets.sizes import size_lines, trained_sizes
from dstrain.runs.training_run import TrainingRun
from dstrain.storage.run_files import averaged_name

logger = get_logger(__name__)

NO_BREAK = "\N{NO-BREAK SPACE}"


def log_start(run: TrainingRun) -> None:
    """Log what is trained, on how many samples, for how many steps, and the output folder."""
    module = run.module
    setup = run.setup
    config = setup.config
    order = run.order
    processes = number_of(run.processes.size, "process", "processes")
    logger.info(
        f"device {setup.device}, mixed precision {setup.mixed_precision}, {processes}"
    )
    count = sum(parameter.numel() for parameter in module.trained_parameters)
    components = ", ".join(module.trained.components)
    logger.info(
        f"training {components}: {count:,} parameters, "
        f"{count / _weights_of(module.networks):.1%} of those used in a step"
    )
    if run.is_sharded:
        logger.info(f"sharding: {components} {setup.sharding}, {processes}")
    for name, words in setup.keepers.described(sorted(module.used_components)).items():
        logger.info(f"{name}: {words}")
    if config.use_gradient_checkpointing and setup.family.gradient_checkpointing:
        logger.info(
            f"{setup.family.name} trains with gradient checkpointing; "
            "--no_use_gradient_checkpointing turns it off"
        )
    for component, matched_modules in module.trained.matched_modules.items():
        for line in _layer_lines(component, matched_modules):
            logger.info(line)
    unused = len(module.trained.unused_parameters)
    if unused:
        logger.info(
            f"not trained: {number_of(unused, 'tensor')}, which by the model's design cannot change the loss"
        )
    logger.info(
        f"{number_of(order.sample_count, 'sample')} x {order.repeat} "
        f"in {number_of(order.group_count, 'shape')}, "
        f"{number_of(order.steps_per_epoch, 'step')} per epoch"
    )
    passes = number_of(f"{run.total_steps / order.steps_per_epoch:.4g}", "epoch")
    logger.info(f"runs to step {run.total_steps:,}, {passes}")
    most = int(order.draws_of_groups.max())
    for line in without_effect(config, run.total_steps, order.samples_per_step, most):
        logger.info(line)
    logger.info(
        f"batch: {processes} x {config.batch_size} "
        f"x {config.gradient_accumulation_steps} accumulated "
        f"= {number_of(order.samples_per_step, 'sample')} per step"
    )
    logger.info(
        f"{setup.optimizer.name}, learning rate {setup.optimizer.rates}, "
        f"{config.lr_scheduler}"
    )
    logger.info(f"seed {config.seed}")
    sizes = trained_sizes(order, run.data.sizes)
    for line in size_lines(sizes, order.samples_per_step):
        logger.info(line)
    if run.validation:
        ids = run.validation.sample_ids
        rows = number_of(len(np.unique(ids[:, 0])), "row")
        samples = number_of(len(ids), "sample")
        logger.info(f"validation: {samples} of {rows}, {STRATA} timesteps each")
    logger.info(f"writing to {setup.output}")


def _layer_lines(component: str, matched_modules: Mapping[str, int]) -> list[str]:
    """Return lines with the layers that have LoRA, each with its count on the same line."""
    # Lines are not broken at a space that is a no-break one.
    layers = [
        f"{pattern}{NO_BREAK}x{number}" for pattern, number in matched_modules.items()
    ]
    lines = fitted([f"LoRA on {component}: {', '.join(layers)}"])
    return [line.replace(NO_BREAK, " ") for line in lines]


def _weights_of(networks: nn.Module) -> int:
    """Return how many weights networks have; a stored one may be half a number."""
    count = sum(parameter.numel() for parameter in networks.parameters())
    for layer in networks.modules():
        if isinstance(layer, StoredLinear):
            count += layer.in_features * layer.out_features - layer.weight.numel()
    return count


def log_end(run: TrainingRun, weights: Sequence[Path], steps: int) -> None:
    """Log where the weights are, and the commands that try and convert them.

    Args:
        weights: Its last weights, in the main process.
        steps: The steps that were made: without any, there was nothing left to do.
    """
    setup, trained = run.setup, run.module.trained
    if not steps:
        place = f"{setup.output} is at step {run.step} of {run.total_steps}"
        logger.info(f"nothing left to do: {place}")
    if not weights:
        return
    logger.info("weights: " + ", ".join(map(str, weights)))
    averages = [path.with_name(averaged_name(path.name)) for path in weights]
    if run.ema and all(map(Path.exists, averages)):
        logger.info("averaged over the steps: " + ", ".join(map(str, averages)))
    spec = setup.spec
    output = "video.mp4" if spec.makes_video else "image.png"
    words = ["dstrain", "generate", "--run", str(setup.output), "--prompt", "..."]
    for name in sorted(spec.inputs.keys() - {"prompt", *spec.defaults}):
        if not spec.can_train(frozenset(spec.inputs) - {name}):
            words += ["--input", f"{name}=..."]
    if setup.task.runs_sampler and spec.samplers:
        words += ["--sampler", EULER]
    logger.info(f"try them: {shell_command([*words, '--output', output])}")
    known = components_of(setup.family)
    for name, path in zip(trained.components, weights, strict=True):
        if name not in trained.lora:
            continue
        kind, saved = trained.lora[name].type, setup.saved_names(name)
        given = (known[name], setup.family, kind, saved)
        for one in formats_where("needs_export", *given):
            output = str(path.with_name(f"{path.stem}-{one.name}.safetensors"))
            words = ["dstrain", "export", "--format", one.name, str(path), output]
            logger.info(f"for {one.title}: {shell_command(words)}")
