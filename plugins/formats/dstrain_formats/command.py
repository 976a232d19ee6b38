"""Define `dstrain export`; what imports torch is imported when it runs."""

from pathlib import Path

import click
from dstrain.plugin import FilePath, command, families
from dstrain.plugin.lora import Alpha, parse_alpha

PROGRAMS = ("diffusers", "comfyui", "kohya", "diffsynth")
"""Programs whose key names can be written."""


def export(
    source: Path,
    output: Path,
    program: str | None,
    model: str | None,
    overwrite: bool,
    alpha: Alpha | None,
    component: str | None,
    disabled_plugins: tuple[str, ...],
) -> None:
    """Convert a LoRA file or weights for another program."""
    from dstrain_formats.export import export as run

    if program == "reference":
        program = "diffsynth"
    done = run(
        source,
        output,
        program,
        model,
        overwrite,
        disabled_plugins,
        alpha,
        component or "",
    )
    click.echo(f"wrote {output}: {done}")


def export_command() -> click.Command:
    """Return the command."""
    params = (
        click.Option(
            ["--format", "program"],
            type=click.Choice((*PROGRAMS, "reference")),
            metavar=f"[{'|'.join(PROGRAMS)}]",
            help="Program whose key names to use. With --alpha, defaults to those of INPUT.",
        ),
        click.Option(
            ["--model"],
            shell_complete=families,
            help="Model family. Defaults to the one in INPUT's header.",
        ),
        click.Option(
            ["--overwrite"], is_flag=True, help="Replace OUTPUT if it exists."
        ),
        click.Option(
            ["--alpha"],
            type=parse_alpha,
            metavar="rank|NUMBER",
            help="Alpha of a LoRA file that does not contain it.",
        ),
        click.Option(
            ["--component"],
            help="Component of a LoRA file that does not say which of several it is for.",
        ),
        click.Argument(["source"], type=FilePath(), metavar="INPUT"),
        click.Argument(["output"], type=FilePath(is_file=True), metavar="OUTPUT"),
    )
    return command("export", export, *params)
