"""Keep weights in RAM as --blocks_to_swap, --enable_model_cpu_offload and
--offload_models ask.
"""

from dstrain.config.options import TrainConfig
from dstrain.console import get_logger
from dstrain.errors import UsageError
from dstrain.graph import make_plan
from dstrain.lora import Trainables
from dstrain.models.execution import ALL_BLOCKS
from dstrain.pipeline import generate_task
from dstrain.pipeline.kept_choice import OFFLOAD_FLAG
from dstrain.runs.setup import Setup
from dstrain.training import TrainingModule
from dstrain.training.offload.block_swap import FLAG, swapped_blocks

logger = get_logger(__name__)
ALL = "--enable_model_cpu_offload"


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
        return [f"or give {FLAG} N: the weights of N blocks are then in RAM"]
    return [f"or raise {FLAG}; {ALL} swaps all blocks"]


def blocks_to_swap(config: TrainConfig, trainables: Trainables) -> dict[str, int]:
    """Return how many blocks of each component are swapped; raises UsageError for one
    that is trained in full.
    """
    flag = swap_flag(config)
    if not flag:
        return {}
    for name in trainables.full:
        raise UsageError(
            flag,
            f"is for weights that do not change, but --trainable_models trains all of {name}",
            "train LoRA in place of it, or leave the flag out",
        )
    count = config.blocks_to_swap or ALL_BLOCKS
    return {lora.component: count for lora in trainables.lora}


def check_offloaded(setup: Setup) -> None:
    """Raise UsageError for a component of --offload_models that no unit or decoder uses,
    in any stage or preview.
    """
    offloaded = [name for name, one in setup.kept.items() if one.offloaded]
    if not offloaded:
        return
    spec = setup.spec
    plans = [setup.plan(setup.all_inputs())]
    decoders: set[str] = set()
    if setup.prompt_rows:
        inference = generate_task(spec, guided=True)
        plans.append(make_plan(spec, frozenset(spec.inputs), inference))
        decoders = {name for one in spec.decoders for name in one.components}
    # '' is the run that is not split, which loads what both stages load.
    loaded = dict.fromkeys(name for plan in plans for name in plan.components[""])
    used = decoders | {
        name
        for plan in plans
        for step in (*plan.cached_steps, *plan.train_steps)
        for name in step.unit.components
    }
    if spec.experts is not None and setup.prompt_rows:
        used.update(*spec.experts.roles.values())
    for name in offloaded:
        why = ""
        if name not in loaded:
            why = f"{name} is not loaded"
        elif name in setup.trainables.components:
            # Stage 1 does not load it, and DiffSynth-Studio's commands of stage 1 name it.
            if setup.stage != "data_process":
                why = f"{name} is trained; its blocks can be swapped with {FLAG}"
        elif name not in used:
            why = f"no unit or decoder uses {name}, but every step"
        if why:
            advice = f"this run loads {', '.join(loaded)}"
            raise UsageError(OFFLOAD_FLAG, f"has no effect: {why}", advice)


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
