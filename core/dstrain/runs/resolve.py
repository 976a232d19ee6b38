"""Turn a configuration into a Setup: family, variant, task and trainables, checked
before anything is loaded.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

from dstrain.cache.store import MARKER, FeatureCache
from dstrain.config.datasets import datasets_of
from dstrain.config.fields import Effect, changed, parse_lora, split_commas
from dstrain.config.options.train import TrainConfig
from dstrain.config.sizes import parse_frames
from dstrain.console import get_logger
from dstrain.data.forms.naming import other_names, parse_columns
from dstrain.data.forms.reading import Reading, list_columns
from dstrain.data.row_checks import input_columns
from dstrain.errors import UsageError, about_dataset, first_few, nearest
from dstrain.graph.inputs import Column, with_measured
from dstrain.graph.plan import make_plan
from dstrain.graph.spec import PipelineSpec
from dstrain.graph.task import Task
from dstrain.lora.key_names import key_formats
from dstrain.lora.layers import Trainables
from dstrain.lora.writer import refuse_lora_type
from dstrain.models.component_files import ModelConfig
from dstrain.models.components import components_of
from dstrain.models.device import default_device
from dstrain.models.formats import NATIVE
from dstrain.models.hub.source import hub_of_environment
from dstrain.models.naming.model_files import model_configs, refuse_unsupported
from dstrain.pipeline.kept_choice import (
    check_loaded,
    check_trained,
    given_expert,
    kept_components,
)
from dstrain.pipeline.loss_masks import MASK, check_masks, rows_without_masks
from dstrain.pipeline.sampling import generate_task
from dstrain.pipeline.tile_choice import Tiling, check_tiling
from dstrain.pipeline.variant_choice import (
    Score,
    Scorer,
    choose_variant,
    score_columns,
    with_overrides,
)
from dstrain.registry.discovery import load_family
from dstrain.registry.family import ModelFamily
from dstrain.registry.hooks import load_extensions
from dstrain.runs.checkpoints.state import refuse_unwritable
from dstrain.runs.datasets.flags import caption_inputs, resolutions_of
from dstrain.runs.datasets.masks import with_masks_of_run
from dstrain.runs.datasets.published import with_folders
from dstrain.runs.datasets.said import dataset_line, left_out_lines, short_clips
from dstrain.runs.datasets.sources import dataset_source
from dstrain.runs.offload import blocks_to_swap, check_offloaded
from dstrain.runs.script.parts import NO_PARTS, OwnParts
from dstrain.runs.setup import Setup
from dstrain.runs.trackers import check_trackers
from dstrain.training.distill import OWN_TASKS
from dstrain.training.trainables import trainables_of

logger = get_logger(__name__)

DEFAULT_CAPTION = "default_caption"


def resolve(config: TrainConfig, own: OwnParts = NO_PARTS) -> Setup:
    """Find the family, variant and task of a configuration; raises UsageError naming
    what is unknown. A script may have given tasks of its own.
    """
    family = load_family(config.model, config.disabled_plugins)
    config = with_folders(with_defaults(config, family))
    if config.stage != "data_process":
        check_trackers(config)
    # Planning asks no hub.
    models = model_configs(config, family, offline=config.dry_run)
    refuse_unsupported(family, "--extra_inputs", split_commas(config.extra_inputs))
    extensions = load_extensions(config.disabled_plugins)
    tasks = {**OWN_TASKS, **extensions.offered("dstrain_tasks", Task, OWN_TASKS)}
    tasks |= own.offered_tasks(config.task_name, tasks)
    if config.task_name not in tasks:
        hint = nearest(config.task_name, tasks)
        what = f"no task named {config.task_name!r}; tasks: {', '.join(tasks)}{hint}"
        raise UsageError("--task", what, *extensions.broken[:3])
    task = tasks[config.task_name]
    if "timestep_sampler" not in task.loss.components:
        why = f"the loss of task {task.name} draws no timesteps"
        refuse_unused(config, "timestep_sampler", why)
    score = variant_score(config, task)
    take_first = config.toy or not models
    fits = cells_fit(config)
    variant = choose_variant(family, config.variant, models, score, take_first, fits)
    spec = with_overrides(family.spec(variant), family, config)
    if config.fix_frame_rate is False:
        spec = with_frames_as_they_are(spec)
    if not spec.reads_videos:
        refuse_unused(config, "video", f"variant {variant} reads no videos")
    if config.fix_frame_rate:
        # The same as without the flag, for the feature cache and for a resumed run, too.
        config = replace(config, fix_frame_rate=None)
    if not caption_inputs(spec):
        refuse_unused(config, "captions", f"variant {variant} reads no prompts")
    check_component_flags(config, spec)
    check_tiling(Tiling.of(config), family, spec)
    trainables = resolve_experts(
        trainables_of(config.trainable_models, config, family), spec, family, models
    )
    swapped = blocks_to_swap(config, trainables)
    setup = Setup(
        config=config,
        family=family,
        spec=with_masks_of_run(spec.with_task_inputs(task), task, config),
        task=task,
        stage=config.stage,
        trainables=trainables,
        # Planned for a GPU, frozen weights are in bf16 by default.
        device=default_device()
        if config.device_memory is None
        else torch.device("cuda"),
        models=models,
        extensions=extensions,
        # Now, since what hooks keep in their modules changes as they run.
        modifiers=extensions.modifiers(),
        kept=kept_components(config, family, spec, models, lambda: extensions, swapped),
    )
    check_masks(setup.plan(setup.all_inputs()))
    check_saved_names(setup)
    check_default_caption(config)
    check_sizes(setup)
    if not config.dry_run or _is_there(config.preset_lora_path, spec):
        check_preset(setup)
    if config.stage != "data_process":
        # Tried before anything is loaded, and not saved for the first time hours later.
        refuse_precision(setup)
        refuse_unwritable(setup.optimizer.name, setup.optimizer.trial.state)
    check_kept(setup)
    # Built once here, so that boundaries that leave nothing are refused before anything
    # is loaded.
    setup.build_timestep_sampler()
    check_offloaded(setup)
    return setup


def with_defaults(config: TrainConfig, family: ModelFamily) -> TrainConfig:
    """Return the configuration with the hub of the environment and the family's gradient
    checkpointing, where no flag says otherwise.
    """
    if config.hub is None and not config.toy:
        # Recorded, so that `generate --run` finds the same files.
        config = replace(config, hub=hub_of_environment())
    is_open = config.use_gradient_checkpointing is None and not config.checkpoints
    if is_open and family.gradient_checkpointing:
        config = replace(config, use_gradient_checkpointing=True)
    return config


def with_frames_as_they_are(spec: PipelineSpec) -> PipelineSpec:
    """Return the spec with videos that keep their frame rate."""
    columns = {
        name: replace(source, fps=0.0)
        for name, source in spec.inputs.items()
        if isinstance(source, Column)
    }
    return replace(spec, inputs={**spec.inputs, **columns})


def of_stage(setup: Setup, stage: str) -> Setup:
    """Return one stage, 'data_process' or 'train', of a command that runs both.

    All that was resolved is that of both; nothing that either of them has read is shared.
    """
    return replace(
        setup,
        config=replace(setup.config, task=f"{setup.config.task_name}:{stage}"),
        stage=stage,
        is_one_of_both=True,
        # Stage 1 trains nothing.
        sharding=setup.sharding if stage == "train" else None,
    )


def refuse_precision(setup: Setup) -> None:
    """Refuse bf16 weights where the rest computes in fp32."""
    if setup.optimizer.rounds and setup.mixed_precision != "bf16":
        what = "bf16 goes together with --mixed_precision bf16"
        raise UsageError("--trainable_dtype", what)


def refuse_unused(
    config: TrainConfig,
    effect: Effect,
    why: str,
) -> None:
    """Refuse the options with an effect that this run cannot have, also where they are
    those of one of its datasets.
    """
    for flag in changed(config, effect):
        raise UsageError(f"--{flag.name}", f"has no effect: {why}")
    if config.dataset:
        for one in datasets_of(config):
            with about_dataset(one.name):
                refuse_unused(one.config, effect, why)


def variant_score(config: TrainConfig, task: Task) -> Scorer | None:
    """Return how the dataset's columns, or cached plans, rate a variant."""
    dataset = dataset_source(config)
    if dataset is not None:
        extra = set(split_commas(config.extra_inputs))
        # The task's own inputs say nothing of the variant.
        for name, source in task.inputs.items():
            extra -= {name, source.name if isinstance(source, Column) else name}
        keys = split_commas(config.data_file_keys) or None
        choices = parse_columns(config.column)
        names = Reading().read_columns(dataset, {}).columns

        def score(spec: PipelineSpec) -> Score | None:
            try:
                inputs = {**spec.inputs, **task.inputs}
                others = other_names(names, inputs, choices)
            except UsageError:
                return None
            columns = {*names, *others} - {*others.values()}
            return score_columns(columns, extra, keys)(spec)

        return score
    place = config.feature_cache or config.dataset_base_path
    if config.stage != "train" or not place or not (place / MARKER).is_file():
        return None
    identities = [record["identity"] for _, record in FeatureCache.open(place).plans()]
    cached = {one["variant"] for one in identities if one["family"] == config.model}
    return lambda spec: (1, 0) if spec.variant in cached else None


