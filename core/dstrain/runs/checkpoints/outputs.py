"""What a training run writes to its output folder, and when: weights, and the state to
resume from.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dstrain.config.fields import split_commas
from dstrain.config.schema import ENDING_AT_LAST_STEP, options_affecting
from dstrain.config.serialize import write_resolved
from dstrain.console import get_logger
from dstrain.distributed.world import ProcessGroup
from dstrain.errors import Diverged, Interrupted, StateError, UsageError
from dstrain.lora.export import save_lora_for
from dstrain.lora.header import base_weights
from dstrain.lora.layers import save_lora
from dstrain.models.components import Files
from dstrain.runs.checkpoints.directory import (
    CONFIG,
    WeightsFiles,
    put_back,
    refuse_occupied,
    refuse_strangers,
    take_away,
    traces,
)
from dstrain.runs.checkpoints.resume import (
    check_state_named,
    content_of,
    restore,
    state_of,
)
from dstrain.runs.checkpoints.state import (
    damage,
    load_state,
    newest_state,
    prune_states,
    save_full,
    save_state,
    state_folder,
    states,
)
from dstrain.runs.reports.summary import announce, conclude
from dstrain.runs.setup import Setup
from dstrain.runs.skipped_rows import write_list
from dstrain.storage.files import lock, probe, remove_leftovers
from dstrain.storage.hashing import hash_json

if TYPE_CHECKING:
    from dstrain.runs.job import TrainingRun

logger = get_logger(__name__)


def made_by(
    setup: Setup, files: Files, content: Mapping[str, Any], steps: int
) -> dict[str, Any]:
    """What a run says in its LoRA's header: `base` (see `base_of`), its configuration,
    and the flags that decide.
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
class Outputs:
    """The output folder of one run; only the main process writes."""

    setup: Setup
    processes: ProcessGroup
    folder: Path = field(init=False)
    weights: list[Path] = field(default_factory=list)
    content: Mapping[str, str] = field(default_factory=dict)
    begun: bool = False
    whole: frozenset[Path] = frozenset()

    def __post_init__(self) -> None:
        if self.setup.config.output_path is None:
            raise UsageError(
                "--output_path", "is required: the directory for checkpoints and logs"
            )
        self.folder = Path(self.setup.config.output_path)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Make the folder, hold its lock, and refuse one that cannot be written.

        A KeyboardInterrupt within becomes Interrupted, which says how to go on.
        """
        with lock(self.folder) if self.processes.is_main else nullcontext():
            if self.processes.is_main:
                put_back(self.folder)
                remove_leftovers(self.folder)
                probe(self.folder)
            try:
                yield
            except KeyboardInterrupt as error:
                raise self._interrupted("interrupted") from error

    def refuse_unfit(self) -> None:
        """Refuse, before any work, a folder with files of the user's in the way, with a
        run that is neither to go on nor to be removed, or with nothing to go on
        from; raises StateError.
        """
        config = self.setup.config
        if self.processes.is_main:
            refuse_strangers(self.folder, config.overwrite)
        if config.resume is None:
            if not config.overwrite:
                refuse_occupied(self.folder)
        elif config.resume != "auto":
            check_state_named(Path(config.resume))
        elif not any(path.is_dir() for path in traces(self.folder)):
            ended = (
                "the run there ended before its first save: "
                if traces(self.folder)
                else ""
            )
            advice = (
                "begin anew with --overwrite in the place of --resume"
                if ended
                else "leave out --resume to begin"
            )
            raise StateError(
                str(self.folder),
                "holds no checkpoint to resume from",
                f"{ended}{advice}",
            )

    def begin(self, run: "TrainingRun") -> None:
        """Take up the state to resume from, or remove the run to overwrite, if asked;
        say what will happen.
        """
        config = self.setup.config
        self.content = content_of(run)
        if config.resume is not None:
            path = (
                newest_state(self.folder)
                if config.resume == "auto"
                else Path(config.resume)
            )
            state = load_state(path)
            self._refuse_other_states(path)
            restore(run, state, self.fingerprint(run), self.content)
            self.whole = frozenset(
                one for one in states(self.folder) if one.samefile(path)
            )
            logger.info(f"resumed at step {run.step} from {path}")
        announce(run, self.folder)
        self.processes.wait()
        if self.processes.is_main and config.overwrite:
            take_away(self.folder)
        self.begun = True
        if self.processes.is_main:
            remove_leftovers(self.folder)
            self._prune()
            write_list(self.setup)
            write_resolved(self.folder / CONFIG, config, self.setup.versions)

    def _refuse_other_states(self, path: Path) -> None:
        """Refuse to go on from a state while the folder holds others that would later
        be taken for newer ones.
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
        """A digest of all that decides the numbers of a run; the split, the world and
        where files lie are not in it.
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

    def watched(self, steps: Iterator[dict[str, float]]) -> Iterator[dict[str, float]]:
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
        """What a run says that was interrupted: how it goes on depends on whether it
        has begun, and on a save.
        """
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
                if config.overwrite or not traces(self.folder)
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
        swap = f", in the place of {instead[0]}" if instead else ""
        named = "" if "saved" in what else f"; the newest checkpoint is {saved[0].name}"
        return Interrupted(
            str(self.folder),
            f"{what}{named}",
            f"run the same command with --resume{swap}",
        )

    def save(self, run: "TrainingRun", name: str) -> None:
        """Write one weights file per trained component, then the state to resume from;
        then remove what is too old.
        """
        if self.processes.is_main:
            components = run.module.trained.components
            paths = [
                self.folder / f"{name}{f'.{part}' * (len(components) > 1)}.safetensors"
                for part in components
            ]
            WeightsFiles.of(self.folder).add([path.name for path in paths], run.step)
            for component, path in zip(components, paths, strict=True):
                self._save_component(run, path, component)
            self.weights = paths
            state = state_folder(self.folder, run.step)
            save_state(
                state,
                state_of(run, self.fingerprint(run), self.content),
            )
            self.whole |= {state}
            self._prune()
        self.processes.wait()

    def _prune(self) -> None:
        """Remove states beyond --keep_checkpoints, or beyond two; weights files only if
        that flag is given.
        """
        keep = self.setup.config.keep_checkpoints
        self.whole = prune_states(self.folder, keep or KEPT_STATES, self.whole)
        if keep:
            WeightsFiles.of(self.folder).prune(keep)

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

    def end(self, run: "TrainingRun") -> None:
        """Say where the weights are and how to try them."""
        conclude(run, self.folder, self.weights)
