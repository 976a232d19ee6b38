"""What a run is told: one field per flag of the command line. `checks` says what must
hold. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dstrain.config.fields import LoraFile, NamedInput, about, split_commas

SamplingMode = Literal["head", "chunk", "uniform"]
STAGES = ("", "data_process", "train")
Precision = Literal["no", "bf16"]
Hub = Literal["modelscope", "huggingface"]


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """What every command that opens a model is told.

    family_options: values of the family's own flags. left_out: plugins (names or
    distributions) of `-p no:NAME`.
    """

    model: str = field(
        metadata=about(
            "models", "The family to use (`dstrain models` lists those installed)."
        )
    )
    variant: str | None = field(
        default=None,
        metadata=about(
            "models",
            "The family's variant; without it, what ids, columns and files tell.",
        ),
    )
    model_paths: str | None = field(
        default=None,
        metadata=about(
            "models", "Local model files: a JSON list of paths, or of lists of paths."
        ),
    )
    model_id_with_origin_paths: str | None = field(
        default=None,
        metadata=about(
            "models", "Published model files: ID:PATTERN or ID@REVISION:PATTERN, ..."
        ),
    )
    toy: bool = field(
        default=False,
        metadata=about(
            "models", "Toy sizes with random weights instead of model files."
        ),
    )
    hub: Hub = field(
        default="modelscope",
        metadata=about(
            "models", "Where published files that are not here are fetched from."
        ),
    )
    mixed_precision: Precision | None = field(
        default=None,
        metadata=about(
            "models", "Compute dtype; without it, bf16 on a GPU and fp32 on a CPU."
        ),
    )
    seed: int = field(
        default=0,
        metadata=about(
            "models", "Seed of every random number.", least=0, most=2**63 - 1
        ),
    )
    height: int | None = field(
        default=None,
        metadata=about("size", "Height in pixels; needs --width.", least=1),
    )
    width: int | None = field(
        default=None,
        metadata=about("size", "Width in pixels; needs --height.", least=1),
    )
    family_options: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ModelChoice):
    """A training run, or one stage of it, as plain data."""

    task: str = field(
        default="sft",
        metadata=about(
            "training",
            "The task, with its stage for a split run: TASK, TASK:data_process, TASK:train.",
        ),
    )
    dataset_base_path: Path | None = field(
        default=None,
        metadata=about("dataset", "Folder that the metadata's paths start from."),
    )
    dataset_metadata_path: Path | None = field(
        default=None,
        metadata=about(
            "dataset", "Metadata (csv, json, jsonl); without it, metadata.* there."
        ),
    )
    dataset_root: tuple[Path, ...] = field(
        default=(),
        metadata=about(
            "dataset",
            "Another folder that files of the data set may lie in; may be repeated.",
        ),
    )
    url_cache: Path | None = field(
        default=None,
        metadata=about(
            "dataset",
            "Fetch files that the metadata names by URL, and keep them here; else refused.",
        ),
    )
    on_bad_sample: Literal["error", "skip"] = field(
        default="error",
        metadata=about(
            "dataset",
            "What a row that cannot be used does: end the run, or be left out and listed.",
        ),
    )
    dataset_repeat: int = field(
        default=1,
        metadata=about("dataset", "How often an epoch draws each row.", least=1),
    )
    dataset_num_workers: int = field(
        default=0,
        metadata=about(
            "dataset", "Processes that load samples; 0 loads in the run's own.", least=0
        ),
    )
    data_file_keys: str | None = field(
        default=None,
        metadata=about(
            "dataset",
            "Columns that name files, with commas; without it, the variant's.",
        ),
    )
    extra_inputs: str | None = field(
        default=None,
        metadata=about(
            "models",
            "Inputs beside the usual ones that the data set must have, with commas.",
        ),
    )
    learning_rate: float = field(
        default=1e-4, metadata=about("training", "Learning rate.", above=0)
    )
    num_epochs: int | None = field(
        default=None,
        metadata=about(
            "training",
            "Passes over the data set; without it and --max_steps, 1.",
            least=1,
        ),
    )
    max_steps: int | None = field(
        default=None,
        metadata=about(
            "training",
            "Optimizer steps; with --num_epochs, the smaller of both wins.",
            least=1,
        ),
    )
    trainable_models: str | None = field(
        default=None,
        metadata=about(
            "training",
            "Components (or parts: dit.blocks.3) trained in full, with commas.",
        ),
    )
    find_unused_parameters: bool = field(
        default=False,
        metadata=about("training", "Let DDP look for parameters that got no gradient."),
    )
    weight_decay: float = field(
        default=0.01, metadata=about("training", "Weight decay of AdamW.", least=0)
    )
    lr_scheduler: Literal["constant", "constant_with_warmup", "linear", "cosine"] = (
        field(
            default="constant",
            metadata=about("training", "How the learning rate changes over the run."),
        )
    )
    lr_warmup_steps: int = field(
        default=0,
        metadata=about(
            "training", "Steps over which the learning rate rises from 0.", least=0
        ),
    )
    max_grad_norm: float = field(
        default=1.0,
        metadata=about(
            "training", "Gradients longer than this are scaled down to it.", above=0
        ),
    )
    batch_size: int = field(
        default=1,
        metadata=about("training", "Samples per device and forward pass.", least=1),
    )
    timestep_sampling: Literal["shifted", "logit_normal", "uniform", "mode"] = field(
        default="shifted", metadata=about("training", "How timesteps are drawn.")
    )
    loss_weighting: Literal["bsmntw", "none"] = field(
        default="bsmntw", metadata=about("training", "How the loss weighs timesteps.")
    )
    min_timestep_boundary: float | None = field(
        default=None,
        metadata=about(
            "training",
            "Start of the timesteps trained, a fraction of the table from its noisiest end; without it, the expert's.",
            least=0,
            most=1,
        ),
    )
    max_timestep_boundary: float | None = field(
        default=None,
        metadata=about(
            "training",
            "End of the timesteps trained; without it, the expert's.",
            least=0,
            most=1,
        ),
    )
    gradient_accumulation_steps: int = field(
        default=1,
        metadata=about("gradient", "Forward passes per optimizer step.", least=1),
    )
    use_gradient_checkpointing: bool = field(
        default=False,
        metadata=about("gradient", "Recompute activations instead of keeping them."),
    )
    use_gradient_checkpointing_offload: bool = field(
        default=False,
        metadata=about(
            "gradient",
            "Keep what checkpointing keeps in main memory; implies checkpointing.",
        ),
    )
    lora_base_model: str | None = field(
        default=None, metadata=about("LoRA", "The component that gets LoRA layers.")
    )
    lora_target_modules: str | None = field(
        default=None,
        metadata=about(
            "LoRA", "Layers that get one, with commas; without it, the family's."
        ),
    )
    lora_rank: int = field(default=32, metadata=about("LoRA", "Rank.", least=1))
    lora_alpha: float | None = field(
        default=None,
        metadata=about("LoRA", "Scale times rank; without it, the rank.", above=0),
    )
    lora_checkpoint: Path | None = field(
        default=None, metadata=about("LoRA", "A LoRA file to start from.")
    )
    preset_lora_path: Path | None = field(
        default=None,
        metadata=about(
            "models",
            "A LoRA file merged into the weights before training (differential LoRA training).",
        ),
    )
    preset_lora_model: str | None = field(
        default=None,
        metadata=about(
            "models", "The component that --preset_lora_path is merged into."
        ),
    )
    resume_from_checkpoint: Path | None = field(
        default=None,
        metadata=about(
            "models",
            "Saved weights to start from, with a new optimizer and from step 0.",
        ),
    )
    max_pixels: int = field(
        default=1048576,
        metadata=about(
            "size",
            "Without --height and --width: larger pictures are scaled down.",
            least=1,
        ),
    )
    num_frames: int = field(
        default=81,
        metadata=about("size", "Frames of a video that make a sample.", least=1),
    )
    frame_sampling: SamplingMode = field(
        default="head",
        metadata=about(
            "size",
            "The samples a video gives: its first frames, every chunk of them, or --frame_samples spread out.",
        ),
    )
    frame_samples: int | None = field(
        default=None,
        metadata=about(
            "size", "Samples of each video, for --frame_sampling uniform.", least=1
        ),
    )
    output_path: Path | None = field(
        default=None, metadata=about("output", "Folder that the run writes.")
    )
    feature_cache: Path | None = field(
        default=None, metadata=about("output", "Folder of the feature store.")
    )
    save_steps: int | None = field(
        default=None,
        metadata=about(
            "output", "Save every so many steps; without it, after each epoch.", least=1
        ),
    )
    remove_prefix_in_ckpt: str | None = field(
        default=None,
        metadata=about(
            "output",
            "Accepted from the reference: pipe.COMPONENT., which saved names never carry.",
        ),
    )
    resume: str | None = field(
        default=None,
        metadata=about(
            "output",
            "Go on from the newest checkpoint (auto) or from the one at PATH.",
            bare="auto",
        ),
    )
    overwrite: bool = field(
        default=False,
        metadata=about(
            "output",
            "Remove the run that --output_path holds, and begin a new one there.",
        ),
    )
    keep_checkpoints: int | None = field(
        default=None,
        metadata=about(
            "output",
            "Keep only so many checkpoints; without it, all weights and the 2 newest states.",
            least=1,
        ),
    )
    preview_prompt: tuple[str, ...] = field(
        default=(),
        metadata=about(
            "output", "Generate this during training, to look at; may be repeated."
        ),
    )
    preview_steps: int | None = field(
        default=None,
        metadata=about(
            "output", "Preview every so many steps; without it, at each save.", least=1
        ),
    )
    dry_run: bool = field(
        default=False, metadata=about("output", "Print the plan and stop.")
    )

    @property
    def task_name(self) -> str:
        """The task without its stage."""
        return self.task.partition(":")[0]

    @property
    def stage(self) -> str:
        """'data_process', 'train', or '' for a run in one piece."""
        return self.task.partition(":")[2]

    @property
    def trainables(self) -> tuple[str, ...]:
        """Components, or parts of them, that are trained in full."""
        return split_commas(self.trainable_models)

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Patterns of layers that get LoRA; () for the family's default."""
        return split_commas(self.lora_target_modules)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(ModelChoice):
    """One picture to generate, or one for each row of a table, as plain data; None
    leaves a value to the family.
    """

    prompt: str | None = field(
        default=None, metadata=about("inference", "What to generate.")
    )
    dataset: Path | None = field(
        default=None,
        metadata=about(
            "inference",
            "Metadata (csv, json, jsonl) with prompt, seed and other inputs, instead of --prompt: makes a data set.",
        ),
    )
    negative_prompt: str | None = field(
        default=None, metadata=about("inference", "What to stay away from.")
    )
    guidance_scale: float | None = field(
        default=None,
        metadata=about("inference", "Strength of classifier-free guidance.", least=0),
    )
    num_inference_steps: int | None = field(
        default=None, metadata=about("inference", "Denoising steps.", least=1)
    )
    num_frames: int | None = field(
        default=None, metadata=about("inference", "Frames of a video.", least=1)
    )
    input: tuple[NamedInput, ...] = field(
        default=(),
        metadata=about(
            "inference",
            "Any other input of the variant; a file for a picture. Repeat it for several, and for a list.",
        ),
    )
    lora: tuple[LoraFile, ...] = field(
        default=(),
        metadata=about(
            "models", "A LoRA file, with a scale after a colon; may be repeated."
        ),
    )
    output: Path = field(
        metadata=about("output", "File that is written; with --dataset, a folder.")
    )