def cells_fit(config: TrainConfig) -> Callable[[PipelineSpec], bool] | None:
    """Return a function that tells whether a variant can read the dataset's cells: one
    file where it expects one.
    """
    dataset = dataset_source(config)
    if dataset is None:
        return None
    lists = cache(partial(list_columns, dataset))

    def fits(spec: PipelineSpec) -> bool:
        single = [
            source.name
            for source in spec.inputs.values()
            if isinstance(source, Column) and source.kind == "image"
        ]
        return lists().isdisjoint(single)

    return fits


def check_component_flags(config: TrainConfig, spec: PipelineSpec) -> None:
    """Refuse a flag that names a component which the variant does not have."""
    known = [*spec.components, *(spec.experts.roles if spec.experts else ())]
    for flag in ("trainable_models", "lora_base_model", "preset_lora_model"):
        for name in split_commas(getattr(config, flag)):
            if name.partition(".")[0] not in known:
                hint = nearest(name, known)
                what = f"{spec.family} {spec.variant} has no component {name!r}{hint}"
                components = f"components: {', '.join(spec.components)}"
                raise UsageError(f"--{flag}", what, components)


def resolve_experts(
    trainables: Trainables,
    spec: PipelineSpec,
    family: ModelFamily,
    models: Sequence[ModelConfig],
) -> Trainables:
    """Train the expert whose files are given where the denoiser as a whole is asked
    for.
    """
    expert = given_expert(spec, family, models)
    if spec.experts is None or not expert:
        return trainables
    experts = {
        role: spec.experts.component(role, expert) for role in spec.experts.roles
    }
    full = []
    for name in trainables.full:
        component, dot, part = name.partition(".")
        full.append(experts.get(component, component) + dot + part)
    lora = []
    for layers in trainables.lora:
        component = experts.get(layers.component, layers.component)
        lora.append(replace(layers, component=component))
    return Trainables(tuple(full), tuple(lora))


