"""Refuse what sharding cannot do, before anything is loaded."""

from collections.abc import Sequence

from dstrain.errors import UsageError
from dstrain.graph.plan import Plan
from dstrain.runs.setup import Setup

WITHOUT = "train without sharding: a launcher's configuration of MULTI_GPU"
ELEMENTWISE = (
    "torch.optim.adamw.AdamW",
    "pytorch_optimizer.optimizer.lion.Lion",
    "schedulefree.adamw_schedulefree.AdamWScheduleFree",
)
"""Optimizers that change each number by its own gradient and state alone. Others look
at rows, columns or blocks of a tensor, which a part of its rows has otherwise."""


def refuse_unshardable(setup: Setup, plans: Sequence[Plan]) -> None:
    """Raise UsageError for a run whose processes would not all put the same weights
    together at the same time, or that needs weights as a whole.
    """
    experts = setup.trained_experts
    if len(experts) > 1:
        # Of a step's samples, one process may have those of one expert only.
        what = f"cannot divide {', '.join(experts)}: each sample needs only one of them"
        raise UsageError("sharding", what, "train one after the other", WITHOUT)
    for plan in plans:
        for step in plan.train_steps:
            for name in step.unit.components:
                if name in setup.trainables.components:
                    # Units run once a sample, of which processes may have unequally many.
                    what = f"cannot divide {name}: {step.unit.name} runs it once for each sample"
                    raise UsageError("sharding", what, WITHOUT)
    for name in setup.trainables.components:
        if name in setup.kept and setup.kept[name].swapped_blocks:
            what = f"cannot divide {name}: its swapped blocks must be whole in each process"
            raise UsageError("sharding", what, "leave out --blocks_to_swap", WITHOUT)
    if setup.config.compile:
        what = (
            "sharding puts other weights in the place of those that were compiled with"
        )
        raise UsageError("--compile", what, "leave it out", WITHOUT)
    if setup.optimizer.identity["optimizer"] not in ELEMENTWISE:
        name = setup.optimizer.name
        what = f"{name} is not known to do with rows what it does with whole tensors"
        raise UsageError(
            "--optimizer", what, "use adamw, lion or schedulefree", WITHOUT
        )
    if setup.config.preview_prompt:
        raise UsageError(
            "--preview_prompt",
            "one process makes the previews, but with sharding none has all weights",
            "leave it out, and generate from the saved weights",
        )
