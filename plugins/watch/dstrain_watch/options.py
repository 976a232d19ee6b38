"""The options of previews, and of trackers, to which a run's numbers and previews are sent."""

from importlib.util import find_spec
from typing import ClassVar

from dstrain.plugin import (
    TrainConfig,
    UsageError,
    as_texts,
    converted,
    nearest,
    option,
    options,
    split_commas,
)

from dstrain_watch.trackers import TRACKERS

FLAG = "--preview_prompt"
PREVIEWS = "previews"


@options
class WatchOptions:
    """What is made of a run while it trains, and where its numbers are sent."""

    prompts: ClassVar = f"{PREVIEWS}/prompts.json"
    tracker_runs: ClassVar = "logs/trackers.json"
    """The ids of the run in its trackers."""
    writes: ClassVar = (f"{PREVIEWS}/step-*-*.*", prompts, tracker_runs)

    preview_prompt: tuple[str, ...] = converted(
        "output: previews",
        "Prompt to generate a preview from during training. Can be repeated. Its own size, seed, steps, "
        "guidance, sampler and negative prompt may follow: "
        "'a dog --w 768 --h 512 --d 42 --s 20 --l 4 --ss euler --n blurry'. "
        "A side that is not given is as without them.",
        converter=as_texts,
        default=(),
        common=True,
    )
    preview_steps: int | None = option(
        "output: previews",
        "Generate previews every N steps. Defaults to whenever weights are saved.",
        minimum=1,
    )
    preview_at_start: bool = option(
        "output: previews", "Generate previews before training as well.", False
    )
    report_to: str | None = option(
        "output: trackers",
        f"Trackers to log to, comma-separated: {', '.join(TRACKERS)}.",
        common=True,
    )
    enable_tensorboard_log: bool = option(
        "output: trackers",
        "Log to TensorBoard, as --report_to tensorboard does.",
        False,
    )
    enable_wandb_log: bool = option(
        "output: trackers", "Log to Weights & Biases, as --report_to wandb does.", False
    )
    wandb_project: str | None = option(
        "output: trackers", "Project in Weights & Biases. Defaults to dstrain."
    )
    enable_swanlab_log: bool = option(
        "output: trackers", "Log to SwanLab, as --report_to swanlab does.", False
    )
    swanlab_project: str | None = option(
        "output: trackers", "Project in SwanLab. Defaults to dstrain."
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
        switched_on = filter(asked.get, asked)
        return tuple(dict.fromkeys((*split_commas(self.report_to), *switched_on)))

    def check(self, config: TrainConfig) -> None:
        """Refuse trackers that there are not, and options that have no effect."""
        for name in ("preview_steps", "preview_at_start"):
            if getattr(self, name) and not self.preview_prompt:
                raise UsageError(f"--{name}", f"has no effect without {FLAG}")
        if self.report_to is not None and not split_commas(self.report_to):
            raise UsageError("--report_to", "is empty")
        for name in split_commas(self.report_to):
            if name not in TRACKERS:
                known = ", ".join(TRACKERS) + nearest(name, TRACKERS)
                what = f"no tracker named {name!r}; trackers: {known}"
                raise UsageError("--report_to", what)
        for name in ("wandb", "swanlab"):
            flag = f"{name}_project"
            if getattr(self, flag) is not None and name not in self.trackers:
                raise UsageError(
                    f"--{flag}", f"has no effect without --report_to {name}"
                )
        if isinstance(config, TrainConfig) and config.stage != "data_process":
            for name in self.trackers:
                if find_spec(name) is None:
                    raise UsageError(
                        "--report_to",
                        f"{name} is not installed",
                        f"run: pip install {name}",
                    )
