"""The options of trackers, to which a run's numbers and previews are sent."""

from dstrain.config.conversion import options
from dstrain.config.fields import option, split_commas

TRACKERS = ("tensorboard", "wandb", "swanlab")


@options
class TrackerOptions:
    """Where a run's numbers and previews are sent, beside its output folder."""

    report_to: str | None = option(
        "output: trackers",
        "Trackers to log to, comma-separated: tensorboard, wandb, swanlab.",
        common=True,
    )
    enable_tensorboard_log: bool = option(
        "output: trackers",
        "Log to TensorBoard, as --report_to tensorboard does.",
        False,
    )
    enable_wandb_log: bool = option(
        "output: trackers",
        "Log to Weights & Biases, as --report_to wandb does.",
        False,
    )
    wandb_project: str | None = option(
        "output: trackers",
        "Project in Weights & Biases. Defaults to dstrain.",
    )
    enable_swanlab_log: bool = option(
        "output: trackers",
        "Log to SwanLab, as --report_to swanlab does.",
        False,
    )
    swanlab_project: str | None = option(
        "output: trackers",
        "Project in SwanLab. Defaults to dstrain.",
    )
    enable_csv_log: bool = option(
        "output: trackers",
        "Accepted, as the numbers of every step are always written to logs/loss.csv.",
        False,
    )

    @property
    def trackers(self) -> tuple[str, ...]:
        """Return the names of the trackers that are asked for, each once."""
        asked = {
            "tensorboard": self.enable_tensorboard_log,
            "wandb": self.enable_wandb_log,
            "swanlab": self.enable_swanlab_log,
        }
        switched_on = [name for name, is_on in asked.items() if is_on]
        return tuple(dict.fromkeys((*split_commas(self.report_to), *switched_on)))
