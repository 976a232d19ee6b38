"""What a run is told: one field per flag of the command line, checked before anything is loaded. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dstrain.clips import Way
from dstrain.errors import UsageError, nearest
from dstrain.flags import (
    LoraFile,
    NamedInput,
    about,
    check_value,
    flags,
    parse_model_paths,
    parse_origins,
    split_commas,
)

STAGES = ("", "data_process", "train")
Precision = Literal["no", "bf16"]


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """What every command that opens a model is told.

    family_options: values of the family's own flags. left_out: plugins (names or distributions) of `-p no:NAME`.
    """

    model: str = field(metadata=about("models", "The family to use (`dstrain models` lists those installed)."))
    variant: str | None = field(
        default=None, metadata=about("models", "The family's variant; without it, what ids, columns and files tell.")
    )
    model_paths: str | None = field(
        default=None, metadata=about("models", "Local model files: a JSON list of paths, or of lists of paths.")
    )
    model_id_with_origin_paths: str | None = field(
        default=None, metadata=about("models", "Published model files: ID:PATTERN,ID:PATTERN,...")
    )
    toy: bool = field(default=False, metadata=about("models", "Toy sizes with random weights instead of model files."))
    mixed_precision: Precision | None = field(
        default=None, metadata=about("models", "Compute dtype; without it, bf16 on a GPU and fp32 on a CPU.")
    )
    seed: int = field(default=0, metadata=about("models", "Seed of every random number.", least=0, most=2**63 - 1))
    height: int | None = field(default=None, metadata=about("size", "Height in pixels; needs --width.", least=1))
    width: int | None = field(default=None, metadata=about("size", "Width in pixels; needs --height.", least=1))
    family_options: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ModelChoice):
    """A training run, or one stage of it, as plain data."""

    task: str = field(
        default="sft",
        metadata=about("training", "The task, with its stage for a split run: TASK, TASK:data_process, TASK:train."),
    )
    dataset_base_path: Path | None = field(
        default=None, metadata=about("dataset", "Folder that the metadata's paths start from.")
    )
    dataset_metadata_path: Path | None = field(
        default=None, metadata=about("dataset", "Metadata (csv, json, jsonl); without it, metadata.* there.")
    )
    dataset_repeat: int = field(default=1, metadata=about("dataset", "How often an epoch draws each row.", least=1))
    dataset_num_workers: int = field(
        default=0, metadata=about("dataset", "Processes that load samples; 0 loads in the run's own.", least=0)
    )
    data_file_keys: str | None = field(
        default=None, metadata=about("dataset", "Columns that name files, with commas; without it, the variant's.")
    )
    extra_inputs: str | None = field(
        default=None, metadata=about("models", "Inputs beside the usual ones that the data set must have, with commas.")
    )
    learning_rate: float = field(default=1e-4, metadata=about("training", "Learning rate.", above=0))
    num_epochs: int | None = field(
        default=None, metadata=about("training", "Passes over the data set; without it and --max_steps, 1.", least=1)
    )
    max_steps: int | None = field(
        default=None,
        metadata=about("training", "Optimizer steps; with --num_epochs, the smaller of both wins.", least=1),
    )
    trainable_models: str | None = field(
        default=None, metadata=about("training", "Components (or parts: dit.blocks.3) trained in full, with commas.")
    )
    find_unused_parameters: bool = field(
        default=False, metadata=about("training", "Let DDP look for parameters that got no gradient.")
    )
    weight_decay: float = field(default=0.01, metadata=about("training", "Weight decay of AdamW.", least=0))
    lr_scheduler: Literal["constant", "constant_with_warmup", "linear", "cosine"] = field(
        default="constant", metadata=about("training", "How the learning rate changes over the run.")
    )
    lr_warmup_steps: int = field(
        default=0, metadata=about("training", "Steps over which the learning rate rises from 0.", least=0)
    )
    max_grad_norm: float = field(
        default=1.0, metadata=about("training", "Gradients longer than this are scaled down to it.", above=0)
    )
    batch_size: int = field(default=1, metadata=about("training", "Samples per device and forward pass.", least=1))
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
        metadata=about("training", "End of the timesteps trained; without it, the expert's.", least=0, most=1),
    )
    gradient_accumulation_steps: int = field(
        default=1, metadata=about("gradient", "Forward passes per optimizer step.", least=1)
    )
    use_gradient_checkpointing: bool = field(
        default=False, metadata=about("gradient", "Recompute activations instead of keeping them.")
    )
    use_gradient_checkpointing_offload: bool = field(
        default=False,
        metadata=about("gradient", "Keep what checkpointing keeps in main memory; implies checkpointing."),
    )
    lora_base_model: str | None = field(default=None, metadata=about("LoRA", "The component that gets LoRA layers."))
    lora_target_modules: str | None = field(
        default=None, metadata=about("LoRA", "Layers that get one, with commas; without it, the family's.")
    )
    lora_rank: int = field(default=32, metadata=about("LoRA", "Rank.", least=1))
    lora_alpha: float | None = field(
        default=None, metadata=about("LoRA", "Scale times rank; without it, the rank.", above=0)
    )
    lora_checkpoint: Path | None = field(default=None, metadata=about("LoRA", "A LoRA file to start from."))
    max_pixels: int = field(
        default=1048576,
        metadata=about("size", "Without --height and --width: larger pictures are scaled down.", least=1),
    )
    num_frames: int = field(default=81, metadata=about("size", "Frames of a video that make a sample.", least=1))
    frame_sampling: Way = field(
        default="head",
        metadata=about(
            "size", "The samples a video gives: its first frames, every chunk of them, or --frame_samples spread out."
        ),
    )
    frame_samples: int | None = field(
        default=None, metadata=about("size", "Samples of each video, for --frame_sampling uniform.", least=1)
    )
    output_path: Path | None = field(default=None, metadata=about("output", "Folder that the run writes."))
    feature_cache: Path | None = field(default=None, metadata=about("output", "Folder of the feature store."))
    save_steps: int | None = field(
        default=None, metadata=about("output", "Save every so many steps; without it, after each epoch.", least=1)
    )
    remove_prefix_in_ckpt: str | None = field(
        default=None,
        metadata=about("output", "Accepted from the reference: pipe.COMPONENT., which saved names never carry."),
    )
    resume: str | None = field(
        default=None,
        metadata=about("output", "Go on from the newest checkpoint (auto) or from the one at PATH.", bare="auto"),
    )
    dry_run: bool = field(default=False, metadata=about("output", "Print the plan and stop."))

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
    """One picture to generate, or one for each row of a table, as plain data; None leaves a value to the family."""

    prompt: str | None = field(default=None, metadata=about("inference", "What to generate."))
    dataset: Path | None = field(
        default=None,
        metadata=about(
            "inference",
            "Metadata (csv, json, jsonl) with prompt, seed and other inputs, instead of --prompt: makes a data set.",
        ),
    )
    negative_prompt: str | None = field(default=None, metadata=about("inference", "What to stay away from."))
    guidance_scale: float | None = field(
        default=None, metadata=about("inference", "Strength of classifier-free guidance.", least=0)
    )
    num_inference_steps: int | None = field(default=None, metadata=about("inference", "Denoising steps.", least=1))
    num_frames: int | None = field(default=None, metadata=about("inference", "Frames of a video.", least=1))
    input: tuple[NamedInput, ...] = field(
        default=(),
        metadata=about(
            "inference", "Any other input of the variant; a file for a picture. Repeat it for several, and for a list."
        ),
    )
    lora: tuple[LoraFile, ...] = field(
        default=(), metadata=about("models", "A LoRA file, with a scale after a colon; may be repeated.")
    )
    output: Path = field(metadata=about("output", "File that is written; with --dataset, a folder."))


def validate(config: ModelChoice) -> None:
    """Raise UsageError for a value out of its range, or for flags that contradict each other; opens no file."""
    for flag in flags(type(config)):
        check_value(flag, getattr(config, flag.name))
    _check_model(config)
    if isinstance(config, TrainConfig):
        _check_task(config)
        _check_trainables(config)
        _check_steps(config)
        _check_frames(config)
        if not config.dry_run:
            _check_places(config)
    if isinstance(config, GenerateConfig):
        _check_prompt(config)


def _check_prompt(config: GenerateConfig) -> None:
    if config.prompt is None and config.dataset is None:
        raise UsageError("--prompt", "is required", "or --dataset: a table of prompts and seeds, to make a data set")
    for flag in flags(GenerateConfig) if config.dataset is not None else ():
        if flag.name in ("prompt", "seed") and getattr(config, flag.name) != flag.default:
            raise UsageError(flag.spelled, f"is given with --dataset, whose column {flag.name!r} has one for each row")


def _check_model(config: ModelChoice) -> None:
    files = parse_model_paths(config.model_paths) + parse_origins(config.model_id_with_origin_paths)
    if config.toy and files:
        raise UsageError("--toy", "builds a toy model, so model files would not be read; give one or the other")
    if not files and not config.toy and not (isinstance(config, TrainConfig) and config.dry_run):
        help_line = "give --model_paths for local files, or --toy for toy sizes with random weights"
        raise UsageError("--model_id_with_origin_paths", "no model files are given", help_line)
    if (config.height is None) != (config.width is None):
        given, absent = ("height", "width") if config.width is None else ("width", "height")
        raise UsageError(f"--{given}", f"is given without --{absent}; give both, or neither")


def _check_task(config: TrainConfig) -> None:
    name, stage = config.task_name, config.stage
    if not name or stage not in STAGES or config.task.endswith(":"):
        known = ", ".join([name or "TASK", *(f"{name or 'TASK'}:{known}" for known in STAGES if known)])
        raise UsageError("--task", f"{config.task!r} is no task with a stage; want {known}{nearest(stage, STAGES)}")


def _check_trainables(config: TrainConfig) -> None:
    for name in ("trainable_models", "lora_base_model", "lora_target_modules"):
        if getattr(config, name) is not None and not split_commas(getattr(config, name)):
            raise UsageError(f"--{name}", "names nothing")
    full = {name.partition(".")[0] for name in config.trainables}
    if config.lora_base_model in full:
        reason = "LoRA trains beside frozen weights, so a component is trained in full or by LoRA"
        raise UsageError("--lora_base_model", f"{config.lora_base_model} is also in --trainable_models; {reason}")
    for flag in flags(TrainConfig) if full and config.lora_base_model is None else ():
        if flag.group == "LoRA" and getattr(config, flag.name) != flag.default:
            help_line = "name the component that gets LoRA layers with --lora_base_model"
            raise UsageError(flag.spelled, "would do nothing: --trainable_models trains in full", help_line)


def _check_steps(config: TrainConfig) -> None:
    if config.lr_warmup_steps and config.lr_scheduler == "constant":
        help_line = "use --lr_scheduler constant_with_warmup"
        raise UsageError("--lr_warmup_steps", "would do nothing: --lr_scheduler constant has no warm-up", help_line)
    if config.lr_scheduler == "constant_with_warmup" and not config.lr_warmup_steps:
        raise UsageError("--lr_scheduler", "constant_with_warmup needs --lr_warmup_steps")
    low = config.min_timestep_boundary or 0.0
    high = 1.0 if config.max_timestep_boundary is None else config.max_timestep_boundary
    if low >= high:
        raise UsageError(
            "--min_timestep_boundary", f"{low} is not below --max_timestep_boundary {high}: nothing is left"
        )


def _check_frames(config: TrainConfig) -> None:
    if config.frame_sampling == "uniform" and config.frame_samples is None:
        raise UsageError("--frame_sampling", "uniform needs --frame_samples")
    if config.frame_sampling != "uniform" and config.frame_samples is not None:
        what = f"would do nothing with --frame_sampling {config.frame_sampling}"
        raise UsageError("--frame_samples", what, "use --frame_sampling uniform")


def _check_places(config: TrainConfig) -> None:
    """What stage 1 writes and stage 2 reads: --feature_cache, else stage 1's output and stage 2's data set."""
    has_store = config.feature_cache is not None
    if config.dataset_base_path is None and not (config.stage == "train" and has_store):
        other = ", or --feature_cache: the feature store to train from" if config.stage == "train" else ""
        raise UsageError("--dataset_base_path", f"is required{other}")
    if config.output_path is None and not (config.stage == "data_process" and has_store):
        other = ", or --feature_cache: where the feature store goes" if config.stage == "data_process" else ""
        raise UsageError("--output_path", f"is required{other}")
