"""Keep weights in RAM as --blocks_to_swap, --enable_model_cpu_offload and
--offload_models ask.
"""

from dataclasses import replace

from dstrain.config.fields import split_commas
from dstrain.config.options.train import TrainConfig
from dstrain.console import get_logger
from dstrain.errors import UsageError, nearest
from dstrain.graph.plan import make_plan
from dstrain.models.components import components_of
from dstrain.models.execution.kept import ALL_BLOCKS, AS_LOADED
from dstrain.pipeline.sampling import generate_task
from dstrain.runs.setup import Setup
from dstrain.training.module import TrainingModule
from dstrain.training.offload.block_swap import FLAG, swapped_blocks

logger = get_logger(__name__)
ALL = "--enable_model_cpu_offload"
MODELS = "--offload_models"


def swap_flag(config: TrainConfig) -> str:
    """Return the flag that asks for block swap; '' for none."""
    if not config.swaps_blocks:
        return ""
    return ALL if config.enable_model_cpu_offload else FLAG


def swap_advice(setup: Setup) -> list[str]:
    """Return what to do with less memory about a run that swaps no blocks, or few."""
    if setup.sharding is not None:
        return list(setup.sharding.advice())
    if setup.trainables.full or setup.config.enable_model_cpu_offload:
        return []
    if setup.config.blocks_to_swap is None:
        return [f"or give {FLAG} N: the weights of N blocks are then in CPU memory"]
    return [f"or raise {FLAG}; {ALL} swaps all blocks"]


def with_offload(setup: Setup) -> Setup:
    """Return the setup in which components are kept as the flags say.

    Raises UsageError for a component of which nothing can be kept so.
    """
    kept = dict(setup.kept)
    for name in _offloaded(setup) if setup.config.offload_models else ():
        kept[name] = replace(kept.get(name, AS_LOADED), offloaded=True)
    flag = swap_flag(setup.config)
    if flag:
        count = setup.config.blocks_to_swap or ALL_BLOCKS
        _refuse_trained_in_full(setup, flag)
        for lora in setup.trainables.lora:
            before = kept.get(lora.component, AS_LOADED)
            kept[lora.component] = replace(before, swapped_blocks=count)
    return replace(setup, kept=kept)


def _refuse_trained_in_full(setup: Setup, flag: str) -> None:
    for name in setup.trainables.full:
        raise UsageError(
            flag,
            f"is for weights that do not change, but --trainable_models trains all of {name}",
            "train LoRA in place of it, or leave the flag out",
        )


def _offloaded(setup: Setup) -> list[str]:
    """Return the components of --offload_models; raises UsageError for one that no unit
    or decoder uses, in any stage or preview.
    """
    spec = setup.spec
    known = components_of(setup.family)
    plans = [setup.plan(setup.all_inputs())]
    decoders: set[str] = set()
    if setup.config.preview_prompt:
        inference = generate_task(spec, guided=True)
        plans.append(make_plan(spec, frozenset(spec.inputs), inference))
        decoders = {name for one in spec.decoders for name in one.components}
    # '' is the run that is not split, which loads what both stages load.
    loaded = dict.fromkeys(name for plan in plans for name in plan.components[""])
    borrowed = decoders | {
        name
        for plan in plans
        for step in (*plan.cached_steps, *plan.train_steps)
        for name in step.unit.components
    }
    if spec.experts is not None and setup.config.preview_prompt:
        borrowed |= set(spec.experts.components)
    names = split_commas(setup.config.offload_models)
    for name in names:
        if name not in loaded:
            hint = nearest(name, loaded)
            what = f"this run loads no component {name!r}{hint}"
            raise UsageError(MODELS, what, f"it loads {', '.join(loaded)}")
        why = ""
        if name in setup.trainables.components:
            why = f"{name} is trained; its blocks can be swapped with {FLAG}"
        elif name not in borrowed:
            why = f"no unit or decoder uses {name}, but every step"
        elif name in known and known[name].is_folder:
            why = f"{name} has no weights"
        if why:
            raise UsageError(MODELS, f"has no effect: {why}")
    return list(names)


def start_swap(setup: Setup, module: TrainingModule, empty: bool) -> None:
    """Swap blocks of the networks in training; their LoRA layers exist and their blocks
    are checkpointed.

    Raises UsageError for a network with fewer blocks, and where none has any. `empty` is
    as in `Pipeline.from_found`: then nothing else is done.
    """
    flag = swap_flag(setup.config)
    if not flag:
        return
    trained = module.trained.components
    blocks = {
        name: swapped_blocks(
            name, module.pipeline.components[name], setup.kept[name].swapped_blocks
        )
        for name in trained
    }
    if not any(blocks.values()):
        what = f"has no effect: {', '.join(trained)} repeats no blocks"
        raise UsageError(flag, what)
    config = setup.config
    asked = (
        config.use_gradient_checkpointing or config.use_gradient_checkpointing_offload
    )
    if not asked:
        logger.info(f"{flag} turns gradient checkpointing on")
    for name, swapped in blocks.items():
        if swapped and not empty:
            # LoRA layers that no loss reaches are frozen, and saved with the others.
            saved = [
                full_name.removeprefix(f"{name}.")
                for full_name in module.trained.unused_parameters
            ]
            network = module.pipeline.components[name]
            module.block_swap.add(name, network, len(swapped), saved)
