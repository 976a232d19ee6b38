"""What a run says of itself: at its start what will happen, at its end where the weights are and how to try them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dstrain.generate import generate_command

if TYPE_CHECKING:
    from dstrain.train import Job


def announce(job: "Job", folder: Path) -> None:
    """Say what is trained on what, for how long, and where it goes."""
    module, say, setup = job.module, job.world.say, job.setup
    count = sum(parameter.numel() for parameter in module.trained_parameters)
    total = sum(parameter.numel() for parameter in module.networks.parameters())
    say(f"device {setup.device}, mixed precision {setup.mixed_precision}, {job.world.size} process(es)")
    say(f"trains {', '.join(module.trained.components)}: {count:,} parameters, {count / total:.1%} of those in a step")
    for component, matches in module.trained.matches.items():
        say(f"LoRA on {component}: " + ", ".join(f"{pattern} x{number}" for pattern, number in matches.items()))
    if module.trained.unreached:
        say(f"frozen, since no loss reaches them: {len(module.trained.unreached)} parameters")
    say(
        f"{len(job.order.groups)} rows x {job.order.repeat}, {job.order.steps} steps an epoch; runs to step {job.steps}"
    )
    say(f"writes {folder}")


def conclude(job: "Job", folder: Path, weights: Sequence[Path]) -> None:
    """Say where the weights are and how to try them."""
    if not weights:
        job.world.say(f"nothing left to do: {folder} is at step {job.step} of {job.steps}")
        return
    job.world.say("weights: " + ", ".join(str(path) for path in weights))
    by_component = dict(zip(job.module.trained.components, weights, strict=True))
    loras = {name: path for name, path in by_component.items() if name in job.module.trained.lora}
    full = {name: path for name, path in by_component.items() if name not in loras}
    job.world.say("try them: " + generate_command(job.setup, job.found, full, loras))
