"""What a training run writes: weights, the state to resume from, and loss.csv."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dstrain.checkpoint import (
    load_state,
    newest_state,
    prune_states,
    save_full,
    save_state,
    state_folder,
    states,
)
from dstrain.errors import Diverged, Interrupted, StateError, UsageError
from dstrain.files import lock, remove_leftovers, write_json
from dstrain.flags import split_commas
from dstrain.keys import hashed
from dstrain.lora import save_lora
from dstrain.resume import DECISIVE, ENDING_AT_LAST_STEP, restore, state_of
from dstrain.setup import Setup, versions
from dstrain.summary import announce, conclude
from dstrain.world import World

if TYPE_CHECKING:
    from dstrain.train import Job

KEPT_STATES = 2


@dataclass
class Outputs:
    """The output folder of one run; only the main process writes."""

    setup: Setup
    world: World
    folder: Path = field(init=False)
    weights: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.setup.config.output_path is None:
            raise UsageError("--output_path", "is required: where the trained weights are written")
        self.folder = Path(self.setup.config.output_path)
        self._check_prefix()

    def _check_prefix(self) -> None:
        """--remove_prefix_in_ckpt names a trained component; saved names carry no such prefix to begin with."""
        prefix, trained = self.setup.config.remove_prefix_in_ckpt, self.setup.trainables.components
        expert = self.setup.wiring.expert
        played = [expert.role] if expert and set(expert.components) & set(trained) else []
        known = [f"pipe.{component}." for component in dict.fromkeys([*trained, *played])]
        if prefix is not None and prefix not in known:
            raise UsageError(
                "--remove_prefix_in_ckpt", f"no saved name begins with {prefix!r}; want {' or '.join(known)}"
            )

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Make the folder, hold its lock, and refuse one that holds a run which is not to be resumed."""
        if self.setup.config.resume is None and states(self.folder):
            advice = "go on with --resume, or give another --output_path"
            raise StateError(str(self.folder), "holds a run already", advice)
        with lock(self.folder) if self.world.is_main else nullcontext():
            if self.world.is_main:
                remove_leftovers(self.folder)
            yield

    def begin(self, job: "Job") -> None:
        """Take up the state to resume from, if asked; say what will happen."""
        config = self.setup.config
        if config.resume is not None:
            path = newest_state(self.folder) if config.resume == "auto" else Path(config.resume)
            state = load_state(path)
            self._refuse_other_states(path)
            restore(job, state, self.fingerprint(job))
            self.world.say(f"resumed at step {job.step} from {path}")
        announce(job, self.folder)
        self.world.wait()
        if self.world.is_main:
            prune_states(self.folder, KEPT_STATES)
            plain = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
            write_json(self.folder / "config.json", plain)

    def _refuse_other_states(self, path: Path) -> None:
        """Refuse to go on from a state while the folder holds others that would later be taken for newer ones."""
        kept = [state.resolve() for state in states(self.folder)]
        newer = kept[: kept.index(path.resolve())] if path.resolve() in kept else kept
        if newer and self.setup.config.resume != "auto":
            raise StateError(str(self.folder), f"holds {newer[0].name}, which does not come from {path}",
                             "move it away, or give another --output_path")  # fmt: skip

    def fingerprint(self, job: "Job") -> str:
        """A digest of all that decides the numbers of a run; the split, the world and where files lie are not in it."""
        config = asdict(self.setup.config)
        trainables = asdict(self.setup.trainables)
        order = [job.order.groups, job.order.size]
        curve = job.steps if self.setup.config.lr_scheduler in ENDING_AT_LAST_STEP else None
        settings = {name: setting.value for name, setting in self.setup.wiring.settings.items()}
        entries = [[model.component, dict(model.entries)] for model in self.setup.models if model.entries]
        read = [
            self.setup.wiring.variant,
            *(sorted(split_commas(config[n])) for n in ("extra_inputs", "data_file_keys")),
        ]
        numbers = [
            self.setup.mixed_precision,
            curve,
            settings,
            entries,
            read,
            {name: config[name] for name in DECISIVE},
        ]
        return hashed("run", [self.setup.task.name, trainables, order, numbers])

    def watched(self, steps: Iterator[dict[str, float]]) -> Iterator[dict[str, float]]:
        """Pass steps on; when one raises Diverged, name the last good checkpoint in it."""
        try:
            yield from steps
        except Diverged as error:
            good = next(iter(states(self.folder)), "none")
            raise Diverged(error.where, error.what, f"last good checkpoint: {good}") from error

    def save_if_due(self, job: "Job", epoch: int) -> bool:
        """Save at every --save_steps, else after each epoch, and always at the last step; return whether it did."""
        every = self.setup.config.save_steps
        ends_epoch = job.step % job.order.steps == 0
        if every is None and ends_epoch:
            self.save(job, f"epoch-{epoch}")
            return True
        if job.step == job.steps or (every is not None and job.step % every == 0):
            self.save(job, f"step-{job.step}")
            return True
        return False

    def stop(self, job: "Job", saved: bool) -> NoReturn:
        """Save unless that was just done, and raise Interrupted."""
        if not saved:
            self.save(job, f"step-{job.step}")
        raise Interrupted(str(self.folder), f"interrupted after step {job.step} of {job.steps}, where it was saved",
                          "run the same command with --resume")  # fmt: skip

    def save(self, job: "Job", name: str) -> None:
        """Write one weights file per trained component, then the state to resume from."""
        if self.world.is_main:
            self.weights = [self._save_component(job, name, component) for component in job.module.trained.components]
            save_state(state_folder(self.folder, job.step), state_of(job, self.fingerprint(job)))
            prune_states(self.folder, KEPT_STATES)
        self.world.wait()

    def _save_component(self, job: "Job", name: str, component: str) -> Path:
        trained = job.module.trained
        suffix = f".{component}" if len(trained.components) > 1 else ""
        path = self.folder / f"{name}{suffix}.safetensors"
        network = job.module.pipeline.components[component]
        about = {
            "family": self.setup.wiring.family,
            "variant": self.setup.wiring.variant,
            "component": component,
            "step": str(job.step),
            "task": self.setup.task.name,
            **{f"version.{library}": version for library, version in versions(self.setup.device).items()},
        }
        if component in trained.lora:
            prefix = self.setup.record.lora_prefixes.get(component, component)
            save_lora(path, network, trained.lora[component], prefix, about)
        else:
            save_full(path, network, dict(job.found.contents[component]), about)
        return path

    def end(self, job: "Job") -> None:
        """Say where the weights are and how to try them."""
        conclude(job, self.folder, self.weights)
