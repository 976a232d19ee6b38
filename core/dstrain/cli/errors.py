"""Every failure as one line WHERE: WHAT, with its exit code."""

import traceback

import click

from dstrain.cli.unsupported import no_such
from dstrain.errors import (
    DstrainError,
    Interrupted,
    OutOfMemory,
    SystemFault,
    UsageError,
)
from dstrain.training.memory import LOAD_ADVICE, SIGNS, is_out_of_memory

DEFECT = ("a defect of dstrain or of a plugin: report it, with what --debug shows",)


def explain(error: BaseException) -> DstrainError:
    """Say any exception in dstrain's words; one that nobody foresaw names its place in
    the code, exit code 1.
    """
    if isinstance(error, DstrainError):
        return error
    if isinstance(error, click.ClickException):
        return _usage(error)
    if isinstance(error, KeyboardInterrupt):
        help_line = (
            "run the same command again, with --resume where a checkpoint was saved"
        )
        return Interrupted("command line", "interrupted", help_line)
    if isinstance(error, OSError):
        return SystemFault(
            str(error.filename or "system"), error.strerror or str(error)
        )
    return _memory(error) or _worker(error) or _unforeseen(error)


def _memory(error: BaseException) -> OutOfMemory | None:
    """Memory that was lacking outside a training step: of the device, or of the
    machine.
    """
    if not is_out_of_memory(error):
        return None
    # Of a process that loads samples torch hands on a whole traceback, in which one
    # line says it.
    lines = str(error).strip().splitlines() or ["the machine has too little"]
    told = next(
        (line for line in lines if any(sign in line for sign in SIGNS)), lines[-1]
    )
    return OutOfMemory("memory", told, *LOAD_ADVICE)


def _worker(error: BaseException) -> DstrainError | None:
    """A process that loads samples: one that was killed, or what it raised, in which
    torch puts a whole traceback.
    """
    lines = str(error).strip().splitlines()
    if not isinstance(error, Exception) or not lines:
        return None
    if lines[0].startswith("DataLoader worker (pid"):
        return SystemFault(
            "data loader",
            lines[0],
            "a process that loads samples ended: too little memory, perhaps",
            "lower --dataset_num_workers",
        )
    if lines[0].startswith("Caught ") and "DataLoader worker process" in lines[0]:
        return DstrainError("data loader", lines[-1], *DEFECT)
    return None


def _unforeseen(error: BaseException) -> DstrainError:
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = f"{place[0].filename}:{place[0].lineno}" if place else "dstrain"
    first = (str(error).strip().splitlines() or [""])[0]
    return DstrainError(where, f"{type(error).__name__}: {first}".rstrip(": "), *DEFECT)


def _usage(error: click.ClickException) -> UsageError:
    what = error.message[:1].lower() + error.message[1:].rstrip(".")
    if isinstance(error, click.NoSuchOption):
        known = (
            [
                opt
                for param in error.ctx.command.get_params(error.ctx)
                for opt in param.opts
            ]
            if error.ctx
            else []
        )
        lacks_family = (
            "--model" in known and error.ctx is not None and not error.ctx.meta
        )
        help_lines = ("a family's own flags need --model",) if lacks_family else ()
        return UsageError(
            error.option_name, *no_such(error.option_name, known), *help_lines
        )
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return UsageError(error.param.opts[0], "is required")
    if isinstance(error, click.BadParameter) and error.param is not None:
        return UsageError(error.param.opts[0], what)
    if isinstance(error, click.BadOptionUsage):
        return UsageError(error.option_name, what)
    return UsageError("command line", what)
