"""`dstrain generate`: load a pipeline, add LoRAs, make one picture or video and write it."""

import json
import shlex
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from dstrain.checks import validate
from dstrain.components import Component
from dstrain.config import GenerateConfig
from dstrain.errors import DstrainError, StateError, SystemFault, UsageError
from dstrain.files import UNTOUCHED, final, temporary
from dstrain.given import inputs_given, names_given, spelled
from dstrain.loading import fill
from dstrain.memory import GENERATE_ADVICE, explained
from dstrain.model_files import Found, ModelConfig, assign, model_configs, place_of
from dstrain.pipeline import Pipeline
from dstrain.plugins import load_record
from dstrain.progress import Progress
from dstrain.record import ModelRecord
from dstrain.run_files import probe
from dstrain.sampler import generate_task, planned
from dstrain.setup import Setup
from dstrain.sources import Column
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
        print(f"wrote {config.output}")


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
            raise StateError(str(lora.path), "no such LoRA file")
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
    building = temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(made, Frames):
            write_video(made, building)
        else:
            made.save(building)
        building.replace(path)
    except UsageError as error:
        raise UsageError(str(final(path)), error.what) from error
    except ValueError as error:
        raise UsageError("--output", f"{path}: {error}") from error
    except OSError as error:
        raise SystemFault(str(final(path)), f"cannot be written: {error.strerror or error}", UNTOUCHED) from error
    finally:
        with suppress(OSError):
            building.unlink()


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
    held = _held(others, setup, found)
    # Where only their order tells two experts apart, it is that of the components.
    order = [component.name for component in setup.record.load("components")]
    paths: list[tuple[int, Any]] = [(order.index(name), str(path)) for name, path in full.items()]
    for config, names in zip(others, held, strict=True):
        if config.path and not config.component:
            path = config.path if isinstance(config.path, str) or len(config.path) > 1 else config.path[0]
            paths.append((min(map(order.index, names), default=len(order)), path))
    words = ["dstrain", "generate", "--model", setup.wiring.family, "--variant", setup.wiring.variant]
    given = [path for _, path in sorted(paths, key=itemgetter(0))]
    words += ["--model_paths", json.dumps(given)] if given else ["--toy"] if toy else []
    ids = [f"{config.origin.named}:{config.pattern}" for config in others if config.origin]
    words += ["--model_id_with_origin_paths", ",".join(ids)] if ids else []
    words += ["--hub", setup.config.hub] if ids and setup.config.hub != "modelscope" else []
    bare = {option.name for option in setup.record.options if option.is_flag}
    saving = {option.name for option in setup.record.options if option.saves}
    for name, value in ((n, v) for n, v in setup.config.family_options.items() if n not in saving):
        words += [f"--{name}"] if name in bare else [f"--{name}", value]
    for lora in loras.values():
        words += ["--lora", str(lora)]
    if setup.task.runs_sampler:  # what was trained is a number of steps, without guidance
        words += ["--num_inference_steps", "...", "--guidance_scale", "1"]
    for name in files_needed(setup.wiring):
        words += ["--input", f"{name}=FILE"]
    output = "video.mp4" if makes_video(setup.wiring) else "picture.png"
    lacking = _lacking(setup, {*full, *chain(*held)}) if given or not toy else ()
    advice = f" (add the model files of the other components: {', '.join(lacking)})" if lacking else ""
    return shlex.join([*words, "--prompt", "...", "--output", output]) + advice


def _held(configs: Sequence[ModelConfig], setup: Setup, found: Found) -> list[tuple[str, ...]]:
    """The components in each of these sets of files; of files that are not here, what their place says."""
    known: Sequence[Component] = setup.record.load("components")
    files = dict(found.files)
    here = [replace(config, hub=None) for config in setup.models if _paths(config)]
    with suppress(DstrainError):  # files that the run had no use for, and that do not fit: inference will say so
        files = {**assign(here, known, [component.name for component in known]), **files}
    held = []
    for config in configs:
        paths = set(_paths(config))
        place = place_of(config, known)
        names = tuple(name for name, own in files.items() if paths & set(own.paths))
        held.append(names or ((place,) if place and not paths else ()))
    return held


def _lacking(setup: Setup, held: Collection[str]) -> tuple[str, ...]:
    """The components with weights that inference loads and that are not held."""
    known: Sequence[Component] = setup.record.load("components")
    loaded = setup.wiring.plan(frozenset(setup.wiring.inputs), generate_task(setup.wiring, guided=True)).components[""]
    weights = {component.name for component in known if not component.is_folder}
    return tuple(name for name in loaded if name in weights - set(held))


def _paths(config: ModelConfig) -> tuple[Path, ...]:
    try:
        return config.files().paths
    except StateError:
        return ()
