"""Check a configuration before anything is opened: values are in range, and no options
contradict each other.
"""

from dstrain.config.fields import (
    changed,
    check_value,
    flags,
    parse_model_paths,
    parse_origins,
    split_commas,
)
from dstrain.config.schema import STAGES, GenerateConfig, ModelChoice, TrainConfig
from dstrain.errors import UsageError, nearest


def validate(config: ModelChoice) -> None:
    """Raise UsageError for a value out of its range, or for options that contradict
    each other; opens no file.
    """
    for flag in flags(type(config)):
        check_value(flag, getattr(config, flag.name))
    _check_model(config)
    if isinstance(config, TrainConfig):
        _check_task(config)
        _check_trainables(config)
        _check_steps(config)
        _check_frames(config)
        _check_start(config)
        if config.preview_steps is not None and not config.preview_prompt:
            raise UsageError(
                "--preview_steps", "has no effect without --preview_prompt"
            )
        if not config.dry_run:
            _check_places(config)
    if isinstance(config, GenerateConfig):
        _check_prompt(config)


def _check_prompt(config: GenerateConfig) -> None:
    if config.dataset is None:
        if config.prompt is None:
            raise UsageError(
                "--prompt",
                "is required: what to generate",
                "or --dataset: a table of prompts and seeds to generate a dataset from",
            )
        return
    for flag in flags(GenerateConfig):
        value = getattr(config, flag.name)
        if flag.name in ("prompt", "seed") and value != flag.default:
            raise UsageError(
                flag.spelled,
                f"cannot be combined with --dataset, whose column {flag.name!r} has one for each row",
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
            "--hub", "has no effect: --toy builds a toy model, so nothing is downloaded"
        )
    is_dry_run = isinstance(config, TrainConfig) and config.dry_run
    if not files and not config.toy and not is_dry_run:
        raise UsageError(
            "--model_id_with_origin_paths",
            "no model files are given",
            "give --model_paths for local files, or --toy for a tiny model with random weights",
        )
    if (config.height is None) != (config.width is None):
        given, missing = "height", "width"
        if config.height is None:
            given, missing = missing, given
        raise UsageError(
            f"--{given}", f"is given without --{missing}; give both, or neither"
        )


def _check_task(config: TrainConfig) -> None:
    name, stage = config.task_name, config.stage
    if name and stage in STAGES and not config.task.endswith(":"):
        return
    name = name or "TASK"
    known = ", ".join([name, *(f"{name}:{stage}" for stage in STAGES if stage)])
    raise UsageError(
        "--task",
        f"{config.task!r} is not a task with a stage; want {known}{nearest(stage, STAGES)}",
    )


def _check_trainables(config: TrainConfig) -> None:
    for name in ("trainable_models", "lora_base_model", "lora_target_modules"):
        text = getattr(config, name)
        if text is not None and not split_commas(text):
            raise UsageError(f"--{name}", "names nothing")
    trained = {name.partition(".")[0] for name in config.trainables}
    if config.lora_base_model in trained:
        reason = "LoRA trains beside frozen weights, so a component is trained in full or by LoRA"
        raise UsageError(
            "--lora_base_model",
            f"{config.lora_base_model} is also in --trainable_models; {reason}",
        )
    if trained and config.lora_base_model is None:
        for flag in changed(config, "LoRA"):
            raise UsageError(
                flag.spelled,
                "has no effect: no LoRA is trained (--trainable_models trains full weights)",
                "name the component to add LoRA to with --lora_base_model",
            )


def _check_steps(config: TrainConfig) -> None:
    if config.lr_warmup_steps and config.lr_scheduler == "constant":
        raise UsageError(
            "--lr_warmup_steps",
            "has no effect: --lr_scheduler constant has no warm-up",
            "use --lr_scheduler constant_with_warmup",
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
            f"{low} is not below --max_timestep_boundary {high}: no timesteps are left",
        )


def _check_frames(config: TrainConfig) -> None:
    is_uniform = config.frame_sampling == "uniform"
    if is_uniform and config.frame_samples is None:
        raise UsageError("--frame_sampling", "uniform needs --frame_samples")
    if not is_uniform and config.frame_samples is not None:
        raise UsageError(
            "--frame_samples",
            f"has no effect with --frame_sampling {config.frame_sampling}",
            "use --frame_sampling uniform",
        )


def _check_start(config: TrainConfig) -> None:
    """Refuse more than one of the ways to start: resume, from saved weights, or in the
    place of another run.
    """
    if config.preset_lora_model is not None and config.preset_lora_path is None:
        raise UsageError(
            "--preset_lora_model", "has no effect without --preset_lora_path"
        )
    ways = {
        "resume": "resumes a run",
        "resume_from_checkpoint": "starts a new one from saved weights",
        "overwrite": "deletes the one in --output_path",
    }
    given = [name for name in ways if getattr(config, name)]
    if len(given) > 1:
        both = ", and ".join(f"--{name} {ways[name]}" for name in given)
        raise UsageError(
            f"--{given[0]}", f"is given with --{given[1]}: {both}", "give one of them"
        )


def _check_places(config: TrainConfig) -> None:
    """Refuse a run that does not know what to read, or where to write.

    Without --feature_cache the cache is stage 1's output and stage 2's dataset.
    """
    has_cache = config.feature_cache is not None
    reads_cache = config.stage == "train"
    writes_cache = config.stage == "data_process"
    if config.dataset_base_path is None and not (reads_cache and has_cache):
        what = "is required: the dataset directory"
        if reads_cache:
            what += ", or --feature_cache: the feature cache to train from"
        raise UsageError("--dataset_base_path", what)
    if config.output_path is None and not (writes_cache and has_cache):
        what = "is required: the directory for checkpoints and logs"
        if writes_cache:
            what = (
                "is required, or --feature_cache: the directory for the feature cache"
            )
        raise UsageError("--output_path", what)
