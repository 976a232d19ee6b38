"""Train: make a run ready, with what watches it, and run its steps."""

from contextlib import nullcontext

from dstrain.cache.in_use import reading
from dstrain.distributed import ProcessGroup
from dstrain.graph import LongPrompt
from dstrain.randomness import SampleKey
from dstrain.runs.build import prepare
from dstrain.runs.checkpoints.outputs import RunDirectory
from dstrain.runs.checks.rows import log_warnings
from dstrain.runs.long_prompts import LongPromptLog
from dstrain.runs.loop import run_steps
from dstrain.runs.observers import Observers, plugin_observers
from dstrain.runs.prompt_images import Images, open_images
from dstrain.runs.reports.progress import Bar, RunStatistics, Status, Summary
from dstrain.runs.reports.step_log import StepLog
from dstrain.runs.reports.summary import log_end, log_start
from dstrain.runs.script.parts import NO_PARTS, Callbacks, OwnParts, RunResult
from dstrain.runs.setup import Setup
from dstrain.runs.skipped_rows import read_samples
from dstrain.runs.training_data import open_training_data
from dstrain.runs.training_run import TrainingRun
from dstrain.runs.validation_loss import VALIDATION, Validation
from dstrain.runs.watched_run import WatchedRun
from dstrain.storage import RunFiles
from dstrain.training import oom_as_error


def train(setup: Setup, processes: ProcessGroup, own: OwnParts = NO_PARTS) -> RunResult:
    """Train and save; every number that is logged is the mean over a whole optimizer
    step and all processes.
    """
    directory = RunDirectory(setup, processes)
    directory.check_available()
    if setup.stage != "train":
        read_samples(setup, processes)
    log_warnings(setup)
    reads_cache = setup.stage == "train"
    with (
        directory.opened(),
        reading(setup.cache_path) if reads_cache else nullcontext(),
    ):
        samples = open_training_data(setup)
        images = open_images(setup, samples)
        with oom_as_error("loading"):
            run = prepare(setup, processes, samples, own.module_class)
            images.load(run)
        directory.load_state(run)
        callbacks = Callbacks(own)
        # Plugins may refuse the run, before one that was there is removed.
        observers = observers_of(run, callbacks, images)
        log_start(run)
        logs = _note_long_prompts(run)
        directory.start(run)
        losses = run_steps(run, directory, observers)
        for log in logs:
            log.conclude()
        if not losses:
            directory.save_if_missing(run)
        log_end(run, directory.weights, len(losses))
        weights = RunFiles.read(directory.folder).newest_weights()
        return RunResult(
            directory.folder, tuple(weights), losses, run.step, callbacks.validation
        )


def observers_of(
    run: TrainingRun, callbacks: Callbacks | None = None, images: Images | None = None
) -> Observers:
    """Return the observers of a run: core's own in the order in which they are called,
    then those of plugins.
    """
    setup = run.setup
    watched = WatchedRun(
        folder=setup.output,
        config=setup.config,
        total_steps=run.total_steps,
        steps_per_epoch=run.order.steps_per_epoch,
        is_main=run.processes.is_main,
        module=run.module,
        images=images,
        wait=run.processes.wait,
        weights_to_use=run.weights_to_use,
        step=run.step,
    )
    statistics = RunStatistics()
    return Observers(
        watched,
        run.processes,
        [
            Bar(statistics),
            StepLog(setup.output),
            Status(setup.stage, setup.output),
            callbacks or Callbacks(NO_PARTS),
            Summary(statistics),
            Validation(run),
        ],
        plugin_observers(setup.extensions, watched),
        run.observer_states,
    )


def _note_long_prompts(run: TrainingRun) -> list[LongPromptLog]:
    """Note the long prompts of a run; return the logs, one for each dataset."""
    mode = run.setup.config.on_long_prompt
    datasets = {id(one): one for one in (run.data, run.validation.data)}
    logs = [
        LongPromptLog(mode, data.name_row, warns_at_once=True)
        for data in datasets.values()
    ]

    def note(key: SampleKey, found: LongPrompt) -> None:
        log = logs[-1] if key.epoch == VALIDATION else logs[0]
        log.note(key.row, found)

    run.module.on_long_prompt = note
    return logs
