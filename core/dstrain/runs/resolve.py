"""Turn a configuration into a Setup: family, variant, task and trainables, checked
before anything is loaded.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from dstrain.cache import check_is_cache, is_cache, stored_plans
from dstrain.config import split_commas
from dstrain.config.options import TrainConfig
from dstrain.config.plugin_options import changed
from dstrain.data.tables import Reading, other_names, parse_columns
from dstrain.errors import UsageError, nearest
from dstrain.graph import Column, PipelineSpec, Task, make_plan
from dstrain.graph.noise_process import FlowMatchSchedule
from dstrain.lora import Trainables, type_named
from dstrain.models import ModelConfig, default_device
from dstrain.models.device import attention_backend
from dstrain.models.hub import hub_of_environment
from dstrain.models.naming import model_configs, refuse_unsupported
from dstrain.pipeline import (
    check_masks,
    choose_variant,
    generate_task,
    keeper_request,
    score_columns,
    with_overrides,
)
from dstrain.pipeline.keeping import given_expert
from dstrain.pipeline.variant_choice import Score, Scorer
from dstrain.registry import ModelFamily, PromptRow, extensions_in_use, load_family
from dstrain.runs.checkpoints.state import refuse_unwritable
from dstrain.runs.checks.flags import (
    check_component_flags,
    check_default_caption,
    check_objective,
    check_preset,
    check_saved_names,
    check_sizes,
    loaded_components,
    preset_is_there,
    refuse_precision,
    refuse_unused,
)
from dstrain.runs.datasets.flags import caption_inputs, with_masks_of_run, with_trigger
from dstrain.runs.datasets.sources import dataset_source, with_folders
from dstrain.runs.script.parts import NO_PARTS, OwnParts
from dstrain.runs.setup import Setup
from dstrain.training import OWN_TASKS
from dstrain.training.trainables import trainables_of


def resolve(config: TrainConfig, own: OwnParts = NO_PARTS) -> Setup:
    """Find the family, variant and task of a configuration; raises UsageError naming
    what is unknown. A script may have given tasks of its own.
    """
    attention_backend()  # refused before anything is downloaded
    family = load_family(config.model, config.disabled_plugins)
    if config.hub is None and not config.toy:
        # Recorded, so that `generate --run` finds the same files.
        config = replace(config, hub=hub_of_environment())
    config = with_folders(config)
    # Planning asks no hub.
    models = model_configs(config, family, offline=config.dry_run)
    refuse_unsupported(family, "--extra_inputs", split_commas(config.extra_inputs))
    extensions = extensions_in_use()
    extensions.refuse_unheard(config)
    tasks = {**OWN_TASKS, **extensions.offered("dstrain_tasks", Task, OWN_TASKS)}
    tasks |= own.offered_tasks(config.task_name, tasks)
    if config.task_name not in tasks:
        hint = nearest(config.task_name, tasks)
        what = f"no task named {config.task_name!r}; tasks: {', '.join(tasks)}{hint}"
        raise UsageError("--task", what, *extensions.broken[:3])
    task = tasks[config.task_name]
    score = variant_score(config, task)
    take_first = config.toy or not models
    variant = choose_variant(family, config.variant, models, score, take_first)
    spec = with_overrides(family.spec(variant), family, config)
    if task.runs_sampler and not isinstance(spec.schedule, FlowMatchSchedule):
        what = f"{task.name} follows Euler's rule of flow matching, which {spec.where} has not"
        raise UsageError("--task", what)
    if config.fix_frame_rate is False:
        columns = {
            name: replace(source, fps=0.0)
            for name, source in spec.inputs.items()
            if isinstance(source, Column)
        }
        spec = replace(spec, inputs={**spec.inputs, **columns})
    if not spec.reads_videos:
        refuse_unused(config, "video", f"variant {variant} reads no videos")
    if config.fix_frame_rate:
        # The same as without the flag, for the feature cache and for a resumed run, too.
        config = replace(config, fix_frame_rate=None)
    check_objective(config, spec, task)
    if not caption_inputs(spec):
        refuse_unused(config, "captions", f"variant {variant} reads no prompts")
    check_component_flags(config, spec)
    trainables = resolve_experts(
        trainables_of(config.trainable_models, config, family), spec, family, models
    )
    rows = extensions.answers("dstrain_rows", PromptRow, options=config)
    setup = Setup(
        config=config,
        family=family,
        spec=with_masks_of_run(spec.with_task_inputs(task), task, config),
        task=task,
        stage=config.stage,
        trainables=trainables,
        # Planned for a GPU, frozen weights are in bf16 by default.
        device=torch.device("cuda") if changed(config, "gpu") else default_device(),
        models=models,
        extensions=extensions,
        # Now, since what hooks keep in their modules changes as they run.
        modifiers=extensions.modifiers(config),
        prompt_rows=with_trigger(config, [row for _, row in rows]),
    )
    setup = with_keepers(setup)
    is_open = config.use_gradient_checkpointing is None and not setup.checkpoints
    if is_open and family.gradient_checkpointing:
        config = replace(config, use_gradient_checkpointing=True)
        setup = replace(setup, config=config)
    check_masks(setup.plan(setup.all_inputs()))
    check_saved_names(setup)
    check_default_caption(config)
    check_sizes(setup)
    if not config.dry_run or preset_is_there(config.preset_lora_path, spec):
        check_preset(setup)
    if config.stage != "data_process":
        # Tried before anything is loaded, and not saved for the first time hours later.
        refuse_precision(setup)
        refuse_unwritable(setup.optimizer.name, setup.optimizer.trial)
    # Built once here, so that boundaries that leave nothing are refused before anything
    # is loaded.
    setup.build_timestep_sampler()
    return setup


def with_keepers(setup: Setup) -> Setup:
    """Return a run with how the weights of its components are kept, as its options ask;
    raises UsageError for what it cannot have.
    """
    spec = setup.spec
    plan = setup.plan(setup.all_inputs())
    steps = [*plan.cached_steps, *plan.train_steps]
    used = set()
    if setup.prompt_rows:
        inference = make_plan(
            spec, frozenset(spec.inputs), generate_task(spec, guided=True)
        )
        steps += [*inference.cached_steps, *inference.train_steps]
        used |= {name for one in spec.decoders for name in one.components}
        if spec.experts is not None:
            used.update(*spec.experts.roles.values())
    used |= {name for step in steps for name in step.unit.components}
    request = replace(
        keeper_request(setup.config, setup.family, spec, setup.models),
        loaded=loaded_components(setup),
        used=used,
        in_steps=plan.components["train"],
        full=setup.trainables.full,
        lora={one.component: one.type for one in setup.trainables.lora},
        needs_plain={
            one.component
            for one in setup.trainables.lora
            if not type_named(one.type).stored
        },
        stage=setup.stage,
    )
    return replace(setup, keepers=setup.extensions.keepers(request))


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
    if config.stage != "train" or not place or not is_cache(place):
        return None
    check_is_cache(place)
    identities = [plan.identity for plan in stored_plans(place)]
    cached = {one["variant"] for one in identities if one["family"] == config.model}
    return lambda spec: (1, 0) if spec.variant in cached else None


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
