"""Make images or videos of prompts during training: inference by the pipeline that
trains, which leaves training as it was.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from PIL import Image
from torch import nn

from dstrain.console import silenced
from dstrain.data import load_cell
from dstrain.data.output import side_by_side
from dstrain.graph import Frames
from dstrain.graph.keepers import Keepers
from dstrain.lora.merging import left_out
from dstrain.models import Found
from dstrain.pipeline import Pipeline
from dstrain.pipeline.loading import read_preset
from dstrain.registry import PromptRow
from dstrain.runs.prompt_rows import PromptPlan, kept_options, plan_rows, stored_rows
from dstrain.runs.setup import Setup
from dstrain.runs.training_data import TrainingData
from dstrain.runs.training_run import TrainingRun
from dstrain.training import CachedSamples


@dataclass
class Images:
    """Images or videos of the rows that plugins add to a run, by number. They are made in
    the main process, and leave training as it was.
    """

    setup: Setup
    plans: list[PromptPlan]
    found: Found
    """The files that they need beside what is trained."""
    pipeline: Pipeline | None = None
    """The pipeline, in the main process and once it is loaded."""
    values: list[dict[str, Any]] = field(default_factory=list)
    """The cached values of each."""
    adapters: list[Callable[[], AbstractContextManager[object]]] = field(
        default_factory=list
    )
    """What leaves a preset for training only out of a network."""

    @property
    def rows(self) -> list[PromptRow]:
        """Return the rows, by number."""
        return [plan.row for plan in self.plans]

    def steps(self, number: int) -> int:
        """Return the steps that the sampler takes for a row."""
        return self.plans[number].sampling.num_inference_steps

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
            keepers=Keepers((*more.keepers.all, *trains.keepers.all)),
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

    @contextmanager
    def making(self) -> Iterator[None]:
        """Prepare for several images: no gradients, no dropout; afterwards all is as it
        was.
        """
        assert self.pipeline is not None  # in the main process
        with undisturbed(self.pipeline), self._without_adapters():
            yield
        if self.pipeline.device.type == "cuda":
            torch.cuda.empty_cache()  # other shapes than a training step's

    def make(
        self, number: int, on_step: Callable[[int, torch.Tensor], None]
    ) -> Image.Image | Frames:
        """Return the image or video of a row; `on_step` is called after each step of the
        sampler, and what it raises ends it.
        """
        assert self.pipeline is not None
        plan = self.plans[number]
        sampling = replace(plan.sampling, seed=self._seed(number), on_step=on_step)
        values = send_to_device(self.values[number], self.pipeline.device)
        made = self.pipeline.finish(plan.plan, values, sampling)
        return side_by_side(made) if isinstance(made, list) else made

    def _seed(self, number: int) -> int:
        seed = self.plans[number].row.arguments.get("seed", self.setup.config.seed)
        return int(seed)

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        with ExitStack() as stack:
            for adapter in self.adapters:
                stack.enter_context(adapter())
            is_compiled = any(one.kind == "compile" for one in self.setup.keepers.all)
            if self.adapters and is_compiled:
                # Compiled code knows no hooks that came later.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    def facts(self, number: int) -> dict[str, Any]:
        """Return what decides an image, beside the weights."""
        plan = self.plans[number]
        values = self.values[number]
        described = {
            name: value
            for name, value in values.items()
            if isinstance(value, str | int | float)
        }
        described |= kept_options(plan.sampling)
        if self.setup.spec.samplers:
            described["sampler"] = plan.sampling.sampler
        config = self.setup.config
        if config.ema_decay is not None:
            described["ema_decay"] = config.ema_decay
        if self.adapters:
            described["without"] = str(config.preset_lora_path)
        return {**described, "prompt": plan.row.prompt, "seed": self._seed(number)}


def open_images(setup: Setup, samples: TrainingData) -> Images:
    """Plan the images that are asked for and find their files, before anything is
    loaded.

    Raises UsageError for a variant that makes none, StateError for files or
    stored values that are missing.
    """
    info = samples.cache_info
    if info is not None and isinstance(samples.source, CachedSamples):
        plans = stored_rows(setup, samples.source.cache, info.prompt_rows)
    else:
        plans = plan_rows(setup)
    return Images(setup, plans, setup.find(one.plan for one in plans))


def _cached_values(pipeline: Pipeline, planned: PromptPlan) -> dict[str, Any]:
    """Return the cached values: those of the feature cache, or what cached steps compute
    of the inputs, as stage 1 would.
    """
    if planned.cached_values is not None:
        return dict(planned.cached_values)
    values = {name: load_cell(cell) for name, cell in planned.cells.items()}
    pipeline.run(planned.plan.cached_steps, values)
    return {name: values[name] for name in planned.plan.cached_values}


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
