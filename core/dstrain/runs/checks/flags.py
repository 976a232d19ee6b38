"""Refuse options that a run cannot have, or that would have no effect in it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.config import Effect, datasets_of, split_commas
from dstrain.config.lora_file import TRAINING_ONLY, parse_preset
from dstrain.config.options import TrainConfig
from dstrain.config.plugin_options import changed
from dstrain.config.validation import check_acting
from dstrain.errors import UsageError, about_dataset, nearest
from dstrain.graph import Column, PipelineSpec, Plan, Task, make_plan
from dstrain.installed import NamingPlugin
from dstrain.lora import format_named, formats_where
from dstrain.models import components_of
from dstrain.pipeline import generate_task
from dstrain.runs.datasets.flags import resolutions_of
from dstrain.runs.datasets.sources import dataset_source
from dstrain.runs.setup import Setup

DEFAULT_CAPTION = "default_caption"


def refuse_precision(setup: Setup) -> None:
    """Refuse bf16 weights where the rest computes in fp32."""
    if setup.optimizer.rounds and setup.mixed_precision != "bf16":
        what = "bf16 goes together with --mixed_precision bf16"
        raise UsageError("--trainable_dtype", what)


def refuse_unused(config: TrainConfig, effect: Effect, why: str) -> None:
    """Refuse the options with an effect that this run cannot have, also where they are
    those of one of its datasets.
    """
    for flag in changed(config, effect):
        raise UsageError(f"--{flag.name}", f"has no effect: {why}")
    if config.dataset:
        for one in datasets_of(config):
            with about_dataset(one.name):
                refuse_unused(one.config, effect, why)


def check_objective(config: TrainConfig, spec: PipelineSpec, task: Task) -> None:
    """Refuse options of the objective that do not act in a task, or not with another
    option, which the variant may decide.
    """
    defaults = spec.defaults_of_training
    own: dict[str, Any] = {
        name: value
        for name, value in defaults.items()
        if getattr(config, name) in (None, value)
    }
    # They stand in the file of options that a run writes.
    unsaid: dict[str, Any] = dict.fromkeys(own)
    left_out = replace(config, **unsaid)
    acts: dict[Effect, str] = {
        "timestep_sampler": "draws no timesteps",
        "loss_options": "has its own measure of errors, and its own noise",
    }
    for effect, why in acts.items():
        if effect not in task.loss.components:
            refuse_unused(left_out, effect, f"the loss of task {task.name} {why}")
    if config.timestep_shift is not None:
        spec.schedule.shifted(config.timestep_shift)
    check_acting(replace(config, **own))


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


def check_saved_names(setup: Setup) -> None:
    """Refuse a program that has no key names for what is trained, and the family's flag
    of one if it would have no effect.
    """
    family, config = setup.family, setup.config
    types = {layers.component: layers.type for layers in setup.trainables.lora}
    if setup.saving is not None:
        flag = f"--{setup.saving.name}"
        if family.default_trainable not in types:
            what = f"has no effect: no LoRA on {family.default_trainable} is trained"
            raise UsageError(flag, what)
        if config.lora_format is not None:
            what = f"has no effect with --lora_format {config.lora_format}"
            raise UsageError(flag, what)
    for name, component in components_of(family).items():
        if name not in setup.trainables.components:
            continue
        kind = types.get(name)
        # Of a LoRA, or of everything.
        method, last = ("has_names", kind) if kind else ("weights", {})
        given = (component, family, last)
        having = [one.name for one in formats_where(method, *given)]
        program = format_named(setup.saved_names(name))
        if program.name not in having:
            flag = "--lora_format"
            with NamingPlugin(program.plugin, f"its LoRA format {program.name}"):
                getattr(program, method)(*given)
                if config.lora_format is None:
                    flag = program.asked_by(config) or flag
            what = f"{program.name} has no key names for {kind or 'all'} of {name}"
            raise UsageError(flag, what, f"programs that have: {', '.join(having)}")


def check_sizes(setup: Setup) -> None:
    """Refuse sizes and numbers of frames that the variant cannot have, before any row is
    read; raises UsageError.
    """
    if setup.config.stage == "train":
        return
    for column in setup.spec.inputs.values():
        if not isinstance(column, Column) or not column.is_file or not column.multiple:
            continue
        for part in datasets_of(setup.config):
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
            config, dataset_base_path=second, dataset_metadata_path=metadata, dataset=()
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
    """Refuse a preset of a component that no stage loads, and one for training only of
    what cached values or saved weights have in them.
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
    if not preset.file.training_only:
        return
    inseparable = [name.partition(".")[0] for name in setup.trainables.full]
    inseparable += setup.plan(setup.all_inputs()).components["data_process"]
    for name in preset.components:
        if name in inseparable:
            what = f"@{TRAINING_ONLY} is for a denoiser that LoRA is trained on, not for {name}"
            raise UsageError("--preset_lora_path", what)


