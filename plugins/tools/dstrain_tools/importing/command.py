"""`dstrain import FILE`: a configuration of another tool becomes a file of `--config`."""

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
from dstrain.cache import replacing
from dstrain.plugin import TrainConfig, UsageError
from dstrain.plugin.commands import (
    Command,
    FamilyCommand,
    explain,
    file_path,
    shared_options,
    shell_command,
    validate,
)

from dstrain_tools.importing.entries import Source
from dstrain_tools.importing.models import model_of
from dstrain_tools.importing.output import as_toml, report
from dstrain_tools.importing.reading.source import read_source
from dstrain_tools.importing.tables import TOOLS, table_of
from dstrain_tools.importing.translation import Translation, translate

NOT_WRITTEN = "no file was written: add --output FILE.toml"


def import_command() -> click.Command:
    """Return the command."""
    params: Sequence[click.Parameter] = (
        click.Argument(["source"], type=file_path, metavar="FILE"),
        click.Option(
            ["--output", "-o"],
            type=file_path,
            metavar="FILE",
            help="TOML file to write. Defaults to standard output.",
        ),
        click.Option(
            ["--overwrite"], is_flag=True, help="Replace --output if it exists."
        ),
        click.Option(
            ["--dataset"],
            type=file_path,
            metavar="FILE",
            help="The tool's separate file of datasets, if FILE does not name it.",
        ),
        click.Option(
            ["--from", "tool"],
            type=click.Choice(TOOLS),
            metavar=f"[{'|'.join(TOOLS)}]",
            help="Tool that FILE is of. Defaults to the one that its keys tell.",
        ),
        click.Option(
            ["--model"],
            help="Model family or model id, where FILE does not tell the model.",
        ),
        click.Option(
            ["--command", "number"],
            type=int,
            help="Which training command of a shell script is meant, from 1.",
        ),
    )
    every = [*params, *shared_options()]
    return Command("import", callback=run, help=run.__doc__, params=every)


def run(
    source: Path,
    output: Path | None,
    overwrite: bool,
    dataset: Path | None,
    tool: str | None,
    model: str | None,
    number: int | None,
    disabled_plugins: tuple[str, ...],
) -> None:
    """Turn a configuration of another tool into a file for --config.

    FILE is a TOML or YAML file, or a shell script, of musubi-tuner, ai-toolkit,
    sd-scripts or DiffSynth-Studio. What has no counterpart is listed.
    """
    if overwrite and output is None:
        raise UsageError("--overwrite", "has no effect without --output")
    if output is not None and output.suffix != ".toml":
        raise UsageError("--output", f"{output} does not end with .toml")
    read = read_source(source, dataset, tool, number)
    trained = model_of(read, table_of(read.tool), model, disabled_plugins)
    table = table_of(read.tool, trained.family.name)
    found = translate(read, table, trained, output)
    drop_what_is_refused(found)
    text = as_toml(found, read)
    if output is None:
        click.echo(text, nl=False)
        click.echo(f"\n{report(found)}\n\n{NOT_WRITTEN}", err=True)
        return
    _write({output: text, **found.tables}, overwrite)
    click.echo(report(found))
    check = shell_command(["dstrain", "--config", str(output), "--dry_run"])
    click.echo(f"\nwrote {output}; check it: {check}")


def drop_what_is_refused(found: Translation) -> None:
    """Leave out what a training run would refuse, such as a value out of its range.

    Raises the error itself if it is about none of the options.
    """
    # Each round leaves one option out, so that it ends.
    while (error := refusal(found)) is not None:
        # `option`, `--option` or `--dataset 2: option`.
        option = re.split(r"[:\s]+|--", error.where)[-1]
        if not found.drop(option, error.what):
            raise error


def refusal(found: Translation) -> UsageError | None:
    """Return why a training run would refuse the options; None if it takes them."""
    descriptor, name = tempfile.mkstemp(suffix=".toml")
    os.close(descriptor)
    try:
        Path(name).write_text(as_toml(found, Source("", ())), "utf-8")
        command = FamilyCommand("train", TrainConfig, validate)
        # With the family named, no other is asked whether the model is its own.
        words = ["--config", name, "--dry_run", "--model", found.family]
        with command.make_context("train", words) as context:
            command.invoke(context)
    except (UsageError, click.ClickException) as error:
        explained = explain(error)
        assert isinstance(explained, UsageError)
        # The file is no file of the user's.
        explained.where = explained.where.removeprefix(f"{name}:")
        return explained
    finally:
        Path(name).unlink()
    return None


def _write(texts: dict[Path, str], overwrite: bool) -> None:
    """Write files, unless one exists and is not to be replaced."""
    for path in texts:
        if path.exists() and not overwrite:
            what = f"{path} already exists and was not modified"
            raise UsageError("--output", what, "add --overwrite to replace it")
    for path, text in texts.items():
        data = text.encode()
        with replacing(path, len(data)) as building:
            building.write_bytes(data)
