"""A command, one in a group of dstrain's, and hints on words of another program."""

from collections.abc import Mapping, Sequence

import click
from dstrain.plugin import hookimpl

api = 2


@hookimpl
def dstrain_commands() -> Sequence[click.Command]:
    def greet(name: str) -> None:
        click.echo(f"hello {name}")

    argument = click.Argument(["name"])
    return [
        click.Command("greet", callback=greet, params=[argument]),
        click.Command("cache greet", callback=greet, params=[argument]),
    ]


@hookimpl
def dstrain_hints() -> Mapping[str, str]:
    return {
        "--lerning_*": "use --learning_rate",
        "--model tinny": "the family is spelled tiny",
        "$TINY_SPEED": "speed is what it is",
    }
