"""What a configuration must be before anything is opened: values in their ranges, flags
that do not contradict.
"""

from dstrain.config.fields import (
    check_value,
    flags,
    parse_model_paths,
    parse_origins,
    split_commas,
)
from dstrain.config.schema import STAGES, GenerateConfig, ModelChoice, TrainConfig
from dstrain.console import redacted
from dstrain.errors import UsageError, nearest


def validate(config: ModelChoice) -> None:
    """Raise UsageError for a value out of its range, or for flags that contradict each
    other; opens no file.
    """
    for flag in flags(type(config)):
        check_value(flag, getattr(config, flag.name))
    _check_model(config)
    if isinstance(config, TrainConfig):
        _check_task(config)
        _check_trainables(config)
        _check_steps(config)
        _check_frames(config)
        _check_beginning(config)
        _check_previews(config)
        if not config.dry_run:
            _check_places(config)
    if isinstance(config, GenerateConfig):
        _check_prompt(config)


def _check_prompt(config: GenerateConfig) -> None:
    if config.prompt is None and config.dataset is None:
        raise UsageError(
            "--prompt",
            "is required",
            "or --dataset: a table of prompts and seeds, to make a data set",
        )
    for flag in flags(GenerateConfig) if config.dataset is not None else ():
        if (
            flag.name in ("prompt", "seed")
            and getattr(config, flag.name) != flag.default
        ):
            raise UsageError(
                flag.spelled,
                f"is given with --dataset, whose column {flag.name!r} has one for each row",
            )


def _check_model(config: ModelChoice) -> None:
    files = parse_model_paths(config.model_paths) + parse_origins(
        config.model_id_with_origin_paths
    )
    if config.toy and files:
        raise UsageError(
            "--toy",
            "builds a toy model, so model files would not be read; give one or the other",
        )
    if config.toy and config.hub != "modelscope":
        raise UsageError(
            "--hub", "has no effect: --toy builds a toy model, so nothing is fetched"
        )
    if (
        not files
        and not config.toy
        and not (isinstance(config, TrainConfig) and config.dry_run)
    ):
        help_line = "give --model_paths for local files, or --toy for toy sizes with random weights"
        raise UsageError(
            "--model_id_with_origin_paths", "no model files are given", help_line
        )
    if (config.height is None) != (config.width is None):
        given, absent = (
            ("height", "width") if config.width is None else ("width", "height")
        )
        raise UsageError(
            f"--{given}", f"is given without --{absent}; give both, or neither"
        )


def _check_task(config: TrainConfig) -> None:
    name, stage = config.task_name, config.stage
    if not name or stage not in STAGES or config.task.endswith(":"):
        known = ", ".join(
            [
                name or "TASK",
                *(f"{name or 'TASK'}:{known}" for known in STAGES if known),
            ]
        )
        raise UsageError(
            "--task",
            f"{config.task!r} is no task with a stage; want {known}{nearest(stage, STAGES)}",
        )


def _check_trainables(config: TrainConfig) -> None:
    for name in ("trainable_models", "lora_base_model", "lora_target_modules"):
        if getattr(config, name) is not None and not split_commas(
            getattr(config, name)
        ):
            raise UsageError(f"--{name}", "names nothing")
    full = {name.partition(".")[0] for name in config.trainables}
    if config.lora_base_model in full:
        reason = "LoRA trains beside frozen weights, so a component is trained in full or by LoRA"
        raise UsageError(
            "--lora_base_model",
            f"{config.lora_base_model} is also in --trainable_models; {reason}",
        )
    for flag in flags(TrainConfig) if full and config.lora_base_model is None else ():
        if flag.group == "LoRA" and getattr(config, flag.name) != flag.default:
            help_line = (
                "name the component that gets LoRA layers with --lora_base_model"
            )
            raise UsageError(
                flag.spelled,
                "has no effect: --trainable_models trains in full",
                help_line,
            )


def _check_steps(config: TrainConfig) -> None:
    if config.lr_warmup_steps and config.lr_scheduler == "constant":
        help_line = "use --lr_scheduler constant_with_warmup"
        raise UsageError(
            "--lr_warmup_steps",
            "has no effect: --lr_scheduler constant has no warm-up",
            help_line,
        )
    if config.lr_scheduler == "constant_with_warmup" and not config.lr_warmup_steps:
        raise UsageError(
            "--lr_scheduler", "constant_with_warmup needs --lr_warmup_steps"
        )
    low = config.min_timestep_boundary or 0.0
    high = 1.0 if config.max_timestep_boundary is None else config.max_timestep_boundary
    if low >= high:
        raise UsageError(
            "--min_timestep_boundary",
            f"{low} is not below --max_timestep_boundary {high}: nothing is left",
        )


def _check_previews(config: TrainConfig) -> None:
    if config.preview_steps is not None and not config.preview_prompt:
        raise UsageError("--preview_steps", "has no effect without --preview_prompt")
    if any(redacted(prompt) != prompt for prompt in config.preview_prompt):
        raise UsageError(
            "--preview_prompt",
            "holds what looks like a token or a password, and prompts are written down",
        )


def _check_frames(config: TrainConfig) -> None:
    if config.frame_sampling == "uniform" and config.frame_samples is None:
        raise UsageError("--frame_sampling", "uniform needs --frame_samples")
    if config.frame_sampling != "uniform" and config.frame_samples is not None:
        what = f"has no effect with --frame_sampling {config.frame_sampling}"
        raise UsageError("--frame_samples", what, "use --frame_sampling uniform")


def _check_beginning(config: TrainConfig) -> None:
    """A run goes on, begins from saved weights, or takes the place of another: one of
    these.
    """
    if config.preset_lora_model is not None and config.preset_lora_path is None:
        raise UsageError(
            "--preset_lora_model", "has no effect without --preset_lora_path"
        )
    given = [
        name
        for name in ("resume", "resume_from_checkpoint", "overwrite")
        if getattr(config, name)
    ]
    if len(given) > 1:
        reasons = {
            "resume": "goes on with a run",
            "resume_from_checkpoint": "begins one from saved weights",
            "overwrite": "removes the one that --output_path holds",
        }
        both = ", and ".join(f"--{name} {reasons[name]}" for name in given)
        raise UsageError(
            f"--{given[0]}", f"is given with --{given[1]}: {both}", "give one of them"
        )


def _check_places(config: TrainConfig) -> None:
    """What stage 1 writes and stage 2 reads: --feature_cache, else stage 1's output and
    stage 2's data set.
    """
    has_store = config.feature_cache is not None
    if config.dataset_base_path is None and not (config.stage == "train" and has_store):
        other = (
            ", or --feature_cache: the feature store to train from"
            if config.stage == "train"
            else ""
        )
        raise UsageError("--dataset_base_path", f"is required{other}")
    if config.output_path is None and not (
        config.stage == "data_process" and has_store
    ):
        other = (
            ", or --feature_cache: where the feature store goes"
            if config.stage == "data_process"
            else ""
        )
        raise UsageError("--output_path", f"is required{other}")
