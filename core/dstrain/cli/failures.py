"""Every failure as one line WHERE: WHAT, with its exit code."""

import traceback

import click

from dstrain.errors import DstrainError, Interrupted, SystemFault, UsageError, nearest


def explain(error: BaseException) -> DstrainError:
    """Say any exception in dstrain's words; one that nobody foresaw names its place in the code, exit code 1."""
    if isinstance(error, DstrainError):
        return error
    if isinstance(error, click.ClickException):
        return _usage(error)
    if isinstance(error, KeyboardInterrupt):
        help_line = "run the same command again, with --resume where a checkpoint was saved"
        return Interrupted("command line", "interrupted", help_line)
    if isinstance(error, OSError):
        return SystemFault(str(error.filename or "system"), error.strerror or str(error))
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = f"{place[0].filename}:{place[0].lineno}" if place else "dstrain"
    return DstrainError(where, f"{type(error).__name__}: {error}", "--debug shows the traceback")


def _usage(error: click.ClickException) -> UsageError:
    what = error.message[:1].lower() + error.message[1:].rstrip(".")
    if isinstance(error, click.NoSuchOption):
        known = [opt for param in error.ctx.command.get_params(error.ctx) for opt in param.opts] if error.ctx else []
        lacks_family = "--model" in known and error.ctx is not None and not error.ctx.meta
        help_lines = ("a family's own flags need --model",) if lacks_family else ()
        return UsageError(error.option_name, f"no such option{nearest(error.option_name, known)}", *help_lines)
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return UsageError(error.param.opts[0], "is required")
    if isinstance(error, click.BadParameter) and error.param is not None:
        return UsageError(error.param.opts[0], what)
    if isinstance(error, click.BadOptionUsage):
        return UsageError(error.option_name, what)
    return UsageError("command line", what)
