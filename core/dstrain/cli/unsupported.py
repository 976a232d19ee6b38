"""Flags of the reference documents, and of other trainers, that dstrain does not have:
what to do instead.
"""

from collections.abc import Iterable
from types import MappingProxyType

from dstrain.errors import nearest

TRACKER = "there is no tracker yet; loss.csv in --output_path has every step's numbers"
MEMORY = "less memory: --use_gradient_checkpointing, and a split run, which loads in each stage what that one needs"
OPTIMIZER = "the optimizer is AdamW, with --learning_rate and --weight_decay"
FILES = "model files are given with --model_paths or --model_id_with_origin_paths"
STEPS = "want --save_steps N; the weights of every epoch are saved without it"
PREVIEWS = "want --preview_prompt TEXT, and --preview_steps N"
KEPT = "want --keep_checkpoints N"
LATER = "it is not there yet; leave it out"
INSTEAD = MappingProxyType(
    {
        "align_to_opensource_format": "leave it out: a saved LoRA has the names that diffusers loads",
        "blocks_to_swap": MEMORY,
        "caption_dropout": LATER,
        "checkpoints_total_limit": KEPT,
        "config_file": "it is a flag of accelerate: accelerate launch --config_file FILE -m dstrain; "
        "here --config FILE",
        "customized_optimizer": OPTIMIZER,
        "dataset_config": "want --dataset_base_path DIR, with a metadata file in it: docs/guide/datasets.md",
        "deterministic": "leave it out: on a CPU the same command gives the same bits; "
        "on a GPU it cannot be asked for yet",
        "dit": FILES,
        "ema_decay": LATER,
        "enable_csv_log": "leave it out: loss.csv is always written",
        "enable_swanlab_log": TRACKER,
        "enable_tensorboard_log": TRACKER,
        "enable_wandb_log": TRACKER,
        "fp8_base": f"weights are not quantised; {MEMORY}",
        "fp8_models": f"weights are not quantised; {MEMORY}",
        "gradient_clip": "want --max_grad_norm",
        "initialize_model_on_cpu": "leave it out: a component is built once, and only where it is needed",
        "loss_type": "the loss is that of --task",
        "lr": "want --learning_rate",
        "max_keep_ckpts": KEPT,
        "max_train_epochs": "want --num_epochs",
        "max_train_steps": "want --max_steps",
        "network_alpha": "want --lora_alpha",
        "network_dim": "want --lora_rank",
        "network_weights": "want --lora_checkpoint FILE",
        "offload_models": f"models are not moved between devices; {MEMORY}",
        "optimizer_args": OPTIMIZER,
        "optimizer_type": OPTIMIZER,
        "pretrained_model_name_or_path": FILES,
        "quant_options": f"weights are not quantised; {MEMORY}",
        "rank": "want --lora_rank",
        "resolution": "want --height and --width, or --max_pixels",
        "resume_from": "want --resume PATH, which goes on where a run stopped",
        "sample_every_n_steps": PREVIEWS,
        "sample_prompts": PREVIEWS,
        "save_every": STEPS,
        "save_every_n_epochs": STEPS,
        "save_every_n_steps": STEPS,
        "text_encoder": FILES,
        "train_batch_size": "want --batch_size",
        "vae": FILES,
        "validation_split": LATER,
    }
)
"""Flag -> one line of advice."""


def no_such(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """What is said of a flag that is not known: the nearest one, and a line of advice
    where there is one.
    """
    bare = name.lstrip("-").replace("-", "_")
    advice = INSTEAD.get(bare)
    return (
        f"no such option{'' if advice else nearest(name, known)}",
        *([advice] if advice else []),
    )
