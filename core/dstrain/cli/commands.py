"""Define the commands of the command line; what imports torch or a plugin is imported when a command runs."""

import dataclasses
import json
from pathlib import Path

import click

from dstrain.cli.cache import cache_group
from dstrain.cli.click_options import (
    GroupedOption,
    command,
    file_path,
    model_options,
    shared_options,
)
from dstrain.cli.completion import families
from dstrain.cli.family_command import FamilyCommand
from dstrain.cli.help import Group
from dstrain.cli.plugin_lists import models, plugins
from dstrain.config import validate, with_run_options
from dstrain.config.options import GenerateConfig, TrainConfig
from dstrain.config.plugin_options import broken_records, schema
from dstrain.console import fitted, get_logger, shell_command, status
from dstrain.errors import UsageError

logger = get_logger(__name__)


def train(config: TrainConfig) -> None:
    """Train a model, or run one stage of the training.

    This is the default command.
    """
    for reason in broken_records(TrainConfig):
        logger.warning(reason)
    validate(config)
    from dstrain.runs import refuse_early

    refuse_early(config)
    # Imported once the options are known to be right, since it imports torch.
    with status():
        from dstrain.runs import start

        start(config)


def graph(config: TrainConfig, form: str) -> None:
    """Show what each stage runs, loads and caches."""
    if config.json:
        raise UsageError("--json", "is for --dry_run", "here, give --format json")
    config = dataclasses.replace(config, dry_run=True)
    validate(config)
    with status():
        from dstrain.graph import as_text
        from dstrain.graph.render import as_data
        from dstrain.runs import plan_of

        plan, kept = plan_of(config)
    if form == "text":
        click.echo("\n".join(fitted(as_text(plan, kept).splitlines())))
    else:
        click.echo(json.dumps(as_data(plan, kept), indent=2))


def generate(config: GenerateConfig) -> None:
    """Generate an image or a video."""
    for reason in broken_records(GenerateConfig):
        logger.warning(reason)
    config = with_run_options(config)
    validate(config)
    with status():
        from dstrain.generation.run import start

        start(config)


def toy(
    model: str,
    variant: str | None,
    seed: int,
    output: Path,
    disabled_plugins: tuple[str, ...],
) -> None:
    """Write a tiny model with random weights.

    Its files are in the published layout.
    """
    with status():
        from dstrain.models.device import attention_backend
        from dstrain.models.toy import fill_folder
    from dstrain.registry import load_family, variant_of

    attention_backend()  # refused before diffusers says it less well
    family = load_family(model, disabled_plugins)
    chosen = variant_of(family, variant)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        what = f"{output} already exists; existing files were not modified"
        raise UsageError("--output", what, "move it away, or give another --output")
    advice = "free some space, remove what was written, and run the same command again"
    with status("writing the model ..."):
        fill_folder(family, chosen, seed, output, advice)
    words = ["--model_id", str(output), "--variant", chosen]
    click.echo(f"wrote {output}; use it with {shell_command(words)}")


def new_plugin(name: str, disabled_plugins: tuple[str, ...]) -> None:
    """Create a package NAME for a new model family.

    It passes its tests as it is.
    """
    from dstrain.registry import write_plugin

    write_plugin(name, Path(name), disabled_plugins)
    click.echo(
        f"wrote {name}; install and test it: pip install -e '{name}[test]' && pytest {name}"
    )


def schema_option() -> click.Option:
    """Return --schema of `train`."""

    def show(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            click.echo(json.dumps(schema(TrainConfig), indent=2))
            ctx.exit()

    return GroupedOption(
        "--schema",
        is_flag=True,
        is_eager=True,
        in_files=False,
        expose_value=False,
        callback=show,
        help="Print a JSON Schema of all options and exit.",
    )


def commands() -> tuple[click.Command, ...]:
    """Return dstrain's own commands, in the order of --help."""
    shape = click.Option(
        ["--format", "form"],
        type=click.Choice(("text", "json")),
        default="text",
        help="Output format.",
    )
    output = click.Option(
        ["--output"],
        type=file_path,
        metavar="PATH",
        required=True,
        help="Folder to write to.",
    )
    as_json = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON.")
    of_family = (
        click.Argument(
            ["family"], metavar="[FAMILY]", required=False, shell_complete=families
        ),
        GroupedOption(
            "--variant",
            metavar="TEXT",
            help="Variant of the family to describe. Defaults to all.",
        ),
    )
    new = command("new", new_plugin, click.Argument(["name"], metavar="NAME"))
    return (
        FamilyCommand("train", TrainConfig, train, (schema_option(),)),
        FamilyCommand("graph", TrainConfig, graph, (shape,)),
        FamilyCommand("generate", GenerateConfig, generate),
        cache_group(),
        command("toy", toy, *model_options(), output),
        command("models", models, *of_family),
        Group(
            "plugins",
            commands=(new,),
            invoke_without_command=True,
            callback=plugins,
            help=plugins.__doc__,
            params=[as_json, *shared_options()],
        ),
    )
