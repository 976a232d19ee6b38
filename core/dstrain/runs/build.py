"""Build a training run: its samples, pipeline, trainable parameters and optimizer."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from dstrain.cache import FeatureCache
from dstrain.config import LoraFile, parse_lora
from dstrain.config.options import TrainConfig
from dstrain.config.plugin_options import plugin_flags
from dstrain.console import get_logger
from dstrain.data import inputs_of
from dstrain.data.dataset import first_variants
from dstrain.distributed import ProcessGroup, peer_failed
from dstrain.errors import Diverged, StateError, UsageError
from dstrain.graph import Plan
from dstrain.graph.keepers import WITH_LORA
from dstrain.lora import check_lora_file, check_names
from dstrain.models import Found
from dstrain.models.execution import enable_checkpointing
from dstrain.pipeline import Pipeline
from dstrain.runs.checkpoints.directory import states
from dstrain.runs.checkpoints.resume import initial_weights
from dstrain.runs.checks.flags import refuse_unshardable
from dstrain.runs.datasets.sizes import GroupSize, group_sizes
from dstrain.runs.feature_plan import check_configs, open_plan
from dstrain.runs.long_prompts import LongPromptLog, note_recorded, recorded
from dstrain.runs.setup import Setup
from dstrain.runs.training_run import TrainingData, TrainingRun, ValidationSamples
from dstrain.storage import Chosen
from dstrain.training import (
    SKIPPED,
    DecodedSamples,
    MovingAverage,
    Order,
    TrainingModule,
    hold_out,
    with_skipped_rows,
)
from dstrain.training.batching import Groups
from dstrain.training.loader import Batch
from dstrain.training.module import keep_frozen_apart
from dstrain.training.optimizers import (
    build_lr_scheduler,
    build_optimizer,
    parameter_groups,
)
from dstrain.training.sharded_networks import Division, refuse_single_numbers
from dstrain.training.trainables import check_start, start_from_lora
from dstrain.training.updater import Updater

logger = get_logger(__name__)


def open_training_data(setup: Setup) -> TrainingData:
    """Open the samples: the rows of the dataset, or in stage 2 of the feature cache."""
    if setup.stage == "train":
        return _open_cached_rows(setup)
    dataset = setup.dataset
    first = dataset.first_variants
    used_inputs = [
        setup.plan(inputs_of(common)).used_inputs for common in dataset.signatures
    ]
    source = DecodedSamples(
        dataset.rows,
        Chosen(used_inputs, dataset.groups),
        dataset.sample_ids,
        dataset.damage,
        any(column.is_file for column in dataset.columns.values()),
        dataset.weights if len(first) < len(dataset.rows) else None,
    )
    groups, sample_ids = with_skipped_rows(
        dataset.groups[first], dataset.sample_ids[first], len(dataset.table.rows)
    )
    return TrainingData(
        setup,
        source,
        groups,
        sample_ids,
        dataset.input_sets,
        sizes=group_sizes(dataset),
        rows_of_parts=[
            len(part.setup.checked_dataset.table.rows) for part in setup.parts
        ],
    )


def _open_cached_rows(setup: Setup) -> TrainingData:
    cache = FeatureCache.open(setup.cache_path)
    source, info = open_plan(setup, cache)
    rows = source.rows
    if setup.config.on_long_prompt == "error":
        # Refused for a row whose cached values are of a prompt that was cut.
        log = LongPromptLog("error", lambda row: info.name_row(rows[rows.index(row)]))
        used = rows.using(recorded(cache.folder))
        note_recorded(log, cache.folder, ((row, [one]) for row, one in used))
    count = info.dataset["rows"]
    # Rows are in order: a new one begins wherever the number changes.
    present = rows.numbers["row"]
    skipped = count - (np.count_nonzero(np.diff(present)) + min(len(present), 1))
    if skipped:
        # Their files may have been mended since: nothing is recorded of them.
        which = setup.in_words("rows")
        logger.info(f"{skipped} of {count} {which} are skipped, as in stage 1")
    groups = np.asarray(rows.numbers["group"], np.int32)
    ids = rows.sample_ids
    if source.has_variants:
        first = first_variants(ids)
        groups, ids = groups[first], ids[first]
    groups, ids = with_skipped_rows(groups, ids, count)
    sizes = [GroupSize(*one) for one in info.sizes]
    return TrainingData(
        setup, source, groups, ids, source.input_sets, info, sizes, info.rows_of_parts
    )


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


def updater_of(setup: Setup) -> Updater:
    """Return what turns losses into steps: a plugin's, or dstrain's own."""
    found = setup.extensions.updater(setup.config)
    if found is None:
        return Updater()
    plugin, updater = found
    if not isinstance(updater, Updater):
        what = f"dstrain_updater returned a {type(updater).__name__}, not an Updater"
        raise UsageError(plugin.where, what)
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


def load_module(
    setup: Setup,
    plans: Sequence[Plan],
    found: Found,
    module_class: type[TrainingModule],
    empty: bool = False,
    division: Division | None = None,
) -> TrainingModule:
    """Load the pipeline, and put what is trained into training mode.

    `empty` is as in `Pipeline.from_found`: everything is checked, and no weights are
    read. With a division, of what is trained this process's rows are kept.
    """
    config = setup.config
    found, loras = initial_weights(setup, found)
    files = [LoraFile(path) for path in loras]
    if config.lora_checkpoint is not None:
        file = parse_lora(str(config.lora_checkpoint)).of(setup.spec.components)
        check_lora_file(file.path)
        check_start(file, [one.component for one in setup.trainables.lora])
        files.insert(0, file)
    pipeline = Pipeline.from_found(
        setup.family,
        setup.spec,
        found,
        setup.device,
        setup.dtype,
        _full_precision(setup, plans),
        empty,
        dict.fromkeys(setup.trainables.components, division) if division else {},
        {name.partition(".")[0] for name in setup.trainables.components},
    )
    module = module_class(
        pipeline, setup.task, setup.build_timestep_sampler(), setup.stage
    )
    dtype = torch.bfloat16 if setup.optimizer.rounds else torch.float32
    module.switch_to_training_mode(setup.trainables, config.seed, dtype)
    chosen = setup.optimizer
    parameter_groups(module.trained.parameters, chosen.rates, chosen.b_ratio)
    for name, lora_config in module.trained.lora.items():
        check_names(
            pipeline.components[name],
            lora_config,
            setup.family,
            setup.saved_names(name),
        )
    if setup.sharding is not None:
        for name in module.trained.components:
            refuse_single_numbers(pipeline.components[name])
    for file in files:
        start_from_lora(pipeline, module.trained.lora, file)
    for plan in plans:
        module.plan(plan.inputs)
    if setup.checkpoints:
        offload = config.use_gradient_checkpointing_offload
        for name, network in module.networks.items():
            try:
                enable_checkpointing(name, network, offload)
            except UsageError:
                # Networks that are not trained may do without it.
                if name in module.trained.components:
                    raise
    trained = module.trained.components
    # LoRA layers that no loss reaches are frozen, and saved with the others.
    unused = module.trained.unused_parameters
    saved = {name: [one.removeprefix(f"{name}.") for one in unused] for name in trained}
    networks = {name: pipeline.components[name] for name in trained}
    if empty:
        pipeline.keepers.check(networks, setup.device, WITH_LORA)
    else:
        pipeline.keepers.prepared(networks, setup.device, saved)
    return module


def _full_precision(setup: Setup, plans: Sequence[Plan]) -> list[str]:
    """Return the components that are loaded in fp32, since they are trained in full."""
    if setup.optimizer.rounds:
        return []
    roles = setup.spec.experts.roles if setup.spec.experts else {}
    in_units = {
        one
        for plan in plans
        for step in plan.train_steps
        for name in step.unit.components
        for one in roles.get(name, (name,))
    }
    names = []
    for trained in setup.trainables.full:
        component, _, part = trained.partition(".")
        # Units run without autocast, so a component of one must be fp32 as a whole even
        # if only a part of it is trained.
        if not part or component in in_units:
            names.append(component)
    return names


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