def check_saved_names(setup: Setup) -> None:
    """Refuse a program that has no key names for what is trained, and the family's flag
    of one if it would have no effect.
    """
    family = setup.family
    chosen = setup.config.lora_format
    if setup.saving is not None:
        flag = f"--{setup.saving.name}"
        lora = [layers.component for layers in setup.trainables.lora]
        if family.default_trainable not in lora:
            what = f"has no effect: no LoRA on {family.default_trainable} is trained"
            raise UsageError(flag, what)
        if chosen is not None:
            raise UsageError(flag, f"has no effect with --lora_format {chosen}")
    known = components_of(family)
    with_lora = {layers.component for layers in setup.trainables.lora}
    for name in setup.trainables.components:
        if name not in known:
            continue  # what is no component is refused where it is looked up
        component = known[name]
        formats = key_formats(component, family)
        if name not in with_lora:
            # The others have names for the layers of a LoRA alone.
            whole = (NATIVE, *component.formats)
            formats = {
                program: one
                for program, one in formats.items()
                if one.checkpoint_format in whole and not one.underscored
            }
        program = setup.saved_names(name)
        if program in formats and name in with_lora:
            refuse_lora_type(setup.config.lora_type, program)
        if program not in formats:
            flag = "--lora_format" if chosen else "--remove_prefix_in_ckpt"
            kind = "LoRA on" if name in with_lora else "all of"
            what = f"{program} has no key names for {kind} {name}"
            raise UsageError(flag, what, f"programs that have: {', '.join(formats)}")


def check_sizes(setup: Setup) -> None:
    """Refuse sizes and numbers of frames that the variant cannot have, before any row is
    read; raises UsageError.
    """
    config = setup.config
    if config.stage == "train":
        return
    parts = datasets_of(config)
    for column in setup.spec.inputs.values():
        if not isinstance(column, Column) or not column.is_file or not column.multiple:
            continue
        for part in parts:
            for resolution in resolutions_of(part.config):
                if resolution.buckets is not None:
                    resolution.buckets.sizes(column.multiple)


def check_default_caption(config: TrainConfig) -> None:
    """Refuse a caption for images without one where no dataset is a folder of these, and
    one dataset's own where that is none.
    """
    if config.stage == "train":
        return
    places = [
        (one.name, one.config, DEFAULT_CAPTION in one.own)
        for one in datasets_of(config)
    ]
    second = config.validation_dataset_base_path
    if second is not None:
        metadata = config.validation_dataset_metadata_path
        validation = replace(
            config,
            dataset_base_path=second,
            dataset_metadata_path=metadata,
            dataset=(),
        )
        places.append(("", validation, False))
    is_used = False
    for name, own, is_own in places:
        if own.default_caption is None:
            continue
        with about_dataset(name):
            source = dataset_source(own)
            is_folder = source is None or source.form == "folder"
            if is_own and not is_folder:
                what = "has no effect: the dataset is no folder with captions"
                raise UsageError("--default_caption", what)
        is_used |= is_folder and not is_own
    if config.default_caption is not None and not is_used:
        what = "has no effect: no dataset is a folder with captions"
        raise UsageError("--default_caption", what)


