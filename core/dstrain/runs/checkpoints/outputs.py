"""Write what a training run leaves in its output folder, when it is due: weights, and
the state to resume from.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

from dstrain.config import CONFIG, write_resolved
from dstrain.console import get_logger, logging_to_file
from dstrain.distributed import ProcessGroup, is_interrupt
from dstrain.errors import Interrupted, StateError, SystemFault, UsageError
from dstrain.lora import lora_state
from dstrain.runs.checkpoints.component_weights import (
    key_format,
    published,
    save_component,
)
from dstrain.runs.checkpoints.directory import (
    FILES,
    LOG,
    LOSS_CSV,
    LOSS_JSONL,
    RECORD,
    SET_ASIDE,
    SKIPPED_ROWS,
    STATE_FILES,
    STATES,
    STATUS,
    VALIDATION_CSV,
    VALIDATION_JSONL,
    check_start,
    check_way,
    remove_set_aside,
    set_run_aside,
    states,
)
from dstrain.runs.checkpoints.resume import (
    load_training_state,
    read_state,
    training_state,
)
from dstrain.runs.checkpoints.run_identity import (
    MODIFIERS,
    PROCESSES,
    data_fingerprint,
    modifiers_in_words,
)
from dstrain.runs.checkpoints.saved_states import newest_state, prune_states
from dstrain.runs.checkpoints.state import save_state, take_part_in_saving
from dstrain.runs.loop import Saver
from dstrain.runs.setup import Setup
from dstrain.runs.skipped_rows import write_list
from dstrain.runs.training_run import TrainingRun
from dstrain.storage import RunFiles, lock, remove_leftovers, take_part
from dstrain.storage.run_files import AVERAGED, averaged_name
from dstrain.training import in_eval_mode

logger = get_logger(__name__)

KEPT_STATES = 2


def save_is_due(run: TrainingRun) -> bool:
    """Return whether a run saves after the step that it is at."""
    every = run.setup.config.save_steps or run.order.steps_per_epoch
    return run.step == run.total_steps or run.step % every == 0


@dataclass
class RunDirectory(Saver):
    """The output folder of one run; only the main process writes."""

    setup: Setup
    processes: ProcessGroup
    folder: Path = field(init=False)
    weights: list[Path] = field(default_factory=list)
    """The weights files saved last."""
    data_digests: Mapping[str, str] = field(default_factory=dict)
    has_written: bool = False
    """Whether the run has changed anything in the folder."""
    starts_over: bool = False
    """Whether --resume found a run that ended before it saved anything, or none."""
    _open_log: Callable[[Path], None] = field(init=False)

    def __post_init__(self) -> None:
        if self.setup.config.output_path is None:
            what = "is required: the folder for checkpoints and logs"
            raise UsageError("--output_path", what)
        self.folder = self.setup.config.output_path

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Create the folder, hold its lock, and refuse one that cannot be written.

        A signal to stop within becomes Interrupted, which says how to resume.
        """
        with ExitStack() as stack:
            if self.processes.is_main:
                stack.enter_context(lock(self.folder))
                self._open_log = stack.enter_context(logging_to_file())
                remove_leftovers(self.folder)
            try:
                yield
            except BaseException as error:
                if isinstance(error, SystemFault) and self.has_written:
                    error.help_lines += (f"once that is mended, {self._again()}",)
                if not is_interrupt(error):
                    raise
                raise self._interrupted("interrupted") from error

    def check_available(self) -> None:
        """Refuse, before any work, a folder that this run cannot use.

        Raises StateError for files in the way that no run wrote, for a run that is
        neither to be resumed nor overwritten, and for nothing to resume from.
        """
        if self.processes.is_main:
            check_way(self.folder)
        # The others look at what the main process has mended.
        self.processes.wait()
        check_start(self.setup.config, self.folder)

    def load_state(self, run: TrainingRun) -> None:
        """Load the state to resume from, if --resume asks for one."""
        self.data_digests = data_fingerprint(run)
        resume = self.setup.config.resume
        if resume is None:
            return
        if resume == "auto" and not states(self.folder):
            logger.info(f"{self.folder} contains no checkpoint: starting a new run")
            self.starts_over = True
            return
        path = newest_state(self.folder) if resume == "auto" else Path(resume)
        saved = read_state(run, path)
        newer = [*takewhile(lambda one: not one.samefile(path), states(self.folder))]
        if resume != "auto" and newer:
            # They would later be taken for states of this run.
            what = f"contains {newer[0].name}, which does not come from {path}"
            advice = "move it away, or give another --output_path"
            raise StateError(self.folder, what, advice)
        load_training_state(run, saved, self.data_digests)
        logger.info(f"resumed at step {run.step} from {path}")

    def start(self, run: TrainingRun) -> None:
        """Set the run to overwrite aside, and write what is there from the first step on:
        the configuration and the logs.
        """
        setup = self.setup
        self.processes.wait()
        if self.processes.is_main and (setup.config.overwrite or self.starts_over):
            set_run_aside(self.folder)
        self.has_written = True
        if not self.processes.is_main:
            return
        for name in ("", STATES, "logs", SET_ASIDE):
            remove_leftovers(self.folder / name)
        self._prune(run)
        records = [CONFIG, LOG, LOSS_CSV, LOSS_JSONL, STATUS]
        if run.validation:
            records += [VALIDATION_CSV, VALIDATION_JSONL]
        reads = setup.datasets if setup.stage != "train" else ()
        if any(one.dataset.skipped for one in reads):
            records.append(SKIPPED_ROWS)
        RunFiles.read(self.folder).add(records)
        (self.folder / LOG).parent.mkdir(exist_ok=True)
        write_list(setup)
        versions = {**setup.versions, PROCESSES: str(self.processes.size)}
        if setup.modifiers:
            versions[MODIFIERS] = modifiers_in_words(setup)
        write_resolved(self.folder / CONFIG, setup.recorded, versions)
        self._open_log(self.folder / LOG)

    def save_if_due(self, run: TrainingRun, epoch: int) -> bool:
        """Save at every --save_steps, else after each epoch, and always at the last
        step; return whether it did.
        """
        if not save_is_due(run):
            return False
        self.save(run, self._name(run, epoch))
        return True

    def save_if_missing(self, run: TrainingRun) -> None:
        """Write the weights of a run that has nothing left to do, from the state that was
        loaded, if they are gone.
        """
        listed = RunFiles.read(self.folder).weights().items()
        saved = [name for name, step in listed if step == run.step]
        names = [name for name in saved if not name.endswith(AVERAGED)]
        count = len(run.module.trained.components)
        # Those written last: others of this step are of a run that was killed.
        self.weights = [self.folder / name for name in names[-count:]]
        is_missing = len(names) < count
        if run.processes.any(self.processes.is_main and is_missing):
            self.save(run, self._name(run, (run.step - 1) // run.order.steps_per_epoch))
            logger.info(f"the weights of step {run.step} were gone: written again")

    def _name(self, run: TrainingRun, epoch: int) -> str:
        """Return how the files of weights are named after a step of this epoch."""
        ends_epoch = run.step % run.order.steps_per_epoch == 0
        by_epoch = self.setup.config.save_steps is None and ends_epoch
        return f"epoch-{epoch}" if by_epoch else f"step-{run.step}"

    def stop(self, run: TrainingRun) -> NoReturn:
        """Raise Interrupted, for a run that was saved."""
        place = f"step {run.step} of {run.total_steps}"
        raise self._interrupted(f"interrupted after {place}, where it was saved")

    def _interrupted(self, what: str) -> Interrupted:
        """Return the error of an interrupted run, with the way to resume it."""
        if not states(self.folder):
            what += " before the first save"
        return Interrupted(self.folder, what, self._again())

    def _again(self) -> str:
        """Say how to run again what ended early: --resume starts over what saved nothing."""
        config = self.setup.config
        if not self.has_written:
            return "run the same command again"
        if config.resume_from_checkpoint and not states(self.folder):
            return "run the same command again with another --output_path"
        # These exclude --resume.
        others = ("overwrite", "resume_from_checkpoint")
        instead = [f" instead of --{one}" for one in others if getattr(config, one)]
        return f"run the same command with --resume{''.join(instead)}"

    def save(self, run: TrainingRun, name: str) -> None:
        """Save weights and a state to resume from, then remove older ones.

        There is one weights file for each trained component.
        """
        if self.processes.is_main:
            components = run.module.trained.components
            names = [f"{name}.safetensors"]
            if len(components) > 1:
                names = [f"{name}.{component}.safetensors" for component in components]
            averages = [averaged_name(name) for name in names] if run.ema else []
            state = f"{STATES}/step-{run.step}"
            kept = STATE_FILES if run.ema else (RECORD, *FILES)
            state_files = [f"{state}/{file}" for file in kept]
            RunFiles.read(self.folder).add([*names, *averages, *state_files], run.step)
            self.weights = [self.folder / name for name in names]
            with in_eval_mode(run.optimizer):
                for component, path in zip(components, self.weights, strict=True):
                    save_component(run, path, component)
            if averages:
                decay = {"ema_decay": run.ema.facts["decay"]}
                with run.ema.applied():
                    for component, average in zip(components, averages, strict=True):
                        path = self.folder / average
                        save_component(run, path, component, decay)
            save_state(self.folder / state, training_state(run, self.data_digests))
            RunFiles.read(self.folder).commit()
            remove_set_aside(self.folder)
            self._prune(run)
        elif run.is_sharded:
            self._take_part_in_save(run)
        self.processes.wait()

    def _take_part_in_save(self, run: TrainingRun) -> None:
        """Give this process's rows to the main process, in the order in which that writes
        weights, averages and the state.
        """
        saved = [in_eval_mode(run.optimizer)]
        if run.ema:
            saved.append(run.ema.applied())
        for weights in saved:
            with weights:
                for component in run.module.trained.components:
                    network = run.module.pipeline.components[component]
                    if component in run.module.trained.lora:
                        lora_state(network)
                    else:
                        take_part(published(network, key_format(run, component)))
        take_part_in_saving(training_state(run, self.data_digests))

    def _prune(self, run: TrainingRun) -> None:
        """Remove states beyond --keep_checkpoints, or beyond two.

        Weights are removed only if that flag is given.
        """
        keep = self.setup.config.keep_checkpoints
        files = RunFiles.read(self.folder)
        prune_states(self.folder, keep or KEPT_STATES, run.step, files.steps)
        files.forget_missing()
        if keep:
            files.prune_weights(keep)
