"""What to do instead of flags that other trainers have and dstrain does not."""

from collections.abc import Iterable

from dstrain.errors import nearest

_MEMORY = (
    "to save memory use --use_gradient_checkpointing, or run the two stages separately"
)
ADVICE = (
    ("use --lora_rank", "network_dim rank"),
    ("use --lora_alpha", "network_alpha"),
    ("use --lora_checkpoint FILE", "network_weights"),
    ("use --learning_rate", "lr"),
    ("use --num_epochs", "max_train_epochs"),
    ("use --max_steps", "max_train_steps"),
    ("use --batch_size", "train_batch_size"),
    ("use --max_grad_norm", "gradient_clip"),
    ("use --height and --width, or --max_pixels", "resolution"),
    ("use --resume PATH, which resumes where a run stopped", "resume_from"),
    ("use --preview_prompt TEXT and --preview_steps N", "sample_every_n_steps sample_prompts"),
    ("use --keep_checkpoints N", "checkpoints_total_limit max_keep_ckpts"),
    (
        "use --save_steps N; without it weights are saved after every epoch",
        "save_every save_every_n_epochs save_every_n_steps",
    ),
    (
        "use --dataset_base_path DIR, with a metadata file in it: docs/guide/datasets.md",
        "dataset_config",
    ),
    (
        "use --model_paths or --model_id_with_origin_paths for model files",
        "dit pretrained_model_name_or_path text_encoder vae",
    ),
    (
        "the optimizer is AdamW, with --learning_rate and --weight_decay",
        "customized_optimizer optimizer_args optimizer_type",
    ),
    ("the loss is that of --task", "loss_type"),
    (
        "it is a flag of accelerate: accelerate launch --config_file FILE -m dstrain; here use --config FILE",
        "config_file",
    ),
    ("leave it out: a saved LoRA has the names that diffusers loads", "align_to_opensource_format"),
    (
        "leave it out: on a CPU the same command gives the same bits; on a GPU this is not supported yet",
        "deterministic",
    ),
    ("leave it out: loss.csv is always written", "enable_csv_log"),
    ("leave it out: a component is built only once, where it is needed", "initialize_model_on_cpu"),
    (
        "trackers are not supported yet; loss.csv in --output_path has the numbers of every step",
        "enable_swanlab_log enable_tensorboard_log enable_wandb_log",
    ),
    (f"weights are not quantized; {_MEMORY}", "fp8_base fp8_models quant_options"),
    (f"models are not moved between devices; {_MEMORY}", "blocks_to_swap offload_models"),
    ("not supported yet; leave it out", "caption_dropout ema_decay validation_split"),
)  # fmt: skip
"""A line of advice, and the flags that it is for."""


def advice_for(flag: str) -> str | None:
    """Return what to do instead of another trainer's flag (a name without dashes)."""
    for advice, names in ADVICE:
        if flag in names.split():
            return advice
    return None


def no_such(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the lines of an error about an unknown option: advice, or the nearest
    name.
    """
    advice = advice_for(name.lstrip("-").replace("-", "_"))
    if advice is not None:
        return "no such option", advice
    return (f"no such option{nearest(name, known)}",)
