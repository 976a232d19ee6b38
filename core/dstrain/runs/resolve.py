"""Turn a configuration into a Setup: family, variant, task and trainables, checked
before anything is loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dstrain.cache.store import FeatureCache
from dstrain.config.fields import changed, split_commas
from dstrain.config.schema import TrainConfig
from dstrain.console import get_logger
from dstrain.data.dataset import find_metadata, input_columns
from dstrain.data.metadata import read_metadata
from dstrain.errors import UsageError, nearest
from dstrain.graph.inputs import Column, Measured
from dstrain.graph.plan import Plan, make_plan
from dstrain.graph.spec import PipelineSpec
from dstrain.graph.task import Task
from dstrain.lora.layers import LoraConfig, Trainables
from dstrain.models.components import Component
from dstrain.models.device import default_device
from dstrain.models.locate import ModelConfig, model_configs, place_of
from dstrain.pipeline.sampling import generate_task
from dstrain.pipeline.variants import (
    Hints,
    choose_variant,
    score_columns,
    with_overrides,
)
from dstrain.registry.discovery import load_family
from dstrain.registry.family import ModelFamily
from dstrain.registry.hooks import Extensions, load_extensions
from dstrain.runs.setup import Setup
from dstrain.training.distill import OWN_TASKS

logger = get_logger(__name__)


def check_preset(setup: Setup) -> None:
    """Raise UsageError for a preset of a component that neither training nor a preview
    loads, in any stage.
    """
    preset, spec = setup.preset, setup.spec
    if preset is None:
        return
    plans = [setup.plan(setup.all_inputs())]
    if setup.config.preview_prompt:
        plans.append(
            make_plan(spec, frozenset(spec.inputs), generate_task(spec, guided=True))
        )
    loaded = dict.fromkeys(
        name for plan in plans for names in plan.components.values() for name in names
    )
    if preset.component not in loaded:
        what = f"has no effect: {preset.path} is for {preset.component}, which this run does not load"
        raise UsageError("--preset_lora_path", what, f"it loads {', '.join(loaded)}")


def hints_of(config: TrainConfig, models: Sequence[ModelConfig], task: Task) -> Hints:
    """Return what tells the variant: model files, and the dataset's columns or cached
    plans.
    """
    either = config.toy or not models
    if config.dataset_base_path is not None and config.stage != "train":
        path = config.dataset_metadata_path or find_metadata(config.dataset_base_path)
        own = {
            *task.inputs,
            *(
                source.name
                for source in task.inputs.values()
                if isinstance(source, Column)
            ),
        }
        extra = set(split_commas(config.extra_inputs)) - own
        keys = (
            None
            if config.data_file_keys is None
            else split_commas(config.data_file_keys)
        )
        return Hints(
            models, score_columns(read_metadata(path).columns, extra, keys), either
        )
    place = (
        (config.feature_cache or config.dataset_base_path)
        if config.stage == "train"
        else None
    )
    if place is None or not (place / "store.json").is_file():
        return Hints(models, None, either)
    stored = [stored["identity"] for _, stored in FeatureCache.open(place).plans()]
    names = {
        identity["variant"] for identity in stored if identity["family"] == config.model
    }
    return Hints(models, lambda spec: (1, 0) if spec.variant in names else None, either)


def check_extra_inputs(config: TrainConfig, family: ModelFamily, task: Task) -> None:
    """Refuse an extra input that no variant knows, before it is taken as a hint."""
    specs: list[PipelineSpec] = [
        family.spec(variant).with_task_inputs(task) for variant in family.variants
    ]
    sources = [(name, source) for spec in specs for name, source in spec.inputs.items()]
    known = {
        word for name, s in sources if isinstance(s, Column) for word in (name, s.name)
    }
    for name in split_commas(config.extra_inputs):
        if name not in known:
            raise UsageError(
                "--extra_inputs",
                f"no variant of {family.name} reads {name!r}{nearest(name, known)}",
            )


def resolve_experts(
    trainables: Trainables,
    spec: PipelineSpec,
    family: ModelFamily,
    models: Sequence[ModelConfig],
) -> Trainables:
    """Train the expert whose files are given where the denoiser as a whole is asked
    for.
    """
    experts = spec.experts
    if experts is None or experts.denoiser not in trainables.components:
        return trainables
    known: Sequence[Component] = family.load("components")
    given = {place_of(model, known) for model in models} & set(experts.components)
    if len(given) != 1 or experts.denoiser in given:
        return trainables
    (part,) = given
    names = (name.partition(".") for name in trainables.full)
    full = tuple(
        (part if name == experts.denoiser else name) + dot + rest
        for name, dot, rest in names
    )
    lora = tuple(
        replace(lora_config, component=part)
        if lora_config.component == experts.denoiser
        else lora_config
        for lora_config in trainables.lora
    )
    return Trainables(full, lora)


def check_frames(config: TrainConfig, spec: "PipelineSpec") -> None:
    """Refuse flags that choose frames of videos where there are none."""
    if spec.reads_videos:
        return
    for flag in changed(config, "video"):
        raise UsageError(
            flag.spelled, f"has no effect: variant {spec.variant} reads no videos"
        )


def check_components(config: TrainConfig, spec: "PipelineSpec") -> None:
    """Refuse a flag that names a component which the variant does not have."""
    known = (*spec.components, *([spec.experts.denoiser] if spec.experts else []))
    for flag in ("trainable_models", "lora_base_model", "preset_lora_model"):
        for name in split_commas(getattr(config, flag)):
            if name.partition(".")[0] not in known:
                what = f"{spec.family} {spec.variant} has no component {name!r}{nearest(name, known)}"
                raise UsageError(
                    f"--{flag}", what, f"components: {', '.join(spec.components)}"
                )


def check_saved_names(setup: Setup) -> None:
    """Refuse flags on the names of saved weights that name, or are for, nothing that is
    trained.
    """
    prefix, trained, experts = (
        setup.config.remove_prefix_in_ckpt,
        setup.trainables.components,
        setup.spec.experts,
    )
    played = (
        [experts.denoiser] if experts and set(experts.components) & set(trained) else []
    )
    # Saved names carry no such prefix to begin with, so there is nothing to remove.
    known = [f"pipe.{component}." for component in dict.fromkeys([*trained, *played])]
    if prefix is not None and prefix not in known:
        raise UsageError(
            "--remove_prefix_in_ckpt",
            f"no saved name begins with {prefix!r}; want {' or '.join(known)}",
        )
    component = setup.family.default_trainable
    if setup.saving is not None and component not in [
        lora_config.component for lora_config in setup.trainables.lora
    ]:
        raise UsageError(
            f"--{setup.saving.name}",
            f"has no effect: no LoRA on {component} is trained",
        )


def plan_of(config: TrainConfig) -> tuple[Plan, PipelineSpec, Task]:
    """Plan a command line: for the columns of its metadata, or else for every column."""
    setup = resolve(replace(config, dry_run=True))
    return setup.plan(_inputs(setup)), setup.spec, setup.task


def _inputs(setup: Setup) -> frozenset[str]:
    config = setup.config
    if config.dataset_base_path is None or setup.stage == "train":
        return setup.all_inputs()
    path = config.dataset_metadata_path or find_metadata(config.dataset_base_path)
    columns = input_columns(read_metadata(path), setup.data_config, setup.spec.inputs)
    sizes = (
        n
        for n, source in setup.spec.inputs.items()
        if isinstance(source, Measured) and source.of in columns
    )
    return frozenset([*columns, *sizes, *setup.spec.settings])


def resolve(config: TrainConfig) -> Setup:
    """Find the family, variant and task of a configuration; raises UsageError naming
    what is unknown.
    """
    family = load_family(config.model, config.left_out)
    models = model_configs(config, family)
    extensions = load_extensions(config.left_out)
    tasks, unusable = known_tasks(extensions)
    extensions = replace(extensions, broken=(*extensions.broken, *unusable))
    task = _task(config, tasks, extensions.broken)
    if config.variant is None:
        check_extra_inputs(config, family, task)
    variant = choose_variant(family, config.variant, hints_of(config, models, task))
    spec = with_overrides(family.spec(variant), family, config)
    check_frames(config, spec)
    check_components(config, spec)
    setup = Setup(
        config,
        family,
        spec.with_task_inputs(task),
        task,
        config.stage,
        resolve_experts(trainables_of(config, family), spec, family, models),
        default_device(),
        models,
        extensions,
    )
    check_saved_names(setup)
    if not config.dry_run:
        check_preset(setup)
    # Built once here, so that boundaries that leave nothing are refused before anything
    # is loaded.
    _ = setup.timestep_sampler
    return setup


def _task(
    config: TrainConfig, tasks: Mapping[str, Task], broken: Sequence[str]
) -> Task:
    """Return the task named; raises UsageError if there is none, or for an option that
    its loss does not use.
    """
    if config.task_name not in tasks:
        known = ", ".join(tasks)
        what = f"no task named {config.task_name!r}; tasks: {known}{nearest(config.task_name, tasks)}"
        raise UsageError("--task", what, *broken[:3])
    task = tasks[config.task_name]
    if "timestep_sampler" in task.loss.components:
        return task
    for flag in changed(config, "timestep_sampler"):
        raise UsageError(
            flag.spelled,
            f"has no effect: the loss of task {task.name} draws no timesteps",
        )
    return task


def known_tasks(extensions: Extensions) -> tuple[Mapping[str, Task], tuple[str, ...]]:
    """Tasks by name, core's own and those of plugins; and which of plugins cannot be
    used, and why.
    """
    offers = extensions.offered("dstrain_tasks", Task, OWN_TASKS)
    return {**OWN_TASKS, **offers.items}, offers.broken


def trainables_of(config: TrainConfig, family: ModelFamily) -> Trainables:
    """Return what the flags ask to train; by default LoRA on the family's component."""
    full = config.trainables
    base = config.lora_base_model or ("" if full else family.default_trainable)
    if not base:
        return Trainables(full)
    targets = config.lora_targets or family.lora_targets.get(base, ())
    if not targets:
        raise UsageError(
            "--lora_target_modules",
            f"is required: {family.name} has no default targets for {base!r}",
            f"it has for {', '.join(family.lora_targets)}",
        )
    alpha = float(
        config.lora_alpha if config.lora_alpha is not None else config.lora_rank
    )
    return Trainables(
        full, (LoraConfig(base, tuple(targets), config.lora_rank, alpha),)
    )


def log_warnings(setup: Setup) -> None:
    """Name the plugins that were left out because they are broken, and the data set's
    columns that nobody reads.
    """
    for reason in setup.extensions.broken:
        logger.warning(f"{reason}")
    if setup.stage == "train":
        return
    if not setup.stage and setup.config.feature_cache is not None:
        logger.warning(
            f"--feature_cache has no effect in a single run; it is used by --task {setup.task.name}:train"
        )
    shown = [
        cell.frames
        for cells in setup.dataset.rows
        for cell in cells.values()
        if cell.kind == "video"
    ]
    short = [frames for frames in shown if frames < setup.config.num_frames]
    if short:
        logger.warning(
            f"{len(short)} of {len(shown)} clips have fewer than --num_frames "
            f"{setup.config.num_frames} frames; the shortest has {min(short)}"
        )
    for name in setup.dataset.unused_columns:
        logger.warning(
            f"{setup.dataset.table.path}: column {name!r} is read by no input of this variant"
        )
