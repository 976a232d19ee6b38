"""Flags of the reference documents, and of other trainers, that dstrain does not have: what to do instead."""

from collections.abc import Iterable
from types import MappingProxyType

from dstrain.errors import nearest

TRACKER = "there is no tracker yet; loss.csv in --output_path has every step's numbers"
MEMORY = "less memory: --use_gradient_checkpointing, and a split run, which loads in each stage what that one needs"
OPTIMIZER = "the optimizer is AdamW, with --learning_rate and --weight_decay"
LATER = "it is not there yet; leave it out"
INSTEAD = MappingProxyType({
    "align_to_opensource_format": "leave it out: a saved LoRA has the names that diffusers loads",
    "caption_dropout": LATER,
    "config_file": "it is a flag of accelerate: accelerate launch --config_file FILE -m dstrain; here --config FILE",
    "customized_optimizer": OPTIMIZER,
    "deterministic": "leave it out: on a CPU the same command gives the same bits; on a GPU it cannot be asked for yet",
    "ema_decay": LATER,
    "enable_csv_log": "leave it out: loss.csv is always written",
    "enable_swanlab_log": TRACKER,
    "enable_tensorboard_log": TRACKER,
    "enable_wandb_log": TRACKER,
    "fp8_models": f"weights are not quantised; {MEMORY}",
    "initialize_model_on_cpu": "leave it out: a component is built once, and only where it is needed",
    "lr": "want --learning_rate",
    "offload_models": f"models are not moved between devices; {MEMORY}",
    "optimizer_args": OPTIMIZER,
    "quant_options": f"weights are not quantised; {MEMORY}",
    "resolution": "want --height and --width, or --max_pixels",
    "validation_split": LATER,
})  # fmt: skip
"""Flag -> one line of advice."""


def no_such(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """What is said of a flag that is not known: the nearest one, and a line of advice where there is one."""
    bare = name.lstrip("-").replace("-", "_")
    advice = INSTEAD.get(bare)
    return (f"no such option{'' if advice else nearest(name, known)}", *([advice] if advice else []))
