"""Load the pipeline, and put what is trained into training mode."""

from collections.abc import Sequence

import torch

from dstrain.config import parse_lora
from dstrain.errors import UsageError
from dstrain.graph import Plan
from dstrain.graph.keepers import WITH_LORA
from dstrain.lora import check_lora_file, check_names
from dstrain.models import Found
from dstrain.models.execution import enable_checkpointing
from dstrain.pipeline import Pipeline
from dstrain.runs.checkpoints.initial_weights import initial_weights
from dstrain.runs.setup import Setup
from dstrain.training import TrainingModule
from dstrain.training.optimizers import parameter_groups
from dstrain.training.sharded_networks import Division, refuse_single_numbers
from dstrain.training.trainables import check_start, start_from_lora


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
    found, files = initial_weights(setup, found)
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
    module.loss_options = setup.build_loss_options()
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
