"""Make images or videos during training: inference by the pipeline that trains, which
leaves training as it was.

    previews/step-000010-0.png  the first --preview_prompt after 10 optimizer steps
    previews/prompts.json       step -> from there on, the prompts by number, with seed,
                                size and what else decides them
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from dstrain.console import get_logger, progress_bar, silenced
from dstrain.data import load_cell, save_image_or_video
from dstrain.data.output import side_by_side
from dstrain.errors import DstrainError
from dstrain.lora.merging import left_out
from dstrain.models import Found
from dstrain.pipeline import Pipeline
from dstrain.pipeline.loading import read_preset
from dstrain.runs.checkpoints.directory import PREVIEWS, PROMPTS
from dstrain.runs.observers import Observer, WatchedRun
from dstrain.runs.reports.preview_plans import (
    RECORDED,
    PreviewPlan,
    plan_previews,
    stored_previews,
)
from dstrain.runs.setup import Setup
from dstrain.runs.training_run import TrainingData, TrainingRun
from dstrain.storage import RunFiles, remove_leftovers, write_json
from dstrain.training import CachedSamples

logger = get_logger(__name__)


class Stopped(Exception):
    """A preview is cut short, since the run is to stop."""


@dataclass
class Previews:
    """The previews of a run."""

    setup: Setup
    plans: list[PreviewPlan]
    found: Found
    """The files that they need beside what is trained."""
    pipeline: Pipeline | None = None
    values: list[dict[str, Any]] = field(default_factory=list)
    """The cached values of each."""
    adapters: list[Callable[[], AbstractContextManager[object]]] = field(
        default_factory=list
    )
    """What leaves a preset for training only out of a network."""

    def load(self, run: TrainingRun) -> None:
        """Load what inference needs beside what is trained, and encode what does not
        change; main process only.
        """
        if not self.plans or not run.processes.is_main:
            return
        setup = self.setup
        found = self.found
        trains = run.module.pipeline
        preset = setup.preset
        is_left_out = preset is not None and preset.file.training_only
        files = {
            name: replace(own, preset=None) if is_left_out else own
            for name, own in found.files.items()
            if name not in trains.components
        }
        more = Pipeline.from_found(
            setup.family,
            setup.spec,
            replace(found, files=files),
            setup.device,
            setup.dtype,
        )
        # A pipeline of its own: with one more expert loaded, training would choose
        # between them.
        self.pipeline = replace(
            trains,
            components={**more.components, **trains.components},
            configs={**more.configs, **trains.configs},
            in_ram={**more.in_ram, **trains.in_ram},
        )
        if preset is not None and is_left_out:
            for name in trains.components.keys() & {*preset.components}:
                file = replace(preset.file, component=name)
                unused = setup.spec.unused_parameters.get(name, ())
                network = trains.components[name]
                with silenced(logging.WARNING):  # said when it was merged
                    (lora,) = read_preset(file, setup.family, network, unused)
                self.adapters.append(partial(left_out, network, lora, file))
        with undisturbed(self.pipeline), self._without_adapters():
            self.values = [_cached_values(self.pipeline, plan) for plan in self.plans]

    def make(self, pipeline: Pipeline, run: WatchedRun) -> None:
        """Make the previews of this step that are not there."""
        output = self.setup.output
        step = run.step
        suffix = "mp4" if self.setup.spec.makes_video else "png"
        missing: dict[str, int] = {}
        try:
            self._record_prompts(output, step)
            for number in range(len(self.plans)):
                name = f"{PREVIEWS}/step-{step:06}-{number}.{suffix}"
                if not (output / name).exists():
                    missing[name] = number
            RunFiles.read(output).add(missing, step)
        except (OSError, DstrainError) as error:
            logger.warning(f"no previews in {output / PREVIEWS}: {_reason(error)}")
            return

        def on_step(index: int, latents: torch.Tensor) -> None:
            bar.update()
            if run.is_stopping():
                raise Stopped

        plans = [self.plans[number] for number in missing.values()]
        steps = sum(plan.sampling.num_inference_steps for plan in plans)
        bar = progress_bar("preview", steps, brief=True)
        with undisturbed(pipeline), self._without_adapters(), bar:
            for name, number in missing.items():
                plan = self.plans[number]
                path = output / name
                seed = self.setup.config.seed
                sampling = replace(plan.sampling, seed=seed, on_step=on_step)
                try:
                    values = send_to_device(self.values[number], pipeline.device)
                    preview = pipeline.finish(plan.plan, values, sampling)
                    if isinstance(preview, list):
                        preview = side_by_side(preview)
                    save_image_or_video(preview, path)
                    logger.info(f"preview {path}")
                    run.report({f"preview/{number}": preview})
                except Stopped:
                    return
                # Whatever it is, it is no reason to lose the training.
                except Exception as error:
                    logger.warning(f"no preview {path}: {_reason(error)}")
        if pipeline.device.type == "cuda":
            torch.cuda.empty_cache()  # other shapes than a training step's

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        with ExitStack() as stack:
            for adapter in self.adapters:
                stack.enter_context(adapter())
            if self.adapters and self.setup.config.compile:
                # Compiled code knows no hooks that came later.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    def _record_prompts(self, output: Path, step: int) -> None:
        """Record what each number stands for from this step on; if that is new, remove
        what was made and recorded from there on.
        """
        path = output / PROMPTS
        files = RunFiles.read(output)
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        try:
            record = json.loads(path.read_bytes())
            before = {int(first): prompts for first, prompts in record.items()}
        except (OSError, ValueError, AttributeError):
            before = {}
        now = {first: prompts for first, prompts in before.items() if first <= step}
        prompts = [self._description(number) for number in range(len(self.plans))]
        if not now or now[max(now)] != prompts:
            now[step] = prompts
        if now == before:
            return
        outdated = [
            name
            for name, made_at in files.steps.items()
            if name.startswith(f"{PREVIEWS}/step-") and made_at >= step
        ]
        files.remove(outdated)
        files.add([PROMPTS])
        write_json(path, now)

    def _description(self, number: int) -> dict[str, Any]:
        """Return what decides a preview, beside the weights."""
        plan = self.plans[number]
        values = self.values[number]
        described = {
            name: value
            for name, value in values.items()
            if isinstance(value, str | int | float)
        }
        described |= {name: getattr(plan.sampling, name) for name in RECORDED}
        config = self.setup.config
        if config.ema_decay is not None:
            described["ema_decay"] = config.ema_decay
        if self.adapters:
            described["without"] = str(config.preset_lora_path)
        return {**described, "prompt": plan.prompt, "seed": config.seed}


class PreviewsWhenDue(Observer):
    """Makes previews, while the other processes wait: every --preview_steps, else with
    each save, and at the start those that a run which was cut off lacks.
    """

    everywhere = True

    def __init__(self, run: TrainingRun, previews: Previews) -> None:
        """Make the previews of a run."""
        self.previews = previews
        self.every = run.setup.config.preview_steps

    def start(self, run: WatchedRun) -> None:
        """Make those due at the start."""
        self._make(run, with_save=True)

    def step(self, run: WatchedRun, numbers: Mapping[str, float]) -> None:
        """Make those due after a step."""
        if self.every:
            self._make(run)

    def saved(self, run: WatchedRun, files: Sequence[Path]) -> None:
        """Make those due with a save."""
        if not self.every:
            self._make(run, with_save=True)

    def _make(self, run: WatchedRun, with_save: bool = False) -> None:
        is_due = run.step % self.every == 0 if self.every else with_save
        if not self.previews.plans or not is_due:
            return
        if self.previews.pipeline is not None and not run.is_stopping():
            with run.weights_to_use():
                self.previews.make(self.previews.pipeline, run)
        run.wait()


def open_previews(setup: Setup, samples: TrainingData) -> Previews:
    """Plan the previews that are asked for and find their files, before anything is
    loaded.

    Raises UsageError for a variant that cannot be previewed, StateError for files or
    stored values that are missing.
    """
    info = samples.cache_info
    if info is not None and isinstance(samples.source, CachedSamples):
        plans = stored_previews(setup, samples.source.cache, info.previews)
    else:
        plans = plan_previews(setup)
    return Previews(setup, plans, setup.find(preview.plan for preview in plans))


@contextmanager
def undisturbed(pipeline: Pipeline) -> Iterator[None]:
    """Switch gradients and dropout off; afterwards restore modes and global generators."""
    networks = [
        module
        for module in pipeline.components.values()
        if isinstance(module, nn.Module)
    ]
    modes = {
        module: module.training for network in networks for module in network.modules()
    }
    devices = [pipeline.device] if pipeline.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        try:
            for network in networks:
                network.eval()
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def _cached_values(pipeline: Pipeline, preview: PreviewPlan) -> dict[str, Any]:
    """Return the cached values: those of the feature cache, or what cached steps compute
    of the inputs, as stage 1 would.
    """
    if preview.cached_values is not None:
        return dict(preview.cached_values)
    values = {name: load_cell(cell) for name, cell in preview.cells.items()}
    pipeline.run(preview.plan.cached_steps, values)
    return {name: values[name] for name in preview.plan.cached_values}


def _reason(error: Exception) -> str:
    """Return what went wrong, in one line, with its kind."""
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line.removeprefix('dstrain: error: ')}"