def check_preset(setup: Setup) -> None:
    """Refuse a preset of a component that neither training nor a preview loads, in any
    stage.
    """
    preset = setup.preset
    if preset is None:
        return
    loaded = loaded_components(setup)
    for name in preset.components:
        if name not in loaded:
            what = f"has no effect: {preset.file.path} is for {name}, which this run does not load"
            raise UsageError(
                "--preset_lora_path", what, f"it loads {', '.join(loaded)}"
            )


def _is_there(path: Path | None, spec: PipelineSpec) -> bool:
    """Return whether there is a preset, and its file exists."""
    return path is not None and parse_lora(str(path)).of(spec.components).path.exists()


def check_kept(setup: Setup) -> None:
    """Refuse ways to keep components that this run cannot have, or that have no effect."""
    if not setup.kept:
        return
    check_loaded(setup.kept, loaded_components(setup))
    in_steps = setup.plan(setup.all_inputs()).components["train"]
    check_trained(setup.kept, setup.trainables.full, in_steps)


def loaded_components(setup: Setup) -> list[str]:
    """Return the components that training or a preview loads, in any stage."""
    spec = setup.spec
    plans = [setup.plan(setup.all_inputs())]
    if setup.config.preview_prompt:
        inference = generate_task(spec, guided=True)
        plans.append(make_plan(spec, frozenset(spec.inputs), inference))
    # '' is the run that is not split, which loads what both stages load.
    return list(dict.fromkeys(name for plan in plans for name in plan.components[""]))


def dataset_inputs(setup: Setup) -> frozenset[str]:
    """Return the inputs that the columns of the metadata give, of several datasets those
    that any of them gives; without metadata, all.
    """
    source = dataset_source(setup.config)
    if source is None:
        return setup.all_inputs()
    found: set[str] = set()
    sources = source.parts or (source,)
    for part, own in zip(setup.parts, sources, strict=True):
        inputs, data = part.setup.spec.inputs, part.setup.data_config
        with about_dataset(part.name):
            table = data.reading.read_columns(own, inputs)
            found |= with_measured(input_columns(table, data, inputs), inputs)
    return frozenset(found)


def log_warnings(setup: Setup) -> None:
    """Name the plugins that are broken and not used, short clips, and the
    columns that no input reads.
    """
    for reason in setup.extensions.broken:
        logger.warning(reason)
    if setup.stage == "train":
        return
    for one in setup.datasets:
        for line in lines_of_datasets(one):
            logger.info(line)
        log_left_out(one)
    for line in warnings_of_rows(setup):
        logger.warning(line)


def log_left_out(setup: Setup) -> None:
    """Warn of what is in folders with captions and is not read."""
    for part in setup.parts:
        own = part.setup
        for line in left_out_lines(own.data_config.source, own.spec.inputs):
            logger.warning(setup.in_words(line))


def lines_of_datasets(setup: Setup) -> list[str]:
    """Return a line for each dataset that is trained on: what is read, and from where."""
    lines = []
    for part in setup.parts:
        source, dataset = part.setup.data_config.source, part.setup.checked_dataset
        line = setup.in_words(dataset_line(source, dataset))
        if part.repeats != 1:
            line += f"; {part.repeats} times in an epoch"
        if part.loss_weight != 1:
            line += f"; its loss counts {part.loss_weight:g}"
        lines.append(line)
    return lines


def inputs_to_ask_for(setup: Setup, unused: Sequence[str]) -> list[str]:
    """Return the optional inputs that columns without a use would give."""
    return [
        name
        for name, source in setup.spec.inputs.items()
        if isinstance(source, Column) and source.optional and source.name in unused
    ]


def warnings_of_rows(setup: Setup) -> list[str]:
    """Return what there is to say of short clips and of columns that no input reads."""
    lines = []
    for part in setup.parts:
        own = part.setup
        found = setup.dataset if own is setup else part.dataset
        for line in short_clips(found, parse_frames(own.config.num_frames)):
            lines.append(line if own is setup else f"{found.table.path}: {line}")
        if MASK in own.spec.inputs:
            lines += rows_without_masks(found)
    for part in setup.parts:
        found = part.setup.checked_dataset
        unused = found.unused_columns
        if unused:
            names = first_few(map(repr, unused))
            which = f"{len(unused)} columns are" if len(unused) > 1 else "a column is"
            place = found.table.path
            extra = inputs_to_ask_for(own, unused)
            by = "" if extra else " by this variant"
            line = f"{place}: {which} not used{by}: {names}"
            if "mask" in unused:
                line += "; use --mask_column mask to weigh the loss by it"
            if extra:
                wanted = ",".join([*split_commas(own.config.extra_inputs), *extra])
                line += f"; optional inputs are read with --extra_inputs {wanted}"
            lines.append(line)
    return lines
