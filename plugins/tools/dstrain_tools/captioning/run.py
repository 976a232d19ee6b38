"""Caption a folder: `dstrain caption`."""

import errno
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from dstrain import SystemFault, UsageError
from dstrain.cache import replacing
from dstrain.data import CaptionOptions as Additions, metadata_files, printable
from dstrain.plugin import get_logger, progress_bar
from dstrain.plugin.commands import installed, number_of, shell_command, status
from PIL import Image

from dstrain_tools.captioning.folder import Task, Tasks, find_tasks
from dstrain_tools.captioning.model_files import ModelFiles, find_model
from dstrain_tools.captioning.options import MODEL_ID, CaptionOptions
from dstrain_tools.captioning.pixels import load
from dstrain_tools.captioning.text import caption_of

if TYPE_CHECKING:
    from dstrain_tools.captioning.captioner import Captioner

FAMILY = "qwen_image"
"""The family of MODEL_ID."""
TRAINED = ((FAMILY, MODEL_ID), ("wan", "Wan-AI/Wan2.1-T2V-1.3B"))
"""What the command at the end trains: a family and a model for images, and for videos."""
TRAINED_CLASS = "QwenImagePipeline"
"""Another pipeline of the family may need more than images with captions."""
SHOWN = 3
"""Captions that are shown, so that a prompt that does not work is seen at once."""
MOST_FAULTS = 20
OF_ONE_FILE = (
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ENOENT,
)
"""Why one file cannot be written, where others can: no full disk, for one."""
MEMORY_ADVICE = (
    "lower --batch_size or --max_pixels; or use --quantize bitsandbytes_nf4, or --mixed_precision bf16",
    "captions that were written are kept: the same command resumes from there",
)

# A logger of dstrain, whose lines the command line shows.
logger = get_logger("dstrain.captioning")


def run(options: CaptionOptions) -> None:
    """Caption what has no caption in a folder.

    Raises UsageError, at the end, for images that could not be captioned, and what
    loading the model raises.
    """
    if options.seed is not None and not options.temperature:
        raise UsageError("--seed", "has no effect without --temperature")
    if not math.isfinite(options.temperature):
        what = f"expected a finite number, got {options.temperature}"
        raise UsageError("--temperature", what)
    found = find_tasks(options.folder, options.overwrite)
    if options.dry_run:
        for task in found.tasks:
            click.echo(printable(task.name))
    _say_what_is_there(found, options)
    if found.tasks and not options.dry_run:
        _caption(found, options)
    if found.faults:
        raise _faults_error(found, options)


def _say_what_is_there(found: Tasks, options: CaptionOptions) -> None:
    kept = ""
    if found.captioned:
        verb = "has a caption" if found.captioned == 1 else "have captions"
        kept = f"; {found.captioned} {verb} already (--overwrite replaces them)"
    number = number_of(len(found.tasks), "image or video", "images and videos")
    logger.info(f"{options.folder}: {number} to caption{kept}")
    for path in metadata_files(options.folder):
        logger.warning(
            f"{path}: datasets with metadata are read from there: the captions are not used until it is moved away"
        )


def _caption(found: Tasks, options: CaptionOptions) -> None:
    files = find_model(options.model_id, options.hub)
    # They import torch, which takes seconds: what can be wrong before was looked at.
    with status():
        from dstrain.generation import oom_as_error

        from dstrain_tools.captioning.captioner import load_captioner

    logger.info(f"loading {files.name}")
    with oom_as_error("captioning", *MEMORY_ADVICE):
        # It imports transformers, which takes as long.
        with status("loading the model ..."):
            captioner = load_captioner(files, options)
        written = _Writer(captioner, options, found.faults).write_all(found.tasks)
    logger.info(f"wrote {number_of(written, 'caption')} in {options.folder}")
    if not found.faults:
        _say_what_is_next(found, files, options)


