"""Pictures, or videos, during training: inference by the pipeline that trains, which
leaves training as it was.

previews/step-000010-0.png   what the first --preview_prompt gives after 10 optimizer
steps previews/prompts.json        step -> the prompts by number from there on, with
seed, size and what else decides them
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from dstrain.console import get_logger, progress_bar
from dstrain.data.cells import load_cell
from dstrain.data.output import save_image_or_video
from dstrain.errors import DstrainError
from dstrain.models.locate import Found
from dstrain.pipeline.pipeline import Pipeline
from dstrain.runs.checkpoints.directory import PREVIEWS, PROMPTS
from dstrain.runs.reports.preview_plans import (
    RECORDED,
    PreviewPlan,
    StoredPreview,
    plan_previews,
    stored_previews,
)
from dstrain.runs.setup import Setup
from dstrain.storage.files import remove_leftovers, write_json
from dstrain.storage.run_files import RunFiles
from dstrain.training.loader import CachedSamples

if TYPE_CHECKING:
    from dstrain.runs.job import TrainingData, TrainingRun

logger = get_logger(__name__)


Asked = Callable[[], bool]
"""Whether the run is to stop at once."""


class Stopped(Exception):
    """A preview is cut short, since the run is to stop."""


@dataclass
class Previews:
    """The previews of a run. found: what they need beside what is trained; pipeline and
    values: once loaded.

    noted: whether the folder says what each number stands for.
    """

    setup: Setup
    plans: tuple[PreviewPlan | StoredPreview, ...]
    found: Found
    pipeline: Pipeline | None = None
    values: tuple[dict[str, Any], ...] = ()
    noted: bool = False

    @property
    def output(self) -> Path:
        """The output folder of the run."""
        return Path(self.setup.config.output_path or "")

    @property
    def folder(self) -> Path:
        """The folder of previews."""
        return self.output / PREVIEWS

    def path(self, step: int, number: int) -> Path:
        """Return the file of one prompt's preview after a step."""
        return (
            self.folder
            / f"step-{step:06}-{number}.{'mp4' if self.setup.spec.makes_video else 'png'}"
        )

    def due(self, step: int, saved: bool) -> bool:
        """Return whether there are previews after this step.

        They come every --preview_steps, else with each save.
        """
        every = self.setup.config.preview_steps
        return bool(self.plans) and (step % every == 0 if every else saved)

    def load(self, run: "TrainingRun") -> None:
        """Load what inference needs beside what is trained, and encode what does not
        change; main process only.
        """
        if not self.plans or not run.processes.is_main:
            return
        trains, setup = run.module.pipeline, self.setup
        files = {
            name: own
            for name, own in self.found.files.items()
            if name not in trains.components
        }
        lacking = Found(
            files,
            {
                name: own
                for name, own in self.found.configs.items()
                if name not in trains.configs
            },
        )
        more = Pipeline.from_found(
            setup.family,
            setup.spec,
            lacking,
            setup.device,
            setup.dtype,
        )
        # A pipeline of its own: with one more expert loaded, training would choose
        # between them.
        self.pipeline = replace(
            trains,
            components={**more.components, **trains.components},
            configs={**more.configs, **trains.configs},
        )
        with undisturbed(self.pipeline):
            self.values = tuple(
                _crossing(self.pipeline, preview) for preview in self.plans
            )

    def make_if_due(self, run: "TrainingRun", saved: bool, asked: Asked) -> None:
        """Make the previews after this step that are due and not there, while the other
        processes wait.
        """
        if not self.due(run.step, saved):
            return
        if run.processes.is_main:
            self._make(run, asked)
        run.processes.wait()

    def _note(self, step: int) -> None:
        """Note what each number stands for from this step on; if that is new, remove
        what the record had from there.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)
        told = [
            self._told(plan, values)
            for plan, values in zip(self.plans, self.values, strict=True)
        ]
        record = self.output / PROMPTS
        files = RunFiles.read(self.output)
        try:
            before = {
                int(first): prompts
                for first, prompts in json.loads(record.read_bytes()).items()
            }
        except (OSError, ValueError, AttributeError):
            before = {}
        kept = {first: prompts for first, prompts in before.items() if first <= step}
        same = bool(kept) and kept[max(kept)] == told
        if not same or kept != before:
            outdated = [
                path
                for path, made_at in files.steps.items()
                if path.startswith(f"{PREVIEWS}/step-") and made_at >= step
            ]
            files.remove(outdated)
            files.add([PROMPTS])
            write_json(record, kept if same else {**kept, step: told})
        self.noted = True

    def _told(
        self, preview: PreviewPlan | StoredPreview, values: dict[str, Any]
    ) -> dict[str, Any]:
        plain = {
            name: value
            for name, value in values.items()
            if isinstance(value, str | int | float)
        }
        sampling = {name: getattr(preview.sampling, name) for name in RECORDED}
        return {
            **plain,
            **sampling,
            "prompt": preview.prompt,
            "seed": self.setup.config.seed,
        }

    def _make(self, run: "TrainingRun", asked: Asked) -> None:
        try:
            if not self.noted:
                self._note(run.step)
            missing = self._list_missing(run.step)
        except (OSError, DstrainError) as error:
            logger.warning(f"no previews in {self.folder}: {_reason(error)}")
            return
        steps = sum(
            self.plans[number].sampling.num_inference_steps for number in missing
        )
        assert self.pipeline is not None
        with (
            undisturbed(self.pipeline),
            progress_bar("preview", steps, brief=True) as progress,
        ):
            for number, path in missing.items():
                try:
                    save_image_or_video(self._made(number, progress, asked), path)
                    logger.info(f"preview {path}")
                except Stopped:
                    return
                except (
                    Exception
                ) as error:  # whatever it is, it is no reason to lose the training
                    logger.warning(f"no preview {path}: {_reason(error)}")
        if self.setup.device.type == "cuda":
            torch.cuda.empty_cache()  # other shapes than a training step's

    def _list_missing(self, step: int) -> dict[int, Path]:
        """Return the previews after this step that are not there, listed as the run's."""
        paths = {number: self.path(step, number) for number in range(len(self.plans))}
        missing = {number: path for number, path in paths.items() if not path.exists()}
        names = [str(path.relative_to(self.output)) for path in missing.values()]
        RunFiles.read(self.output).add(names, step)
        return missing

    def _made(self, number: int, progress: Any, asked: Asked) -> Any:
        def on_step(index: int, latents: torch.Tensor) -> None:
            progress.update()
            if asked():
                raise Stopped

        preview, pipeline = self.plans[number], self.pipeline
        assert pipeline is not None
        values = send_to_device(self.values[number], pipeline.device)
        sampling = replace(
            preview.sampling, seed=self.setup.config.seed, on_step=on_step
        )
        return pipeline.finish(preview.plan, values, sampling)


def open_previews(setup: Setup, samples: "TrainingData") -> Previews:
    """Plan the previews that are asked for and find their files, before anything is
    loaded.

    Raises UsageError for a variant that cannot be previewed, StateError for files or
    stored values that are missing.
    """
    plans: tuple[PreviewPlan | StoredPreview, ...]
    if isinstance(samples.source, CachedSamples):
        recorded = samples.cache_info.previews if samples.cache_info else ()
        plans = stored_previews(setup, samples.source.store, recorded)
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


def _crossing(
    pipeline: Pipeline, preview: PreviewPlan | StoredPreview
) -> dict[str, Any]:
    """Return the cached values: what the cache had, or what cached steps compute of the
    inputs, as stage 1 would.
    """
    if isinstance(preview, StoredPreview):
        return dict(preview.values)
    table = {name: load_cell(cell) for name, cell in preview.cells.items()}
    pipeline.run(preview.plan.cached_steps, table)
    return {name: table[name] for name in preview.plan.cached_values}


def _reason(error: Exception) -> str:
    """Return what went wrong, in one line, with its kind."""
    if isinstance(error, DstrainError):
        return f"{error.where}: {error.what}"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
