"""The bytes that a training run writes and downloads."""

from dataclasses import dataclass

from dstrain.plugin import PlannedRun


@dataclass(frozen=True)
class Disk:
    """What a run leaves in its output folder, at the most."""

    weights: int
    """Bytes of one save of weights."""
    state: int
    """Bytes of one training state."""
    saves: int | None
    """How many saves of weights are there in the end; None where the number of steps is
    not known."""
    states: int
    """How many states are there while one is written."""
    downloads: int = 0
    """Bytes of model files that are not here yet."""

    @property
    def most(self) -> int | None:
        """Return the bytes at the most; None if that is not known."""
        if self.saves is None:
            return None
        written = self.saves * self.weights + self.states * self.state
        return written + self.downloads


def disk_of(run: PlannedRun, weights: int, state: int, downloads: int = 0) -> Disk:
    """Return what a run writes and downloads.

    Args:
        run: The run.
        weights: Bytes of one save of weights, that of their average included.
        state: Bytes of one training state.
        downloads: Bytes of model files that are not here yet.
    """
    kept = run.config.keep_checkpoints
    steps = run.steps
    every = run.config.save_steps or run.steps_per_epoch
    saves = None
    if kept is not None:
        # One more while an old one is not removed yet.
        saves = kept + 1
    if steps is not None and every:
        made = -(-steps // every)
        saves = made if saves is None else min(saves, made)
    states = run.kept_states + 1
    if steps is not None and every:
        states = min(states, -(-steps // every))
    return Disk(weights, state, saves, states, downloads)