class _Writer:
    """Writes captions, and notes why some cannot be."""

    def __init__(
        self, captioner: "Captioner", options: CaptionOptions, faults: dict[str, str]
    ) -> None:
        self.captioner = captioner
        self.options = options
        self.faults = faults
        self.additions = Additions(
            trigger=options.trigger_word,
            prefix=options.caption_prefix,
            suffix=options.caption_suffix,
        )
        self.written = 0

    def write_all(self, tasks: Sequence[Task]) -> int:
        """Write a caption for each, as soon as it is there; return how many."""
        size = self.options.batch_size
        with progress_bar("caption", len(tasks)) as progress:
            for start in range(0, len(tasks), size):
                part = tasks[start : start + size]
                self._write_batch(part)
                progress.update(len(part))
        return self.written

    def _write_batch(self, tasks: Sequence[Task]) -> None:
        loaded: list[tuple[Task, list[Image.Image]]] = []
        for task in tasks:
            try:
                options = self.options
                images = load(task, options.max_pixels, options.num_frames)
            except (UsageError, ValueError) as error:
                what = error.what if isinstance(error, UsageError) else str(error)
                self.faults[task.name] = what
            else:
                loaded.append((task, images))
        if loaded:
            self._write_loaded(loaded)

    def _write_loaded(self, loaded: Sequence[tuple[Task, list[Image.Image]]]) -> None:
        names = [task.name for task, _ in loaded]
        shown = [images for _, images in loaded]
        try:
            texts = self.captioner.write(shown, names)
        except ValueError as error:
            # A processor refuses some images, such as one a thousand times as wide as
            # it is high; the others of the batch are none of those.
            if len(loaded) == 1:
                reason = str(error).strip().partition("\n")[0]
                self.faults[names[0]] = f"the model refuses it: {reason}"
                return
            for one in loaded:
                self._write_loaded([one])
            return
        for (task, _), text in zip(loaded, texts, strict=True):
            try:
                caption = caption_of(text, self.additions)
            except ValueError as error:
                self.faults[task.name] = str(error)
                continue
            # Hours may have passed since the folder was looked at.
            if task.has_caption and not self.options.overwrite:
                self.faults[task.name] = "got a caption meanwhile, which is kept"
                continue
            try:
                data = f"{caption}\n".encode()
                with replacing(task.output, len(data)) as building:
                    building.write_bytes(data)
            except SystemFault as error:
                cause = error.__cause__
                if not isinstance(cause, OSError) or cause.errno not in OF_ONE_FILE:
                    raise
                what = f"its caption cannot be written: {cause.strerror}"
                self.faults[task.name] = what
                continue
            if self.written < SHOWN:
                logger.info(f"{printable(task.name)}: {caption}")
            self.written += 1


def _say_what_is_next(found: Tasks, files: ModelFiles, options: CaptionOptions) -> None:
    """Log the command that trains on the captions, where a family for it is installed."""
    family, model_id = TRAINED[all(task.is_video for task in found.tasks)]
    if family == FAMILY and files.pipeline_class == TRAINED_CLASS:
        model_id = files.name
    names = {one.name for one in installed(options.disabled_plugins)}
    if family in names:
        command = ["dstrain", "--model_id", model_id]
        command += ["--dataset_base_path", str(options.folder)]
        command += ["--feature_cache", "cache", "--output_path", "out"]
        metadata = " and ".join(path.name for path in metadata_files(options.folder))
        when = f" once {metadata} is moved away" if metadata else ""
        logger.info(f"train on them{when}: {shell_command(command)}")


def _faults_error(found: Tasks, options: CaptionOptions) -> UsageError:
    number = number_of(len(found.faults), "image or video", "images and videos")
    verb = "has" if len(found.faults) == 1 else "have"
    lines = [f"{printable(name)}: {what}" for name, what in found.faults.items()]
    if len(lines) > MOST_FAULTS:
        lines[MOST_FAULTS:] = [f"and {len(lines) - MOST_FAULTS} more"]
    return UsageError(options.folder, f"{number} {verb} no new caption", *lines)
