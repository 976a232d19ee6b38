"""What a training run writes to its output folder, and when: weights, and the state to
resume from.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dstrain.config.fields import split_commas
from dstrain.config.schema import ENDING_AT_LAST_STEP, options_affecting
from dstrain.config.serialize import CONFIG, write_resolved
from dstrain.console import get_logger, logging_to_file
from dstrain.distributed.world import ProcessGroup
from dstrain.errors import Diverged, Interrupted, StateError, UsageError
from dstrain.lora.export import save_lora_for
from dstrain.lora.header import base_weights
from dstrain.lora.layers import save_lora
from dstrain.models.components import Files
from dstrain.runs.checkpoints.directory import (
    LOG,
    LOSS_CSV,
    LOSS_JSONL,
    SET_ASIDE,
    SKIPPED_ROWS,
    put_back,
    refuse_run,
    refuse_unlisted,
    run_in,
    take_away,
)
from dstrain.runs.checkpoints.resume import (
    check_state_named,
    data_fingerprint,
    load_training_state,
    training_state,
)
from dstrain.runs.checkpoints.state import (
    FILES,
    RECORD,
    STATES,
    damage,
    load_state,
    newest_state,
    prune_states,
    save_full,
    save_state,
    state_folder,
    states,
)
from dstrain.runs.setup import Setup
from dstrain.runs.skipped_rows import write_list
from dstrain.storage.files import lock, remove_leftovers
from dstrain.storage.hashing import hash_json
from dstrain.storage.run_files import RunFiles

if TYPE_CHECKING:
    from dstrain.runs.job import TrainingRun

logger = get_logger(__name__)


def made_by(
    setup: Setup, files: Files, content: Mapping[str, Any], steps: int
) -> dict[str, Any]:
    """Describe the run in the header of a LoRA file: its base, configuration and
    recipe.
    """
    recipe = options_affecting("recipe", "training")
    told = {name: getattr(setup.config, name) for name in recipe}
    preset = {"preset_lora": setup.preset.digest} if setup.preset is not None else {}
    return {
        "base": base_weights(files),
        "config": dict(content),
        "recipe": {**told, "steps": steps, **preset},
    }


KEPT_STATES = 2


@dataclass
class RunDirectory:
    """The output folder of one run; only the main process writes."""

    setup: Setup
    processes: ProcessGroup
    folder: Path = field(init=False)
    weights: list[Path] = field(default_factory=list)
    """The weights files saved last."""
    data_digests: Mapping[str, str] = field(default_factory=dict)
    begun: bool = False
    """Whether the run has changed anything in the folder."""
    verified: frozenset[Path] = frozenset()
    """States that are known to be whole."""
    _open_log: Callable[[Path], None] = field(init=False)

    def __post_init__(self) -> None:
        if self.setup.config.output_path is None:
            what = "is required: the directory for checkpoints and logs"
            raise UsageError("--output_path", what)
        self.folder = Path(self.setup.config.output_path)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Create the folder, hold its lock, and refuse one that cannot be written.

        A KeyboardInterrupt within becomes Interrupted, which says how to resume.
        """
        with ExitStack() as stack:
            if self.processes.is_main:
                stack.enter_context(lock(self.folder))
                self._open_log = stack.enter_context(logging_to_file())
                put_back(self.folder)
                remove_leftovers(self.folder)
            try:
                yield
            except KeyboardInterrupt as error:
                raise self._interrupted("interrupted") from error

    def check_available(self) -> None:
        """Refuse, before any work, a folder that this run cannot use.

        Raises StateError for files in the way that no run wrote, for a run that is
        neither to be resumed nor overwritten, and for nothing to resume from.
        """
        config = self.setup.config
        if self.processes.is_main:
            if (self.folder / SET_ASIDE).exists():
                with lock(self.folder):
                    put_back(self.folder)
            refuse_unlisted(self.folder)
        if config.resume is None:
            if not config.overwrite:
                refuse_run(self.folder)
        elif config.resume != "auto":
            check_state_named(Path(config.resume))
        elif not states(self.folder):
            advice = "leave out --resume to begin"
            if run_in(self.folder):
                advice = (
                    "the run there ended before its first save: start over with "
                    "--overwrite instead of --resume"
                )
            what = "holds no checkpoint to resume from"
            raise StateError(str(self.folder), what, advice)

    def load_state(self, run: "TrainingRun") -> None:
        """Load the state to resume from, if --resume asks for one."""
        self.data_digests = data_fingerprint(run)
        if self.setup.config.resume is not None:
            self._resume(run, self.setup.config.resume)

    def start(self) -> None:
        """Remove the run to overwrite, and write the first records."""
        self.processes.wait()
        if not self.processes.is_main:
            self.begun = True
            return
        if self.setup.config.overwrite:
            take_away(self.folder)
        self.begun = True
        self._write_records()

    def _resume(self, run: "TrainingRun", state: str) -> None:
        path = newest_state(self.folder) if state == "auto" else Path(state)
        saved = load_state(path)
        self._refuse_other_states(path)
        load_training_state(run, saved, self.fingerprint(run), self.data_digests)
        self.verified = frozenset(
            one for one in states(self.folder) if one.samefile(path)
        )
        logger.info(f"resumed at step {run.step} from {path}")

    def _write_records(self) -> None:
        """Write what is there from the first step on: the configuration and the logs."""
        for folder in (self.folder, self.folder / STATES, self.folder / "logs"):
            remove_leftovers(folder)
        self._prune()
        records = [CONFIG, LOG, LOSS_CSV, LOSS_JSONL]
        if self.setup.stage != "train" and self.setup.dataset.skipped:
            records.append(SKIPPED_ROWS)
        RunFiles.read(self.folder).add(records)
        for name in records:
            (self.folder / name).parent.mkdir(exist_ok=True)
        write_list(self.setup)
        config, versions = self.setup.config, self.setup.versions
        write_resolved(self.folder / CONFIG, config, versions)
        self._open_log(self.folder / LOG)

    def _refuse_other_states(self, path: Path) -> None:
        """Refuse to resume from a state while the folder holds newer ones.

        They would later be taken for states of this run.
        """
        kept = [state.resolve() for state in states(self.folder)]
        newer = kept[: kept.index(path.resolve())] if path.resolve() in kept else kept
        if newer and self.setup.config.resume != "auto":
            raise StateError(
                str(self.folder),
                f"holds {newer[0].name}, which does not come from {path}",
                "move it away, or give another --output_path",
            )

    def fingerprint(self, run: "TrainingRun") -> str:
        """Return a digest of all that decides the numbers of a run.

        The split into stages, the number of processes and the place of files are not in
        it.
        """
        config = asdict(self.setup.config)
        trainables = asdict(self.setup.trainables)
        order = [run.order.groups, run.order.samples_per_step]
        curve = (
            run.total_steps
            if self.setup.config.lr_scheduler in ENDING_AT_LAST_STEP
            else None
        )
        settings = {
            name: setting.value for name, setting in self.setup.spec.settings.items()
        }
        entries = [
            [model.component, dict(model.entries)]
            for model in self.setup.models
            if model.entries
        ]
        read = [
            self.setup.spec.variant,
            *(
                sorted(split_commas(config[n]))
                for n in ("extra_inputs", "data_file_keys")
            ),
        ]
        numbers: list[Any] = [
            self.setup.mixed_precision,
            curve,
            settings,
            entries,
            read,
            {name: config[name] for name in options_affecting("training")},
        ]
        preset = self.setup.preset
        numbers += [[preset.component, preset.digest]] if preset is not None else []
        return hash_json("run", [self.setup.task.name, trainables, order, numbers])

    def with_last_checkpoint(
        self, steps: Iterator[dict[str, float]]
    ) -> Iterator[dict[str, float]]:
        """Pass steps on; when one raises Diverged, name the last good checkpoint in it."""
        try:
            yield from steps
        except Diverged as error:
            good = next(
                (state for state in states(self.folder) if not damage(state)), "none"
            )
            raise Diverged(
                error.where,
                error.what,
                f"last good checkpoint: {good}",
                *error.help_lines,
            ) from error

    def save_if_due(self, run: "TrainingRun", epoch: int) -> bool:
        """Save at every --save_steps, else after each epoch, and always at the last
        step; return whether it did.
        """
        every = self.setup.config.save_steps
        ends_epoch = run.step % run.order.steps_per_epoch == 0
        if every is None and ends_epoch:
            self.save(run, f"epoch-{epoch}")
            return True
        if run.step == run.total_steps or (every is not None and run.step % every == 0):
            self.save(run, f"step-{run.step}")
            return True
        return False

    def stop(self, run: "TrainingRun", saved: bool) -> NoReturn:
        """Save unless that was just done, and raise Interrupted."""
        if not saved:
            self.save(run, f"step-{run.step}")
        raise self._interrupted(
            f"interrupted after step {run.step} of {run.total_steps}, where it was saved"
        )

    def _interrupted(self, what: str) -> Interrupted:
        """Return the error of an interrupted run, with the way to resume it."""
        config, saved = self.setup.config, states(self.folder)
        again = "run the same command again"
        if not self.begun:
            return Interrupted(
                str(self.folder),
                f"{what} before the first step; nothing there was changed",
                again,
            )
        if not saved:
            advice = (
                again
                if config.overwrite or not run_in(self.folder)
                else f"{again} with --overwrite"
            )
            return Interrupted(
                str(self.folder), f"{what} before the first save", advice
            )
        instead = [
            f"--{name}"
            for name in ("overwrite", "resume_from_checkpoint")
            if getattr(config, name)
        ]
        swap = f" instead of {instead[0]}" if instead else ""
        named = "" if "saved" in what else f"; the newest checkpoint is {saved[0].name}"
        return Interrupted(
            str(self.folder),
            f"{what}{named}",
            f"run the same command with --resume{swap}",
        )

    def save(self, run: "TrainingRun", name: str) -> None:
        """Save weights and a state to resume from, then remove older ones.

        There is one weights file for each trained component.
        """
        if self.processes.is_main:
            components = run.module.trained.components
            paths = []
            for component in components:
                part = f".{component}" if len(components) > 1 else ""
                paths.append(self.folder / f"{name}{part}.safetensors")
            state = state_folder(self.folder, run.step)
            state_files = [state / file for file in (RECORD, *FILES)]
            RunFiles.read(self.folder).add(
                [str(path.relative_to(self.folder)) for path in (*paths, *state_files)],
                run.step,
            )
            for component, path in zip(components, paths, strict=True):
                self._save_component(run, path, component)
            self.weights = paths
            fingerprint = self.fingerprint(run)
            save_state(state, training_state(run, fingerprint, self.data_digests))
            self.verified |= {state}
            self._prune()
        self.processes.wait()

    def _prune(self) -> None:
        """Remove states beyond --keep_checkpoints, or beyond two.

        Weights are removed only if that flag is given.
        """
        keep = self.setup.config.keep_checkpoints
        self.verified = prune_states(self.folder, keep or KEPT_STATES, self.verified)
        files = RunFiles.read(self.folder)
        files.forget_missing()
        if keep:
            files.prune_weights(keep)

    def _save_component(self, run: "TrainingRun", path: Path, component: str) -> None:
        trained = run.module.trained
        network = run.module.pipeline.components[component]
        experts = self.setup.spec.experts
        part = experts.ranges.get(component) if experts is not None else None
        about = {
            "family": self.setup.spec.family,
            "variant": self.setup.spec.variant,
            "component": component,
            **(
                {"timesteps": f"{part[0]:g} to {part[1]:g}"} if part is not None else {}
            ),
            "step": str(run.step),
            "task": self.setup.task.name,
            **{
                f"version.{library}": version
                for library, version in self.setup.versions.items()
            },
        }
        if component in trained.lora:
            prefix = self.setup.family.lora_prefixes.get(component, component)
            made = made_by(
                self.setup,
                run.found.files[component],
                run.found.configs[component],
                run.step,
            )
            lora_config, family = trained.lora[component], self.setup.family
            option = (
                self.setup.saving if component == family.default_trainable else None
            )
            if option is not None:
                save_lora_for(
                    option.saves, path, network, lora_config, family, about | made
                )
            else:
                save_lora(path, network, lora_config, prefix, about | made)
        else:
            save_full(path, network, dict(run.found.configs[component]), about)
