"""Make a training run: its order, optimizer and schedule around the module."""

from collections.abc import Iterator, Sequence

from dstrain.config.options import TrainConfig
from dstrain.config.plugin_options import plugin_flags
from dstrain.distributed import ProcessGroup, peer_failed
from dstrain.errors import Diverged, StateError, UsageError
from dstrain.installed import NamingPlugin
from dstrain.runs.checkpoints.directory import states
from dstrain.runs.checks.flags import refuse_unshardable
from dstrain.runs.feature_plan import check_configs
from dstrain.runs.loaded_module import load_module
from dstrain.runs.setup import Setup
from dstrain.runs.training_data import (
    TrainingData,
    ValidationSamples,
    open_training_data,
)
from dstrain.runs.training_run import TrainingRun
from dstrain.training import SKIPPED, MovingAverage, Order, TrainingModule, hold_out
from dstrain.training.batching import Groups
from dstrain.training.loader import Batch
from dstrain.training.module import keep_frozen_apart
from dstrain.training.optimizers import build_lr_scheduler, build_optimizer
from dstrain.training.sharded_networks import Division
from dstrain.training.updater import Updater


def prepare(
    setup: Setup,
    processes: ProcessGroup,
    data: TrainingData,
    module_class: type[TrainingModule],
) -> TrainingRun:
    """Load what the stage needs, and build the module, order, optimizer and schedule."""
    config = setup.config
    groups, validation = choose_validation(setup, data)
    input_sets = {*data.input_sets, *validation.data.input_sets}
    plans = [setup.plan(inputs) for inputs in sorted(input_sets, key=sorted)]
    found = setup.find(plans)
    if data.cache_info is not None:
        check_configs(data.cache_info, found)
    division = None
    if setup.sharding is not None:
        refuse_unshardable(setup, plans)
        division = Division(setup.sharding, setup.device)
    module = load_module(setup, plans, found, module_class, division=division)
    if division is None:
        keep_frozen_apart(module)
    else:
        division.divide(module)
    order = order_of(setup, data, groups, processes.size)
    steps = total_steps(config, order.steps_per_epoch)
    optimizer = build_optimizer(setup.optimizer, module.trained.parameters)
    updater = updater_of(setup)
    parameters = module.trained_parameters
    with NamingPlugin(updater.plugin, "its updater"):
        updater.start(parameters, optimizer, config.max_grad_norm, processes.size)
    return TrainingRun(
        setup=setup,
        processes=processes,
        module=module,
        # Not the optimizer: without loss scaling, accelerate's wrapper adds nothing but
        # a search for packages at every step.
        # Moved to its device already: moved again, buffers would be others than those that
        # have their numbers in RAM.
        model=module
        if division
        else processes.accelerator.prepare(module, device_placement=[False]),
        optimizer=optimizer,
        updater=updater,
        seed=config.seed,
        diverged=diverged,
        lr_scheduler=build_lr_scheduler(config, optimizer, steps),
        order=order,
        data=data,
        found=found,
        # After the model, which may put sharded parameters in the place of others.
        ema=MovingAverage(module.trained.parameters, config.ema_decay),
        total_steps=steps,
        validation=validation,
    )


def updater_of(setup: Setup) -> Updater:
    """Return what turns losses into steps: a plugin's, or dstrain's own."""
    found = setup.extensions.updater(setup.config)
    if found is None:
        return Updater()
    plugin, updater = found
    if not isinstance(updater, Updater):
        what = f"dstrain_updater returned a {type(updater).__name__}, not an Updater"
        raise UsageError(plugin.where, what)
    updater.plugin = plugin.where
    return updater


def order_of(setup: Setup, data: TrainingData, groups: Groups, processes: int) -> Order:
    """Return the order in which a run on so many processes draws the samples of these
    groups.
    """
    config = setup.config
    return Order(
        groups,
        config.dataset_repeat,
        processes * config.batch_size * config.gradient_accumulation_steps,
        config.seed,
        data.sample_ids,
        data.repeated,
    )


def choose_validation(
    setup: Setup, data: TrainingData
) -> tuple[Groups, ValidationSamples]:
    """Return the groups of the samples to train on, and the samples for validation.

    Those of a second dataset leave the order of the others as it is.
    """
    if setup.validation is not None:
        second = open_training_data(setup.validation)
        ids = second.sample_ids[second.groups != SKIPPED]
        return data.groups, ValidationSamples(second, ids)
    config = setup.config
    groups, held_out = hold_out(
        data.groups, data.sample_ids, config.seed, config.validation_split
    )
    return groups, ValidationSamples(data, held_out)


def diverged(
    run: TrainingRun, batches: Sequence[Batch], loss: float, norm: float
) -> Diverged:
    """Return the error of a step whose loss or gradient is not finite, naming its
    samples; raises StateError for weights that are not finite themselves: no step makes
    such, so that they are from the files.
    """
    where = f"step {run.step + 1}"
    pipeline = run.module.pipeline
    found = pipeline.damaged(pipeline.components)
    if run.is_sharded and run.processes.any(bool(found)) and not found:
        # Each looks at its own rows.
        raise peer_failed("another process has weights that are not finite")
    if found:
        what = f"its loss is not finite: {found[0]}"
        raise StateError(where, what, *found[1:], "download it again")
    keys = [key for batch in batches for key in batch.micro_batch.keys]
    named = ", ".join(dict.fromkeys(run.data.name_row(key.row) for key in keys))
    others = run.processes.size - 1
    more = f" and those of {others} other processes" if others else ""
    saved = states(run.setup.output)
    return Diverged(
        where,
        f"loss {loss}, gradient norm {norm}; the weights are unchanged",
        f"last checkpoint: {saved[0] if saved else 'none'}",
        f"check the samples of this step: {named}{more}",
        "or start a new run with a lower --learning_rate or --max_grad_norm",
    )


def total_steps(config: TrainConfig, per_epoch: int) -> int:
    """Return the optimizer steps of the run: the smaller of --num_epochs and
    --max_steps.

    Without either flag it is one epoch.
    """
    if config.max_steps is None:
        return (config.num_epochs or 1) * per_epoch
    if config.num_epochs is None:
        return config.max_steps
    return min(config.max_steps, config.num_epochs * per_epoch)


def without_effect(
    config: TrainConfig, steps: int, per_step: int, most: int
) -> Iterator[str]:
    """Yield what has no effect in a run of so many optimizer steps of `per_step` samples;
    an epoch draws at most `most` of one shape, 0 if that is not known.
    """
    warmup = config.lr_warmup_steps
    if warmup >= steps:
        yield (
            f"--lr_warmup_steps {warmup} is not over when the run ends: its {steps} steps "
            "never have the learning rate"
        )
    # Numbers of plugins that are named so count steps, too.
    of_plugins = [one for one in plugin_flags(type(config)) if one.endswith("_steps")]
    for name in (*of_plugins, "validation_steps", "lr_scheduler_num_cycles"):
        wanted = getattr(config, name)
        if isinstance(wanted, int) and wanted > steps:
            yield f"--{name} {wanted}: the run ends before, after {steps} steps"
    if 0 < most < per_step:
        yield (
            f"no step has the {per_step} samples of --batch_size and "
            f"--gradient_accumulation_steps: an epoch has at most {most} of one shape"
        )
    if steps < 20:  # at the usual learning rates
        yield f"so few steps hardly change the weights: {steps}"
