"""Every option of a training run and of `dstrain generate`: its type, default, bounds,
help and effects.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dstrain.config.fields import (
    Effect,
    LoraFile,
    NamedInput,
    flags,
    option,
)

SamplingMode = Literal["head", "chunk", "uniform"]
Precision = Literal["no", "bf16"]
Hub = Literal["modelscope", "huggingface"]
OnLongPrompt = Literal["error", "truncate"]
SavedFormat = Literal["diffusers", "comfyui", "diffsynth", "reference"]
ENDING_AT_LAST_STEP = ("linear", "cosine")
"""Learning rate schedules whose every value depends on how many steps the run has."""


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """The options of every command that opens a model."""

    model: str = field(
        metadata={
            "group": "model",
            "help": "Model family (`dstrain models` lists the installed ones).",
            "affects": {"training"},
        }
    )
    variant: str | None = option(
        "model",
        "Variant of the family. Defaults to the one that fits the model files and inputs (the first, for a toy).",
        affects={"resolved"},
    )
    model_paths: str | None = option(
        "model",
        "Local model files: a JSON list of paths, or of lists of paths for sharded files.",
    )
    model_id_with_origin_paths: str | None = option(
        "model",
        "Published model files to download, comma-separated: ID:PATTERN or ID@REVISION:PATTERN, ...",
    )
    toy: bool = option(
        "model",
        "Use a tiny model with random weights instead of model files.",
        False,
    )
    hub: Hub = option(
        "model",
        "Hub to download missing model files from.",
        "modelscope",
    )
    mixed_precision: Precision | None = option(
        "memory",
        "Compute dtype. Defaults to bf16 on a GPU and no (fp32) on a CPU.",
        affects={"resolved"},
    )
    seed: int = option(
        "general",
        "Random seed.",
        0,
        affects={"training"},
        minimum=0,
        maximum=2**63 - 1,
    )
    height: int | None = option(
        "data",
        "Height of images and videos in pixels; requires --width.",
        affects={"training", "cache"},
        minimum=1,
    )
    width: int | None = option(
        "data",
        "Width of images and videos in pixels; requires --height.",
        affects={"training", "cache"},
        minimum=1,
    )
    family_options: Mapping[str, str] = field(default_factory=dict)
    """Values of the family's own options."""
    disabled_plugins: tuple[str, ...] = ()
    """Disabled plugins, by name or distribution (`-p no:NAME`)."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ModelChoice):
    """A training run, or one stage of it, as plain data."""

    task: str = option(
        "training",
        "Training task. TASK:data_process and TASK:train run its two stages separately.",
        "sft",
        affects={"recipe"},
    )
    dataset_base_path: Path | None = option(
        "data",
        "Dataset folder; paths in the metadata are relative to it.",
    )
    dataset_metadata_path: Path | None = option(
        "data",
        "Metadata file (csv, json or jsonl). Defaults to metadata.* in --dataset_base_path.",
    )
    dataset_root: tuple[Path, ...] = option(
        "data",
        "Additional folder that dataset files may be in. Can be repeated.",
        (),
    )
    url_cache: Path | None = option(
        "data",
        "Folder for files that the metadata names by URL. Without it, URLs are refused.",
    )
    on_bad_sample: Literal["error", "skip"] = option(
        "data",
        "What to do with unreadable rows: stop with an error, or skip them and write bad_samples.jsonl.",
        "error",
    )
    on_long_prompt: OnLongPrompt = option(
        "data",
        "What to do with prompts longer than the model takes: stop with an error, or cut them and warn.",
        "truncate",
    )
    dataset_repeat: int = option(
        "data",
        "Number of times each row is used per epoch.",
        1,
        affects={"training"},
        minimum=1,
    )
    dataset_num_workers: int = option(
        "data",
        "Number of data loading processes; 0 loads in the main process.",
        0,
        minimum=0,
    )
    max_pixels: int = option(
        "data",
        "Without --height and --width, scale larger images down to this many pixels.",
        1048576,
        affects={"training", "cache"},
        minimum=1,
    )
    data_file_keys: str | None = option(
        "data",
        "Dataset columns that contain file names, comma-separated. Defaults to the variant's.",
        affects={"resolved", "cache"},
    )
    extra_inputs: str | None = option(
        "data",
        "Additional dataset columns to use as model inputs, comma-separated.",
        affects={"resolved", "cache"},
    )
    num_frames: int = option(
        "data",
        "Number of video frames per sample.",
        81,
        affects={"training", "cache", "video"},
        minimum=1,
    )
    frame_sampling: SamplingMode = option(
        "data",
        "Which samples to take from a video: its first frames, consecutive chunks, or "
        "--frame_samples evenly spaced clips.",
        "head",
        affects={"training", "cache", "video"},
    )
    frame_samples: int | None = option(
        "data",
        "Number of samples per video with --frame_sampling uniform.",
        affects={"training", "cache", "video"},
        minimum=1,
    )
    feature_cache: Path | None = option(
        "data",
        "Folder of the feature cache, which stage 1 writes and stage 2 reads. Defaults to "
        "stage 1's --output_path and stage 2's --dataset_base_path.",
    )
    trainable_models: str | None = option(
        "training",
        "Components (or submodules, such as dit.blocks.3) to train in full, comma-separated.",
        affects={"resolved"},
    )
    learning_rate: float = option(
        "training",
        "Learning rate.",
        1e-4,
        affects={"training"},
        above=0,
    )
    lr_scheduler: Literal["constant", "constant_with_warmup", "linear", "cosine"] = (
        option(
            "training",
            "Learning rate schedule.",
            "constant",
            affects={"training"},
        )
    )
    lr_warmup_steps: int = option(
        "training",
        "Number of warmup steps, over which the learning rate rises from 0.",
        0,
        affects={"training"},
        minimum=0,
    )
    weight_decay: float = option(
        "training",
        "Weight decay of AdamW.",
        0.01,
        affects={"training"},
        minimum=0,
    )
    max_grad_norm: float = option(
        "training",
        "Maximum gradient norm; larger gradients are clipped.",
        1.0,
        affects={"training"},
        above=0,
    )
    num_epochs: int | None = option(
        "training",
        "Number of epochs. Defaults to 1 unless --max_steps is set.",
        affects={"length"},
        minimum=1,
    )
    max_steps: int | None = option(
        "training",
        "Stop after this many optimizer steps, or after --num_epochs, whichever comes first.",
        affects={"length"},
        minimum=1,
    )
    batch_size: int = option(
        "training",
        "Batch size per device.",
        1,
        affects={"resolved", "recipe"},
        minimum=1,
    )
    gradient_accumulation_steps: int = option(
        "training",
        "Number of batches per optimizer step.",
        1,
        affects={"resolved", "recipe"},
        minimum=1,
    )
    timestep_sampling: Literal["shifted", "logit_normal", "uniform", "mode"] = option(
        "training",
        "Distribution that training timesteps are drawn from.",
        "shifted",
        affects={"training", "timestep_sampler"},
    )
    loss_weighting: Literal["bsmntw", "none"] = option(
        "training",
        "Weighting of the loss by timestep.",
        "bsmntw",
        affects={"training", "timestep_sampler"},
    )
    min_timestep_boundary: float | None = option(
        "training",
        "Lower end of the training timestep range, as a fraction of the schedule (0 = noisiest). "
        "Defaults to the expert's range.",
        affects={"training", "timestep_sampler"},
        minimum=0,
        maximum=1,
    )
    max_timestep_boundary: float | None = option(
        "training",
        "Upper end of the training timestep range. Defaults to the expert's range.",
        affects={"training", "timestep_sampler"},
        minimum=0,
        maximum=1,
    )
    find_unused_parameters: bool = option(
        "training",
        "Let DistributedDataParallel search for parameters without a gradient.",
        False,
    )
    use_gradient_checkpointing: bool = option(
        "memory",
        "Recompute activations in the backward pass instead of storing them.",
        False,
    )
    use_gradient_checkpointing_offload: bool = option(
        "memory",
        "Offload checkpointed activations to CPU memory (implies --use_gradient_checkpointing).",
        False,
    )
    lora_base_model: str | None = option(
        "LoRA",
        "Component to add LoRA to.",
        affects={"resolved", "LoRA"},
    )
    lora_target_modules: str | None = option(
        "LoRA",
        "Module names to add LoRA to, comma-separated. Defaults to the family's list.",
        affects={"resolved", "LoRA"},
    )
    lora_rank: int = option(
        "LoRA",
        "LoRA rank.",
        32,
        affects={"resolved", "LoRA"},
        minimum=1,
    )
    lora_alpha: float | None = option(
        "LoRA",
        "LoRA alpha; the layers are scaled by alpha / rank. Defaults to the rank.",
        affects={"resolved", "LoRA"},
        above=0,
    )
    lora_checkpoint: Path | None = option(
        "LoRA",
        "LoRA file to start training from.",
        affects={"LoRA", "weights"},
    )
    preset_lora_path: Path | None = option(
        "LoRA",
        "LoRA file to merge into the weights before training (differential LoRA training).",
        affects={"weights"},
    )
    preset_lora_model: str | None = option(
        "LoRA",
        "Component to merge --preset_lora_path into.",
    )
    output_path: Path | None = option(
        "output",
        "Folder for checkpoints and logs.",
    )
    remove_prefix_in_ckpt: str | None = option(
        "output",
        "Save with DiffSynth-Studio's key names. They have no prefix, whatever the value (pipe.COMPONENT.).",
    )
    lora_format: SavedFormat | None = option(
        "output",
        "Program whose key names saved LoRA, or full weights, have; reference is diffsynth. "
        "Defaults to diffsynth with --remove_prefix_in_ckpt, else to diffusers.",
    )
    preview_prompt: tuple[str, ...] = option(
        "output",
        "Prompt to generate a preview from during training. Can be repeated.",
        (),
    )
    preview_steps: int | None = option(
        "output",
        "Generate previews every N steps. Defaults to whenever weights are saved.",
        minimum=1,
    )
    save_steps: int | None = option(
        "checkpoints",
        "Save every N steps. Defaults to the end of each epoch.",
        minimum=1,
    )
    keep_checkpoints: int | None = option(
        "checkpoints",
        "Keep only the newest N checkpoints. Defaults to all weights and the 2 newest training states.",
        minimum=1,
    )
    resume: str | None = option(
        "checkpoints",
        "Resume from the newest checkpoint, or start training if there is none (auto), or resume from the one at PATH.",
        affects={"start"},
        bare="auto",
    )
    resume_from_checkpoint: Path | None = option(
        "checkpoints",
        "Saved weights to start a new run from, at step 0 and with a new optimizer.",
        affects={"weights"},
    )
    overwrite: bool = option(
        "checkpoints",
        "Delete the run in --output_path and start a new one there.",
        False,
        affects={"start"},
    )
    dry_run: bool = option(
        "general",
        "Check the command, print what it would do, and exit.",
        False,
        affects={"start"},
    )

    @property
    def task_name(self) -> str:
        """Return the task without its stage."""
        return self.task.partition(":")[0]

    @property
    def stage(self) -> str:
        """Return 'data_process', 'train', or '' for a run that is not split."""
        return self.task.partition(":")[2]


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(ModelChoice):
    """An image or video to generate, or one for each row of a table, as plain data.

    None leaves a value to the family.
    """

    height: int | None = option(
        "generation",
        "Height in pixels; requires --width.",
        minimum=1,
    )
    width: int | None = option(
        "generation",
        "Width in pixels; requires --height.",
        minimum=1,
    )
    prompt: str | None = option(
        "generation",
        "What to generate.",
    )
    dataset: Path | None = option(
        "generation",
        "Table (csv, json or jsonl) of prompts, seeds and other inputs; generates a dataset from it.",
    )
    on_long_prompt: OnLongPrompt = option(
        "generation",
        "What to do with prompts longer than the model takes: stop with an error, or cut them and warn.",
        "truncate",
    )
    negative_prompt: str | None = option(
        "generation",
        "What to avoid.",
    )
    guidance_scale: float | None = option(
        "generation",
        "Scale of classifier-free guidance.",
        minimum=0,
    )
    num_inference_steps: int | None = option(
        "generation",
        "Number of denoising steps.",
        minimum=1,
    )
    num_frames: int | None = option(
        "generation",
        "Number of video frames.",
        minimum=1,
    )
    input: tuple[NamedInput, ...] = option(
        "generation",
        "Any other input of the variant; for an image or a video, VALUE is a file name. Can be "
        "repeated; repeat a NAME to pass a list.",
        (),
    )
    run: Path | None = option(
        "model",
        "Output folder of a training run: use its model files and options, and its newest weights.",
    )
    lora: tuple[LoraFile, ...] = option(
        "LoRA",
        "LoRA file to apply, with an optional scale. Can be repeated.",
        (),
    )
    output: Path = field(
        metadata={
            "group": "output",
            "help": "File to write; with --dataset, a folder.",
        }
    )


def options_affecting(*effects: Effect) -> tuple[str, ...]:
    """Return the names of a training run's options that have one of these effects."""
    return tuple(
        flag.name for flag in flags(TrainConfig) if flag.affects & set(effects)
    )
