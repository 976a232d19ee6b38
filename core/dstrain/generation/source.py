"""Where a generation takes its pipeline and its sampling settings from."""

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dstrain.config.schema import GenerateConfig
from dstrain.errors import UsageError
from dstrain.generation.inputs import flag_for, input_names
from dstrain.graph.spec import PipelineSpec
from dstrain.lora.reader import check_lora_file
from dstrain.models.device import DTYPES, default_device, precision
from dstrain.models.locate import ModelConfig, model_configs
from dstrain.models.toy import write_toy
from dstrain.pipeline.pipeline import Pipeline
from dstrain.pipeline.variants import (
    Hints,
    choose_variant,
    score_inputs,
    with_overrides,
)
from dstrain.registry.discovery import load_family
from dstrain.registry.family import ModelFamily


@dataclass(frozen=True)
class PipelineSource:
    """What a configuration opens: the family's record, the pipeline spec of its variant, and
    the files of its models.
    """

    config: GenerateConfig
    family: ModelFamily
    spec: PipelineSpec
    models: tuple[ModelConfig, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the components, and the one model_fn computes in."""
        return DTYPES[precision(self.config.mixed_precision, default_device())]

    def load(self) -> Pipeline:
        """Load the pipeline and add the LoRAs."""
        pipeline = Pipeline.from_files(
            self.family, self.spec, self.models, default_device(), self.dtype
        )
        for lora in self.config.lora:
            pipeline.load_lora(lora.path, lora.scale)
        return pipeline


@contextmanager
def open_source(
    config: GenerateConfig, inputs: Collection[str]
) -> Iterator[PipelineSource]:
    """Choose the variant by its flag or the names of the inputs; a toy, if asked for,
    lies in a temporary folder.

    Raises StateError for a LoRA file that is not there.
    """
    for lora in config.lora:
        if not lora.path.is_file():
            path, _, tail = str(lora.path).rpartition(":")
            if Path(path).is_file():
                raise UsageError(
                    "--lora",
                    f"{tail!r} after {path} is no scale",
                    f"want a number: {path}:0.8",
                )
        check_lora_file(lora.path)
    family = load_family(config.model, config.left_out)
    models = model_configs(config, family)
    hints = Hints(models, score_inputs(inputs), take_first=config.toy)
    spec = with_overrides(
        family.load("pipelines")(choose_variant(family, config.variant, hints)),
        family,
        config,
    )
    with tempfile.TemporaryDirectory(prefix="dstrain-toy-") as folder:
        toy = write_toy(family, spec.variant, Path(folder)) if config.toy else ()
        yield PipelineSource(config, family, spec, (*toy, *models))


def check_used(
    config: GenerateConfig, spec: PipelineSpec, used: Collection[str]
) -> None:
    """Refuse an input that the command line gives and that inference, whose inputs are
    `used`, does not read.
    """
    for name in input_names(config):
        if name not in used:
            off = "guidance is off; it is on with --guidance_scale above 1"
            why = (
                off
                if name in spec.cfg_inputs.values()
                else f"variant {spec.variant} makes nothing from it"
            )
            raise UsageError(flag_for(config, name), f"has no effect: {why}")


def sampling_arguments(config: GenerateConfig) -> dict[str, Any]:
    """The settings of the sampler that a configuration gives."""
    names = ("guidance_scale", "seed", "num_inference_steps")
    return {
        name: value for name in names if (value := getattr(config, name)) is not None
    }
