"""Send the numbers and the previews of a run to trackers.

logs/trackers.json        the id of the run in its trackers, by which a resumed run
                          continues it
logs/tensorboard/ID/      what TensorBoard shows
logs/wandb, logs/swanlab  what these libraries keep beside what they send
"""

import json
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from dstrain.plugin import (
    Frames,
    Observer,
    RunFiles,
    WatchedRun,
    get_logger,
    read_resolved,
    redacted,
    write_json,
)
from PIL import Image

from dstrain_watch.options import TRACKER_RUNS, WatchOptions

logger = get_logger("dstrain.watch")

ID_LENGTH = 21
"""Letters of a run's id: SwanLab takes no other number."""
FINISH_SECONDS = 300
"""How long Weights & Biases may send what is left when the run ends."""
VIDEO_PICTURES = 4
"""Frames that a preview's video is sent as."""
PROJECT = "dstrain"
NO_METADATA = MappingProxyType(
    {
        "metadata_collect": False,
        "requirements_collect": False,
        "log_proxy_type": "none",
    }
)
"""SwanLab's settings by which it sends neither the command line nor what is printed."""


class Trackers(Observer):
    """The trackers of a run."""

    def __init__(self, options: WatchOptions) -> None:
        """Send to the trackers that are asked for."""
        self.options = options
        self._open: dict[str, Any] = {}

    def start(self, run: WatchedRun) -> None:
        """Open the trackers, and send them the resolved configuration."""
        if run.folder is None:
            return
        run_id = _run_id(run.folder)
        resolved = read_resolved(run.folder)
        for name in self.options.trackers:
            # Libraries warn of their own dependencies when they are imported.
            with self._giving_up(name), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tracker = _tracker(name, self.options, run.folder, run_id, run.step)
                tracker.start()
                self._open[name] = tracker
                _send_config(tracker, resolved)

    def step(self, run: WatchedRun, numbers: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        sent = {name: one for name, one in numbers.items() if name != "step"}
        self._each(lambda tracker: tracker.log(sent, step=run.step))

    def reported(self, run: WatchedRun, values: Mapping[str, Any]) -> None:
        """Send more numbers of the step, or images; of a video some of its frames."""
        images = {
            name: value
            for name, value in values.items()
            if isinstance(value, Image.Image | Frames)
        }
        numbers = {name: values[name] for name in values.keys() - images.keys()}
        if numbers:
            self._each(lambda tracker: tracker.log(numbers, step=run.step))
        if images:
            self._each(lambda tracker: _send_images(tracker, images, run.step))

    def end(self, run: WatchedRun, how: str) -> None:
        """Close the trackers."""
        self._each(lambda tracker: tracker.finish())
        self._open.clear()

    def _each(self, action: Callable[[Any], None]) -> None:
        for name, tracker in list(self._open.items()):
            with self._giving_up(name):
                action(tracker)

    @contextmanager
    def _giving_up(self, name: str) -> Iterator[None]:
        """Give up a tracker that fails in the block, with a warning."""
        try:
            yield
        # Whatever it is, it is no reason to lose the training.
        except (Exception, SystemExit) as error:
            self._open.pop(name, None)
            line = redacted(str(error).strip().partition("\n")[0])
            reason = f"{type(error).__name__}: {line}".rstrip(": ")
            logger.warning(f"nothing more is logged to {name}: {reason}")


def _tracker(
    name: str, options: WatchOptions, folder: Path, run_id: str, step: int
) -> Any:
    """Return a tracker of accelerate's, not started."""
    from accelerate import tracking

    place = folder / "logs" / name
    place.mkdir(parents=True, exist_ok=True)
    if name == "tensorboard":
        # What a run that was cut off logged after this step is not shown.
        purge = step + 1 if step else None
        return tracking.TensorBoardTracker(run_id, place, purge_step=purge)
    own: dict[str, Any] = {"id": run_id, "resume": "allow"}
    if name == "wandb":
        project = options.wandb_project or PROJECT
        own |= {"dir": str(place), "settings": _wandb_settings()}
        return tracking.WandBTracker(project, **own)
    if name != "swanlab":
        kind = tracking.LOGGER_TYPE_TO_CLASS[name]
        if kind.requires_logging_directory:
            return kind(PROJECT, str(place))
        return kind(PROJECT)
    project = options.swanlab_project or PROJECT
    own |= {"logdir": str(place), "settings": _swanlab_settings()}
    return tracking.SwanLabTracker(project, **own)


def _wandb_settings() -> Any:
    """Return settings by which neither the command line, the environment nor what is
    printed is sent, and a network that is gone does not hold the end of a run.
    """
    import wandb

    return wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        save_code=False,
        x_disable_meta=True,
        finish_timeout=FINISH_SECONDS,
    )


