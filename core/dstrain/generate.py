"""`dstrain generate`: load a pipeline, add LoRAs, make one picture and write it."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from dstrain.config import GenerateConfig, validate
from dstrain.errors import UsageError
from dstrain.loading import model_configs
from dstrain.pipeline import Pipeline
from dstrain.plugins import load_record, variant_of
from dstrain.toys import write_toy
from dstrain.world import default_device


def generate(config: GenerateConfig) -> None:
    """Make the picture a configuration describes; raises a DstrainError for what cannot be found or does not fit."""
    validate(config)
    record = load_record(config.model, config.left_out)
    variant = variant_of(record, config.variant)
    device = default_device()
    precision = config.mixed_precision or ("bf16" if device.type == "cuda" else "no")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with tempfile.TemporaryDirectory(prefix="dstrain-toy-") as folder:
        models = write_toy(record, variant, Path(folder)) if config.toy else model_configs(config, record)
        pipeline = Pipeline.from_pretrained(config.model, models, variant, device, dtype)
    for lora in config.lora:
        pipeline.load_lora(lora.path, lora.scale)
    write(pipeline(**_arguments(config)), config.output)


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