def preset_is_there(path: Path | None, spec: PipelineSpec) -> bool:
    """Return whether there is a preset, and its file exists."""
    return (
        path is not None and parse_preset(str(path)).of(spec.components).path.exists()
    )


def loaded_components(setup: Setup) -> list[str]:
    """Return the components that a run loads, in any stage, those of prompts included."""
    spec = setup.spec
    plans = [setup.plan(setup.all_inputs())]
    if setup.prompt_rows:
        inference = generate_task(spec, guided=True)
        plans.append(make_plan(spec, frozenset(spec.inputs), inference))
    # '' is the run that is not split, which loads what both stages load.
    return list(dict.fromkeys(name for plan in plans for name in plan.components[""]))


WITHOUT = "train without sharding: a launcher's configuration of MULTI_GPU"
BY_ROWS = frozenset(
    {
        *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam"),
        *("RMSprop", "Rprop", "SGD", "Lion", "AdamWScheduleFree", "RAdamScheduleFree"),
        "SGDScheduleFree",
    }
)
"""Classes of optimizers that change each number separately, and so do with rows what they do
with whole tensors."""
KNOWN = ("torch.optim.", "pytorch_optimizer.optimizer.lion.", "schedulefree.")
"""Where these are from."""


def refuse_unshardable(setup: Setup, plans: Sequence[Plan] = ()) -> None:
    """Raise UsageError for a run whose processes would not all put the same weights
    together at the same time, or that needs weights as a whole.

    plans: The plans of its samples, as far as they are known.
    """
    config = setup.config
    trained = setup.trainables.components
    experts = setup.trained_experts
    if len(experts) > 1:
        # Of a step's samples, one process may have those of one expert only.
        what = f"cannot shard {', '.join(experts)}: each sample needs only one of them"
        raise UsageError("sharding", what, WITHOUT)
    for step in (step for plan in plans for step in plan.train_steps):
        for name in {*step.unit.components} & {*trained}:
            # Units run once a sample, of which processes may have unequally many.
            what = f"cannot shard {name}: {step.unit.name} runs it once for each sample"
            raise UsageError("sharding", what, WITHOUT)
    for keeper in setup.keepers.all:
        if keeper.unshardable and {*keeper.components} & {*trained}:
            raise UsageError(keeper.flag, keeper.unshardable, WITHOUT)
    if config.lora_type != "lora":
        what = f"{config.lora_type} computes with whole weights, not with rows of them"
        raise UsageError("--lora_type", what, WITHOUT)
    optimizer = setup.optimizer
    if optimizer.rounds:
        # Each number is rounded by its own draw, which follows from its place in the
        # whole tensor.
        what = "sharded weights are trained in fp32, not in bf16"
        raise UsageError("--trainable_dtype", what, WITHOUT)
    path = optimizer.identity["optimizer"]
    if not path.startswith(KNOWN) or path.rpartition(".")[2] not in BY_ROWS:
        what = f"{optimizer.name} is not known to do with rows what it does with whole tensors"
        raise UsageError("--optimizer", what, "use adamw, lion or schedulefree")
    if setup.prompt_rows:
        what = "one process makes the images, but with sharding none has all weights"
        raise UsageError(setup.prompt_rows[0].option, what, WITHOUT)
