"""`dstrain generate`: load a pipeline, add LoRAs, make one picture and write it."""

import json
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from dstrain.config import GenerateConfig, validate
from dstrain.errors import StateError, UsageError
from dstrain.loading import Found, ModelConfig, model_configs, open_pipeline
from dstrain.plugins import load_record, variant_of
from dstrain.setup import Setup
from dstrain.toys import write_toy
from dstrain.world import default_device


def generate(config: GenerateConfig) -> None:
    """Make the picture a configuration describes; raises a DstrainError for what cannot be found or does not fit."""
    validate(config)
    check_output(config.output)
    record = load_record(config.model, config.left_out)
    variant = variant_of(record, config.variant)
    device = default_device()
    precision = config.mixed_precision or ("bf16" if device.type == "cuda" else "no")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with tempfile.TemporaryDirectory(prefix="dstrain-toy-") as folder:
        models = write_toy(record, variant, Path(folder)) if config.toy else model_configs(config, record)
        pipeline = open_pipeline(config.model, models, variant, device, dtype, config.left_out)
    for lora in config.lora:
        pipeline.load_lora(lora.path, lora.scale)
    write(pipeline(**_arguments(config)), config.output)


def check_output(path: Path) -> None:
    """Refuse, before anything is loaded, a file name whose ending is no picture format."""
    if path.suffix.lower() not in Image.registered_extensions():
        raise UsageError("--output", f"{path}: {path.suffix or 'no ending'} is no picture format; use .png")


def write(picture: Any, path: Path) -> None:
    """Write a picture in the format its file name asks for."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    except ValueError as error:
        raise UsageError("--output", f"{path}: {error}") from error


def _arguments(config: GenerateConfig) -> dict[str, Any]:
    names = ("prompt", "negative_prompt", "guidance_scale", "seed", "height", "width", "num_inference_steps")
    return {name: value for name in names if (value := getattr(config, name)) is not None}


def generate_command(setup: Setup, found: Found, full: Mapping[str, Path], loras: Mapping[str, Path]) -> str:
    """The command that tries trained weights: those of `full` in the place of the files they were loaded from."""
    toy = setup.config.toy
    replaced = {path for name in full for path in found.files[name].paths}
    others = [] if toy else [config for config in setup.models if not replaced & set(_paths(config))]
    paths: list[Any] = [str(path) for path in full.values()]
    for config in others:
        if config.path and not config.component:
            paths.append(config.path if isinstance(config.path, str) or len(config.path) > 1 else config.path[0])
    words = ["dstrain", "generate", "--model", setup.wiring.family, "--variant", setup.wiring.variant]
    words += ["--model_paths", json.dumps(paths)] if paths else ["--toy"] if toy else []
    ids = [f"{config.model_id}:{config.origin_file_pattern}" for config in others if config.model_id]
    words += ["--model_id_with_origin_paths", ",".join(ids)] if ids else []
    for name, value in setup.config.family_options.items():
        words += [f"--{name}", value]
    for path in loras.values():
        words += ["--lora", str(path)]
    lacking = " (add the model files of the other components)" if toy and full else ""
    return shlex.join([*words, "--prompt", "...", "--output", "picture.png"]) + lacking


def _paths(config: ModelConfig) -> tuple[Path, ...]:
    try:
        return config.files().paths
    except StateError:
        return ()
