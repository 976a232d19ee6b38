"""`dstrain generate`: load a pipeline, add LoRAs, make one picture or video and write it."""

import json
import shlex
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from dstrain.config import GenerateConfig, validate
from dstrain.errors import StateError, UsageError
from dstrain.given import inputs_given, names_given
from dstrain.loading import fill
from dstrain.model_files import Found, ModelConfig, model_configs
from dstrain.pipeline import Pipeline
from dstrain.plugins import load_record
from dstrain.record import ModelRecord
from dstrain.sampler import generate_task
from dstrain.setup import Setup
from dstrain.sources import Column
from dstrain.toys import write_toy
from dstrain.values import Frames
from dstrain.variants import Hints, choose_variant, fitting_inputs, settled
from dstrain.videos import check_video_name, write_video
from dstrain.wiring import Wiring
from dstrain.world import default_device


def generate(config: GenerateConfig) -> None:
    """Make the picture, video or data set a configuration describes; raises a DstrainError for what does not fit."""
    validate(config)
    if config.dataset is not None:
        from dstrain.generate_dataset import generate_dataset

        generate_dataset(config, config.dataset)
        return
    with chosen(config, names_given(config)) as source:
        check_output(config.output, source.wiring)
        inputs = inputs_given(config, source.wiring)
        write(source.load()(**inputs, **sampling_given(config)), config.output)


@dataclass(frozen=True)
class PipelineSource:
    """What a configuration opens: the family's record, the wiring of its variant, and the files of its models."""

    config: GenerateConfig
    record: ModelRecord
    wiring: Wiring
    models: tuple[ModelConfig, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the components, and the one model_fn computes in."""
        precision = self.config.mixed_precision or ("bf16" if default_device().type == "cuda" else "no")
        return torch.bfloat16 if precision == "bf16" else torch.float32

    def load(self) -> Pipeline:
        """Load the pipeline and add the LoRAs."""
        pipeline = fill(self.record, self.wiring, self.models, default_device(), self.dtype)
        for lora in self.config.lora:
            pipeline.load_lora(lora.path, lora.scale)
        return pipeline


@contextmanager
def chosen(config: GenerateConfig, inputs: Collection[str]) -> Iterator[PipelineSource]:
    """Choose the variant by its flag or the names of the inputs; a toy, if asked for, lies in a temporary folder."""
    record = load_record(config.model, config.left_out)
    models = model_configs(config, record)
    hints = Hints(models, fitting_inputs(inputs), either=config.toy)
    wiring = settled(record.load("wiring")(choose_variant(record, config.variant, hints)), record, config)
    with tempfile.TemporaryDirectory(prefix="dstrain-toy-") as folder:
        toy = write_toy(record, wiring.variant, Path(folder)) if config.toy else ()
        yield PipelineSource(config, record, wiring, (*toy, *models))


def makes_video(wiring: Wiring) -> bool:
    """Whether the variant's last decoder makes frames; otherwise a picture."""
    return "frames" in wiring.decoders[-1].makes.values()


def check_output(path: Path, wiring: Wiring) -> None:
    """Refuse, before anything is loaded, a file name whose ending is not of what the variant makes."""
    if makes_video(wiring):
        check_video_name(path)
    elif path.suffix.lower() not in Image.registered_extensions():
        raise UsageError("--output", f"{path}: {path.suffix or 'no ending'} is no picture format; use .png")


def write(made: Any, path: Path) -> None:
    """Write a picture or a video in the format its file name asks for."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(made, Frames):
            write_video(made, path)
        else:
            made.save(path)
    except ValueError as error:
        raise UsageError("--output", f"{path}: {error}") from error


def sampling_given(config: GenerateConfig) -> dict[str, Any]:
    """The settings of the sampler that a configuration gives."""
    names = ("guidance_scale", "seed", "num_inference_steps")
    return {name: value for name in names if (value := getattr(config, name)) is not None}


def files_needed(wiring: Wiring) -> tuple[str, ...]:
    """The inputs of inference that are pictures or videos."""
    used = wiring.plan(frozenset(wiring.inputs), generate_task(wiring, guided=False)).used_inputs
    files = (name for name, source in wiring.inputs.items() if isinstance(source, Column) and source.is_file)
    return tuple(name for name in files if name in used)


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
    bare = {option.name for option in setup.record.options if option.is_flag}
    for name, value in setup.config.family_options.items():
        words += [f"--{name}"] if name in bare else [f"--{name}", value]
    for path in loras.values():
        words += ["--lora", str(path)]
    lacking = " (add the model files of the other components)" if toy and full else ""
    for name in files_needed(setup.wiring):
        words += ["--input", f"{name}=FILE"]
    output = "video.mp4" if makes_video(setup.wiring) else "picture.png"
    return shlex.join([*words, "--prompt", "...", "--output", output]) + lacking


def _paths(config: ModelConfig) -> tuple[Path, ...]:
    try:
        return config.files().paths
    except StateError:
        return ()