def _swanlab_settings() -> Any:
    """Return settings by which neither the command line nor what is printed is sent.

    Raises RuntimeError for a version that does not take them.
    """
    import swanlab

    if hasattr(swanlab.Settings, "Probe"):
        # 0.10 groups them; whatever another version's probe collects is named, too.
        names = swanlab.Settings.Probe.model_fields
        given = {name: False for name in names if not name.startswith("monitor_")}
        settings = swanlab.Settings(probe=given, terminal={"proxy_type": "none"})
        found = {name: getattr(settings.probe, name) for name in given}
        is_quiet = not any(found.values()) and settings.terminal.proxy_type == "none"
    else:
        settings = swanlab.Settings(**NO_METADATA)
        is_quiet = all(
            getattr(settings, name, None) == one for name, one in NO_METADATA.items()
        )
    if not is_quiet:
        what = "this version of swanlab has other settings, and might send secrets"
        raise RuntimeError(what)
    return settings


def _run_id(folder: Path) -> str:
    """Return the id of the run in its trackers, which is made once."""
    path = folder / TRACKER_RUNS
    try:
        return str(json.loads(path.read_bytes())["id"])
    except (OSError, ValueError, TypeError, KeyError):
        # Not of a generator that training could draw from.
        run_id = secrets.token_hex(ID_LENGTH)[:ID_LENGTH]
    RunFiles.read(folder).add([TRACKER_RUNS])
    write_json(path, {"id": run_id})
    return run_id


def _send_config(tracker: Any, resolved: Mapping[str, Any]) -> None:
    if tracker.name == "tensorboard":
        # As text: its table of hyperparameters would be a run of its own at each start.
        text = json.dumps(resolved, ensure_ascii=False, indent=1, sort_keys=True)
        lines = "".join(f"    {line}\n" for line in text.splitlines())
        tracker.log({"configuration": lines}, step=0)
    else:
        tracker.store_init_configuration(dict(resolved))


def _send_images(
    tracker: Any, images: Mapping[str, Image.Image | Frames], step: int
) -> None:
    arrays = {name: _arrays(image) for name, image in images.items()}
    if tracker.name == "tensorboard":
        stacks = {name: np.stack(several) for name, several in arrays.items()}
        tracker.log_images(stacks, step=step, dataformats="NHWC")
        return
    if not hasattr(tracker, "log_images"):
        return
    as_images = {
        name: [Image.fromarray(one) for one in several]
        for name, several in arrays.items()
    }
    tracker.log_images(as_images, step=step)


def _arrays(image: Image.Image | Frames) -> list[np.ndarray[Any, Any]]:
    """Return an image, or frames evenly from a video, as uint8 (height, width, 3)."""
    if not isinstance(image, Frames):
        return [np.asarray(image.convert("RGB"))]
    last = len(image.pixels) - 1
    numbers = np.linspace(0, last, min(VIDEO_PICTURES, last + 1)).round().astype(int)
    return [image.pixels[number].numpy() for number in numbers]
