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

from dstrain_watch.options import WatchOptions
from dstrain_watch.trackers import made

logger = get_logger("dstrain.watch")

ID_LENGTH = 21
"""Letters of a run's id: SwanLab takes no other number."""
VIDEO_PICTURES = 4
"""Frames that a preview's video is sent as."""


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
                project = getattr(self.options, f"{name}_project", None) or "dstrain"
                tracker = made(name, project, run.folder, run_id, run.step)
                try:
                    tracker.start()
                except KeyboardInterrupt as error:
                    # Weights & Biases makes one of click's Abort when its question for a
                    # login meets the end of input, too.
                    abort = error.__context__
                    if not isinstance(getattr(abort, "__context__", None), EOFError):
                        raise
                    raise EOFError("no login: log in first, or leave it out") from error
                self._open[name] = tracker
                _send_config(tracker, resolved)

    def step(self, run: WatchedRun, numbers: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        sent = {name: one for name, one in numbers.items() if name != "step"}
        self.reported(run, sent)

    def reported(self, run: WatchedRun, values: Mapping[str, Any]) -> None:
        """Send more numbers of the step, or images; of a video some of its frames."""
        images = {
            name: value
            for name, value in values.items()
            if isinstance(value, Image.Image | Frames)
        }
        numbers = {name: one for name, one in values.items() if name not in images}
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


def _run_id(folder: Path) -> str:
    """Return the id of the run in its trackers, which is made once."""
    path = folder / WatchOptions.tracker_runs
    try:
        return str(json.loads(path.read_bytes())["id"])
    except (OSError, ValueError, TypeError, KeyError):
        # Not of a generator that training could draw from.
        run_id = secrets.token_hex(ID_LENGTH)[:ID_LENGTH]
    RunFiles.read(folder).add([WatchOptions.tracker_runs])
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
    for name, several in arrays.items():
        pictures = [Image.fromarray(one) for one in several]
        sent: dict[str, Any] = {name: pictures}
        # To these two, accelerate sends one picture for each name.
        if tracker.name in ("aim", "clearml"):
            sent = {f"{name}/{n}": one for n, one in enumerate(pictures)}
        tracker.log_images(sent, step=step)


def _arrays(image: Image.Image | Frames) -> list[np.ndarray[Any, Any]]:
    """Return an image, or frames evenly from a video, as uint8 (height, width, 3)."""
    if not isinstance(image, Frames):
        return [np.asarray(image.convert("RGB"))]
    last = len(image.pixels) - 1
    numbers = np.linspace(0, last, min(VIDEO_PICTURES, last + 1)).round().astype(int)
    return [image.pixels[number].numpy() for number in numbers]
