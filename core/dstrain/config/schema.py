"""Every option of a training run and of `dstrain generate`: its type, default, bounds,
help and effects.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dstrain.config.fields import (
    NOTHING,
    Effect,
    LoraFile,
    NamedInput,
    described,
    flags,
    option,
    split_commas,
)

STAGES = ("", "data_process", "train")
SamplingMode = Literal["head", "chunk", "uniform"]
Precision = Literal["no", "bf16"]
Hub = Literal["modelscope", "huggingface"]
Schedule = Literal["constant", "constant_with_warmup", "linear", "cosine"]
ENDING_AT_LAST_STEP = ("linear", "cosine")
"""Learning rate schedules whose every value depends on how many steps the run has."""


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """The options of every command that opens a model."""

    model: str = field(
        metadata=described(
            "Model family (`dstrain models` lists the installed ones).",
            group="model",
            affects={"training"},
        )
    )
    variant: str | None = option(
        None,
        "Variant of the family. By default it follows from the model files and the dataset columns.",
        group="model",
        affects={"resolved"},
    )
    model_paths: str | None = option(
        None,
        "Local model files: a JSON list of paths, or of lists of paths for sharded files.",
        group="model",
        affects=NOTHING,
    )
    model_id_with_origin_paths: str | None = option(
        None,
        "Published model files to download, comma-separated: ID:PATTERN or ID@REVISION:PATTERN, ...",
        group="model",
        affects=NOTHING,
    )
    toy: bool = option(
        False,
        "Use a tiny model with random weights instead of model files.",
        group="model",
        affects=NOTHING,
    )
    hub: Hub = option(
        "modelscope",
        "Hub to download missing model files from.",
        group="model",
        affects=NOTHING,
    )
    mixed_precision: Precision | None = option(
        None,
        "Compute dtype. Defaults to bf16 on a GPU and no (fp32) on a CPU.",
        group="memory",
        affects={"resolved"},
    )
    seed: int = option(
        0,
        "Random seed.",
        group="general",
        affects={"training"},
        minimum=0,
        maximum=2**63 - 1,
    )
    height: int | None = option(
        None,
        "Height of images and videos in pixels; requires --width.",
        group="data",
        affects={"training", "cache"},
        minimum=1,
    )
    width: int | None = option(
        None,
        "Width of images and videos in pixels; requires --height.",
        group="data",
        affects={"training", "cache"},
        minimum=1,
    )
    family_options: Mapping[str, str] = field(default_factory=dict)
    """Values of the family's own options."""
    left_out: tuple[str, ...] = ()
    """Disabled plugins, by name or distribution (`-p no:NAME`)."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ModelChoice):
    """A training run, or one stage of it, as plain data."""

    task: str = option(
        "sft",
        "Training task. TASK:data_process and TASK:train run its two stages separately.",
        group="training",
        affects={"recipe"},
    )
    dataset_base_path: Path | None = option(
        None,
        "Dataset directory; paths in the metadata are relative to it.",
        group="data",
        affects=NOTHING,
    )
    dataset_metadata_path: Path | None = option(
        None,
        "Metadata file (csv, json or jsonl). Defaults to metadata.* in --dataset_base_path.",
        group="data",
        affects=NOTHING,
    )
    dataset_root: tuple[Path, ...] = option(
        (),
        "Additional directory that dataset files may be in. Can be repeated.",
        group="data",
        affects=NOTHING,
    )
    url_cache: Path | None = option(
        None,
        "Directory for files that the metadata names by URL. Without it, URLs are refused.",
        group="data",
        affects=NOTHING,
    )
    on_bad_sample: Literal["error", "skip"] = option(
        "error",
        "What to do with unreadable rows: stop with an error, or skip them and write bad_samples.jsonl.",
        group="data",
        affects=NOTHING,
    )
    dataset_repeat: int = option(
        1,
        "Number of times each row is used per epoch.",
        group="data",
        affects={"training"},
        minimum=1,
    )
    dataset_num_workers: int = option(
        0,
        "Number of data loading processes; 0 loads in the main process.",
        group="data",
        affects=NOTHING,
        minimum=0,
    )
    max_pixels: int = option(
        1048576,
        "Without --height and --width, scale larger images down to this many pixels.",
        group="data",
        affects={"training", "cache"},
        minimum=1,
    )
    data_file_keys: str | None = option(
        None,
        "Dataset columns that contain file names, comma-separated. Defaults to the variant's.",
        group="data",
        affects={"resolved", "cache"},
    )
    extra_inputs: str | None = option(
        None,
        "Additional dataset columns to use as model inputs, comma-separated.",
        group="data",
        affects={"resolved", "cache"},
    )
    num_frames: int = option(
        81,
        "Number of video frames per sample.",
        group="data",
        affects={"training", "cache", "video"},
        minimum=1,
    )
    frame_sampling: SamplingMode = option(
        "head",
        "Which samples to take from a video: its first frames, consecutive chunks, or "
        "--frame_samples evenly spaced clips.",
        group="data",
        affects={"training", "cache", "video"},
    )
    frame_samples: int | None = option(
        None,
        "Number of samples per video with --frame_sampling uniform.",
        group="data",
        affects={"training", "cache", "video"},
        minimum=1,
    )
    feature_cache: Path | None = option(
        None,
        "Directory of the feature cache, which stage 1 writes and stage 2 reads. Defaults to "
        "stage 1's --output_path and stage 2's --dataset_base_path.",
        group="data",
        affects=NOTHING,
    )
    trainable_models: str | None = option(
        None,
        "Components (or submodules, such as dit.blocks.3) to train in full, comma-separated.",
        group="training",
        affects={"resolved"},
    )
    learning_rate: float = option(
        1e-4, "Learning rate.", group="training", affects={"training"}, above=0
    )
    lr_scheduler: Schedule = option(
        "constant",
        "Learning rate schedule.",
        group="training",
        affects={"training"},
    )
    lr_warmup_steps: int = option(
        0,
        "Number of steps in which the learning rate rises from 0.",
        group="training",
        affects={"training"},
        minimum=0,
    )
    weight_decay: float = option(
        0.01,
        "Weight decay of AdamW.",
        group="training",
        affects={"training"},
        minimum=0,
    )
    max_grad_norm: float = option(
        1.0,
        "Maximum gradient norm; larger gradients are clipped.",
        group="training",
        affects={"training"},
        above=0,
    )
    num_epochs: int | None = option(
        None,
        "Number of epochs. Defaults to 1 unless --max_steps is set.",
        group="training",
        affects={"length"},
        minimum=1,
    )
    max_steps: int | None = option(
        None,
        "Stop after this many optimizer steps, or after --num_epochs, whichever comes first.",
        group="training",
        affects={"length"},
        minimum=1,
    )
    batch_size: int = option(
        1,
        "Batch size per device.",
        group="training",
        affects={"resolved", "recipe"},
        minimum=1,
    )
    gradient_accumulation_steps: int = option(
        1,
        "Number of batches per optimizer step.",
        group="training",
        affects={"resolved", "recipe"},
        minimum=1,
    )
    timestep_sampling: Literal["shifted", "logit_normal", "uniform", "mode"] = option(
        "shifted",
        "Distribution that training timesteps are drawn from.",
        group="training",
        affects={"training", "timestep_sampler"},
    )
    loss_weighting: Literal["bsmntw", "none"] = option(
        "bsmntw",
        "Weighting of the loss by timestep.",
        group="training",
        affects={"training", "timestep_sampler"},
    )
    min_timestep_boundary: float | None = option(
        None,
        "Lower end of the training timestep range, as a fraction of the schedule (0 = noisiest). "
        "Defaults to the expert's range.",
        group="training",
        affects={"training", "timestep_sampler"},
        minimum=0,
        maximum=1,
    )
    max_timestep_boundary: float | None = option(
        None,
        "Upper end of the training timestep range. Defaults to the expert's range.",
        group="training",
        affects={"training", "timestep_sampler"},
        minimum=0,
        maximum=1,
    )
    find_unused_parameters: bool = option(
        False,
        "Let DistributedDataParallel search for parameters without a gradient.",
        group="training",
        affects=NOTHING,
    )
    use_gradient_checkpointing: bool = option(
        False,
        "Recompute activations in the backward pass instead of storing them.",
        group="memory",
        affects=NOTHING,
    )
    use_gradient_checkpointing_offload: bool = option(
        False,
        "Offload checkpointed activations to CPU memory (implies --use_gradient_checkpointing).",
        group="memory",
        affects=NOTHING,
    )
    lora_base_model: str | None = option(
        None,
        "Component to add LoRA to.",
        group="LoRA",
        affects={"resolved", "LoRA"},
    )
    lora_target_modules: str | None = option(
        None,
        "Module names to add LoRA to, comma-separated. Defaults to the family's list.",
        group="LoRA",
        affects={"resolved", "LoRA"},
    )
    lora_rank: int = option(
        32, "LoRA rank.", group="LoRA", affects={"resolved", "LoRA"}, minimum=1
    )
    lora_alpha: float | None = option(
        None,
        "LoRA alpha; the layers are scaled by alpha / rank. Defaults to the rank.",
        group="LoRA",
        affects={"resolved", "LoRA"},
        above=0,
    )
    lora_checkpoint: Path | None = option(
        None,
        "LoRA file to start training from.",
        group="LoRA",
        affects={"LoRA", "weights"},
    )
    preset_lora_path: Path | None = option(
        None,
        "LoRA file to merge into the weights before training (differential LoRA training).",
        group="LoRA",
        affects={"weights"},
    )
    preset_lora_model: str | None = option(
        None,
        "Component to merge --preset_lora_path into.",
        group="LoRA",
        affects=NOTHING,
    )
    output_path: Path | None = option(
        None, "Directory for checkpoints and logs.", group="output", affects=NOTHING
    )
    remove_prefix_in_ckpt: str | None = option(
        None,
        "Accepted for DiffSynth-Studio's commands (pipe.COMPONENT.); saved names never have the prefix.",
        group="output",
        affects=NOTHING,
    )
    preview_prompt: tuple[str, ...] = option(
        (),
        "Prompt to generate a preview from during training. Can be repeated.",
        group="output",
        affects=NOTHING,
    )
    preview_steps: int | None = option(
        None,
        "Generate previews every N steps. Defaults to each time weights are saved.",
        group="output",
        affects=NOTHING,
        minimum=1,
    )
    save_steps: int | None = option(
        None,
        "Save every N steps. Defaults to the end of each epoch.",
        group="checkpoints",
        affects=NOTHING,
        minimum=1,
    )
    keep_checkpoints: int | None = option(
        None,
        "Keep only the newest N checkpoints. Defaults to all weights and the 2 newest training states.",
        group="checkpoints",
        affects=NOTHING,
        minimum=1,
    )
    resume: str | None = option(
        None,
        "Resume training from the newest checkpoint (auto) or from the one at PATH.",
        group="checkpoints",
        affects={"start"},
        bare="auto",
    )
    resume_from_checkpoint: Path | None = option(
        None,
        "Saved weights to start a new run from, at step 0 and with a new optimizer.",
        group="checkpoints",
        affects={"weights"},
    )
    overwrite: bool = option(
        False,
        "Delete the run in --output_path and start a new one there.",
        group="checkpoints",
        affects={"start"},
    )
    dry_run: bool = option(
        False,
        "Check the command, print what it would do, and exit.",
        group="general",
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

    @property
    def trainables(self) -> tuple[str, ...]:
        """Return the components, or parts of them, to train in full."""
        return split_commas(self.trainable_models)

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Return the module names to add LoRA to; () means the family's default."""
        return split_commas(self.lora_target_modules)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(ModelChoice):
    """An image or video to generate, or one for each row of a table, as plain data.

    None leaves a value to the family.
    """

    height: int | None = option(
        None,
        "Height in pixels; requires --width.",
        group="generation",
        affects=NOTHING,
        minimum=1,
    )
    width: int | None = option(
        None,
        "Width in pixels; requires --height.",
        group="generation",
        affects=NOTHING,
        minimum=1,
    )
    prompt: str | None = option(
        None, "What to generate.", group="generation", affects=NOTHING
    )
    dataset: Path | None = option(
        None,
        "Table (csv, json or jsonl) of prompts, seeds and other inputs; generates a dataset from it.",
        group="generation",
        affects=NOTHING,
    )
    negative_prompt: str | None = option(
        None, "What to avoid.", group="generation", affects=NOTHING
    )
    guidance_scale: float | None = option(
        None,
        "Scale of classifier-free guidance.",
        group="generation",
        affects=NOTHING,
        minimum=0,
    )
    num_inference_steps: int | None = option(
        None,
        "Number of denoising steps.",
        group="generation",
        affects=NOTHING,
        minimum=1,
    )
    num_frames: int | None = option(
        None, "Number of video frames.", group="generation", affects=NOTHING, minimum=1
    )
    input: tuple[NamedInput, ...] = option(
        (),
        "Any other input of the variant; a file name for an image or a video. Can be repeated, "
        "also with one name for a list.",
        group="generation",
        affects=NOTHING,
    )
    run: Path | None = option(
        None,
        "Output directory of a training run: use its model files and options, and its newest weights.",
        group="model",
        affects=NOTHING,
    )
    lora: tuple[LoraFile, ...] = option(
        (),
        "LoRA file to apply, with an optional scale. Can be repeated.",
        group="LoRA",
        affects=NOTHING,
    )
    output: Path = field(
        metadata=described(
            "File to write; with --dataset, a directory.",
            group="output",
            affects=NOTHING,
        )
    )


def options_affecting(*effects: Effect) -> tuple[str, ...]:
    """Return the names of a training run's options that have one of these effects."""
    return tuple(
        flag.name for flag in flags(TrainConfig) if flag.affects & set(effects)
    )
