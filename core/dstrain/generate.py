"""`dstrain generate`: load a pipeline, add LoRAs, make one picture or video and write it."""

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from dstrain.checks import validate
from dstrain.config import GenerateConfig
from dstrain.errors import UsageError
from dstrain.files import probe, replacing
from dstrain.given import inputs_given, names_given, spelled
from dstrain.loading import fill
from dstrain.lora_files import check_lora_file
from dstrain.memory import GENERATE_ADVICE, explained
from dstrain.model_files import ModelConfig, model_configs
from dstrain.pipeline import Pipeline
from dstrain.plugins import load_record
from dstrain.progress import Progress
from dstrain.record import ModelRecord
from dstrain.redaction import redacted
from dstrain.sampler import planned
from dstrain.toys import write_toy
from dstrain.values import Frames
from dstrain.variants import Hints, choose_variant, fitting_inputs, settled
from dstrain.videos import check_video_name, write_video
from dstrain.wiring import Wiring
from dstrain.world import DTYPES, default_device, precision


def generate(config: GenerateConfig) -> None:
    """Make the picture, video or data set a configuration describes; raises a DstrainError for what does not fit."""
    validate(config)
    with explained("generate", *GENERATE_ADVICE):
        if config.dataset is None:
            generate_one(config)
            return
        from dstrain.generate_dataset import generate_dataset

        generate_dataset(config, config.dataset)


def generate_one(config: GenerateConfig) -> None:
    """Make one picture or video, and write it."""
    with chosen(config, names_given(config)) as source:
        check_output(config.output, source.wiring)
        arguments = {**inputs_given(config, source.wiring), **sampling_given(config)}
        call = planned(source.wiring, arguments)
        check_used(config, source.wiring, call.plan.used_inputs)
        probe(config.output.parent)
        pipeline = source.load()
        with Progress("generate", call.sampling.num_inference_steps, brief=True) as progress:
            made = pipeline(**arguments, on_step=lambda number, latents: progress.step())
        write(made, config.output)
        print(redacted(f"wrote {config.output}"))


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
        return DTYPES[precision(self.config.mixed_precision, default_device())]

    def load(self) -> Pipeline:
        """Load the pipeline and add the LoRAs."""
        pipeline = fill(self.record, self.wiring, self.models, default_device(), self.dtype)
        for lora in self.config.lora:
            pipeline.load_lora(lora.path, lora.scale)
        return pipeline


@contextmanager
def chosen(config: GenerateConfig, inputs: Collection[str]) -> Iterator[PipelineSource]:
    """Choose the variant by its flag or the names of the inputs; a toy, if asked for, lies in a temporary folder.

    Raises StateError for a LoRA file that is not there.
    """
    for lora in config.lora:
        if not lora.path.is_file():
            path, _, tail = str(lora.path).rpartition(":")
            if Path(path).is_file():
                raise UsageError("--lora", f"{tail!r} after {path} is no scale", f"want a number: {path}:0.8")
        check_lora_file(lora.path)
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
    """Refuse, before anything is loaded, a folder, and a file name whose ending is not of what the variant makes."""
    if path.is_dir():
        raise UsageError("--output", f"{path} is a folder; give the name of a file")
    if makes_video(wiring):
        check_video_name(path)
        return
    try:
        kind = Image.registered_extensions()[path.suffix.lower()]
        Image.new("RGB", (8, 8)).save(BytesIO(), kind)  # some formats can be read and not written, or not in colour
    except (KeyError, OSError, ValueError) as error:
        what = f"{path}: {path.suffix or 'no ending'} is no picture format that can be written; use .png"
        raise UsageError("--output", what) from error


def check_used(config: GenerateConfig, wiring: Wiring, used: Collection[str]) -> None:
    """Refuse an input that the command line gives and that inference, whose inputs are `used`, does not read."""
    for name in names_given(config):
        if name not in used:
            off = "guidance is off; it is on with --guidance_scale above 1"
            why = off if name in wiring.per_side.values() else f"variant {wiring.variant} makes nothing from it"
            raise UsageError(spelled(config, name), f"would do nothing: {why}")


def write(made: Any, path: Path) -> None:
    """Write a picture or a video in the format its file name asks for: whole, or not at all.

    Raises SystemFault if it cannot be written; what was there before is then untouched.
    """
    try:
        with replacing(path) as building:
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(made, Frames):
                write_video(made, building)
            else:
                made.save(building)
    except UsageError as error:
        raise UsageError(str(path), error.what) from error
    except ValueError as error:
        raise UsageError("--output", f"{path}: {error}") from error


def sampling_given(config: GenerateConfig) -> dict[str, Any]:
    """The settings of the sampler that a configuration gives."""
    names = ("guidance_scale", "seed", "num_inference_steps")
    return {name: value for name in names if (value := getattr(config, name)) is not None}
