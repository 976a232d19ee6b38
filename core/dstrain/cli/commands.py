"""The commands. Whatever imports torch or a plugin is imported inside the command that
needs it.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from dstrain.cli.options import (
    FamilyCommand,
    FilePath,
    OneOf,
    model_options,
    shared_options,
)
from dstrain.config.fields import parse_alpha
from dstrain.config.schema import GenerateConfig, TrainConfig
from dstrain.config.validation import validate
from dstrain.distributed.signals import interrupt_on_signals
from dstrain.errors import UsageError


def train(config: TrainConfig) -> None:
    """Train a model, or run one stage of it. This is the command when none is named."""
    with interrupt_on_signals("interrupted", "run the same command again"):
        validate(config)
        from dstrain.runs.runner import start

        start(config)


def graph(config: TrainConfig, form: str) -> None:
    """Show the plan of a command line: what runs and what is loaded in each stage, and
    what crosses.
    """
    validate(dataclasses.replace(config, dry_run=True))
    from dstrain.graph.render import as_data, as_text
    from dstrain.runs.resolve import plan_of

    plan, spec, task = plan_of(config)
    click.echo(
        as_text(plan, spec, task)
        if form == "text"
        else json.dumps(as_data(plan), indent=2),
        nl=form != "text",
    )


def generate(config: GenerateConfig) -> None:
    """Generate a picture with the pipeline that trains, and the LoRAs it trained."""
    with interrupt_on_signals("interrupted", "run the same command again"):
        validate(config)
        from dstrain.generation.run import generate as run

        run(config)


def toy(
    model: str, variant: str | None, seed: int, output: Path, left_out: tuple[str, ...]
) -> None:
    """Write a toy model folder in the published layout, to be used by the ordinary
    flags.
    """
    from dstrain.models.toy import fill_folder
    from dstrain.registry.discovery import load_family, variant_of

    family = load_family(model, left_out)
    chosen = variant_of(family, variant)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UsageError("--output", f"{output} exists; what is there is left as it is")
    fill_folder(
        family,
        chosen,
        seed,
        output,
        "make room, remove what was written, and run the same command again",
    )
    click.echo(
        f"wrote {output}; --model_paths names its weights, --tokenizer_path and the like its folders"
    )


def export(
    source: Path,
    output: Path,
    program: str,
    model: str | None,
    overwrite: bool,
    alpha: str | None,
    left_out: tuple[str, ...],
) -> None:
    """Write a LoRA, or the weights of one component, in the names of another program,
    as INPUT to OUTPUT.
    """
    from dstrain.lora.export import export as run

    told = parse_alpha(alpha) if alpha is not None else None
    click.echo(
        f"wrote {output}: {run(source, output, program, model, overwrite, left_out, told)}"
    )


def models(left_out: tuple[str, ...]) -> None:
    """List the families installed, with distribution and version."""
    from dstrain.registry.discovery import installed

    rows = [
        (plugin.name, plugin.distribution, plugin.version)
        for plugin in installed(left_out)
    ]
    click.echo(_table(("name", "distribution", "version"), rows))


def plugins(as_json: bool, left_out: tuple[str, ...]) -> None:
    """List each plugin: its variants or what it adds, its state, and why it is broken;
    `new NAME` begins a family's.
    """
    from dstrain.cli.inspection import inspect_all

    if click.get_current_context().invoked_subcommand is not None:
        if as_json:
            raise UsageError(
                "--json", "has no effect here: it is how the list is printed"
            )
        return
    findings = inspect_all(left_out)
    if as_json:
        columns = (
            "name",
            "distribution",
            "version",
            "variants",
            "adds",
            "state",
            "reason",
        )
        values = [
            (
                f.plugin.name,
                f.plugin.distribution,
                f.plugin.version,
                f.variants,
                f.adds,
                f.state,
                f.reason,
            )
            for f in findings
        ]
        click.echo(
            json.dumps(
                [dict(zip(columns, row, strict=True)) for row in values], indent=2
            )
        )
        return
    told = [f.reason or ", ".join([*f.variants, *f.adds]) for f in findings]
    rows = [
        (f.plugin.name, f"{f.plugin.distribution} {f.plugin.version}", f.state, words)
        for f, words in zip(findings, told, strict=True)
    ]
    click.echo(
        _table(
            ("name", "distribution", "state", "variants, what it adds, or the reason"),
            rows,
        )
    )


def new_plugin(name: str) -> None:
    """Write the package of a new family, NAME, to a folder of that name; it passes the
    conformance kit as it stands.
    """
    from dstrain.registry.scaffold import write_plugin

    write_plugin(name, Path(name))
    click.echo(
        f"wrote {name}; install and test it: pip install -e '{name}[test]' && pytest {name}"
    )


def commands() -> tuple[click.Command, ...]:
    """Build every command of dstrain's own, in the order of --help."""
    form = click.Option(
        ["--format", "form"],
        type=OneOf(["text", "json"]),
        default="text",
        help="How to print it.",
    )
    output = click.Option(
        ["--output"], type=FilePath(), required=True, help="Folder that is written."
    )
    as_json = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON.")
    name = click.Argument(["name"])
    new = click.Command(
        "new",
        callback=new_plugin,
        help=new_plugin.__doc__,
        params=[name, *shared_options()[1:]],
    )
    return (
        FamilyCommand("train", TrainConfig, train),
        FamilyCommand("graph", TrainConfig, graph, (form,)),
        FamilyCommand("generate", GenerateConfig, generate),
        click.Command(
            "export",
            callback=export,
            help=export.__doc__,
            params=[*_export_params(), *shared_options()],
        ),
        click.Command(
            "toy",
            callback=toy,
            help=toy.__doc__,
            params=[*model_options(), output, *shared_options()],
        ),
        click.Command(
            "models", callback=models, help=models.__doc__, params=[*shared_options()]
        ),
        click.Group(
            "plugins",
            commands=(new,),
            invoke_without_command=True,
            callback=plugins,
            help=plugins.__doc__,
            params=[as_json, *shared_options()],
        ),
    )


def _export_params() -> tuple[click.Parameter, ...]:
    programs = OneOf(
        ["diffusers", "comfyui", "kohya", "diffsynth"], {"reference": "diffsynth"}
    )
    return (
        click.Option(
            ["--format", "program"],
            type=programs,
            required=True,
            help="Whose names the file gets.",
        ),
        click.Option(
            ["--model"], help="The family, if the header of INPUT does not say it."
        ),
        click.Option(
            ["--overwrite"], is_flag=True, help="Replace OUTPUT if it is there."
        ),
        click.Option(
            ["--alpha"],
            metavar="rank|NUMBER",
            help="Alpha of a LoRA file that does not say it.",
        ),
        click.Argument(["source"], type=FilePath(), metavar="INPUT"),
        click.Argument(["output"], type=FilePath(), metavar="OUTPUT"),
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    cells = (
        "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in cells)
