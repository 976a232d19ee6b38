"""Refuse what sharding cannot do, before anything is loaded."""

from collections.abc import Sequence

from dstrain.errors import UsageError
from dstrain.graph import Plan
from dstrain.runs.setup import Setup

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

    Args:
        setup: The run.
        plans: The plans of its samples, as far as they are known.
    """
    config = setup.config
    experts = setup.trained_experts
    if len(experts) > 1:
        # Of a step's samples, one process may have those of one expert only.
        what = f"cannot shard {', '.join(experts)}: each sample needs only one of them"
        raise UsageError("sharding", what, "train one after the other", WITHOUT)
    for plan in plans:
        for step in plan.train_steps:
            for name in step.unit.components:
                if name in setup.trainables.components:
                    # Units run once a sample, of which processes may have unequally many.
                    what = f"cannot shard {name}: {step.unit.name} runs it once for each sample"
                    raise UsageError("sharding", what, WITHOUT)
    for keeper in setup.keepers.all:
        if keeper.unshardable and {*keeper.components} & {*setup.trainables.components}:
            raise UsageError(keeper.flag, keeper.unshardable, "leave it out", WITHOUT)
    if config.lora_type != "lora":
        what = f"{config.lora_type} computes with whole weights, not with rows of them"
        raise UsageError("--lora_type", what, "train lora", WITHOUT)
    optimizer = setup.optimizer
    if optimizer.rounds:
        # Each number is rounded by its own draw, which follows from its place in the
        # whole tensor.
        what = "sharded weights are trained in fp32, not in bf16"
        raise UsageError("--trainable_dtype", what, "leave it out", WITHOUT)
    path = optimizer.identity["optimizer"]
    if not path.startswith(KNOWN) or path.rpartition(".")[2] not in BY_ROWS:
        what = f"{optimizer.name} is not known to do with rows what it does with whole tensors"
        advice = "use adamw, lion or schedulefree"
        raise UsageError("--optimizer", what, advice, WITHOUT)
    if setup.prompt_rows:
        raise UsageError(
            setup.prompt_rows[0].option,
            "one process makes the images, but with sharding none has all weights",
            f"leave it out, and generate from what is saved: dstrain generate --run {setup.output}",
        )
