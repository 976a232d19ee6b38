"""Make click options from the fields of a configuration."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from click.core import ParameterSource

from dstrain.cli.completion import completing, families, one_of
from dstrain.cli.help import Command
from dstrain.config import (
    Flag,
    LoraFile,
    NamedInput,
    flags_by_name,
    parse_input,
    parse_lora,
)
from dstrain.config.options import ModelChoice

COMMAND_NAMES = (
    *("train", "graph", "generate", "cache"),
    *("toy", "models", "plugins"),
    *("cache ls", "cache verify", "cache prune"),
)
"""Names of dstrain's own commands, which a plugin's command cannot have; a name of two words
is that of a group and a command in it."""
ORIGINS = "dstrain.origins"
"""Key of `Context.meta` for where values that were not typed are from: name of a parameter
-> the file of --config, or what a plugin says.
"""


class FilePath(click.Path):
    """A path as written; '' is refused, because it would mean the current directory."""

    def __init__(self, is_file: bool = False) -> None:
        super().__init__(path_type=Path)
        self.is_file = is_file
        """Whether it is written: 'x/' would become a file x."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the path."""
        if not str(value):
            raise click.BadParameter("is empty")
        if self.is_file and (str(value).endswith("/") or Path(value).is_dir()):
            raise click.BadParameter(f"{value} is a folder; expected a file")
        return super().convert(value, param, ctx)


file_path = FilePath()


def one_or_several(flag: Flag) -> Callable[[str], Any]:
    """Return what parses a number; text that stands for several stays as it is: what parses
    it says what is wrong in it.
    """

    def number(text: str) -> Any:
        try:
            return text if flag.is_several(str(text)) else flag.kind(text)
        except ValueError:
            what = f"{text!r} is not a valid {NAMES_OF_NUMBERS[flag.kind]}."
            raise click.BadParameter(what) from None

    return number


def repeat_flags(args: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the words of a command with each of these flags before every word that
    follows it: `--a b c` means `--a b --a c`.
    """
    found: list[str] = []
    flag = ""
    values = 0
    for word in args:
        if word.startswith("-"):
            flag = word if word.replace("-", "_").lstrip("_") in names else ""
            values = 0
        elif flag and values:
            found.append(flag)
        values += not word.startswith("-")
        found.append(word)
    return found


def disabled_plugin(text: str) -> str:
    """Return NAME of no:NAME; refuse a name that is not installed."""
    from dstrain.registry import refuse_unknown

    if not text.startswith("no:"):
        raise click.BadParameter(f"expected no:NAME, got {text!r}")
    name = text.removeprefix("no:")
    refuse_unknown(name)
    return name


def place(param: click.Parameter, ctx: click.Context) -> str:
    """Return how errors name a value: by its option, or by what it is from and its
    name there.
    """
    option = param.opts[0]
    name = str(param.name)
    is_from_file = ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP
    origin = ctx.meta.get(ORIGINS, {}).get(name)
    if not is_from_file or origin is None:
        return option
    return f"{origin}:{option.lstrip('-')}"


LONGEST_CHOICES = 26
"""Letters of choices that stand beside an option in help; more are in its description."""
KINDS = MappingProxyType(
    {
        int: (int, "INT"),
        float: (float, "FLOAT"),
        str: (str, "TEXT"),
        Path: (file_path, "PATH"),
        LoraFile: (parse_lora, "[COMPONENT=]FILE[:SCALE][@OPTION]"),
        NamedInput: (parse_input, "NAME=VALUE"),
    }
)
"""Type of an option -> how click parses it, and how help shows it."""

NAMES_OF_NUMBERS = MappingProxyType({int: "integer", float: "float"})
"""Type of a number -> what click calls it."""


class GroupedOption(click.Option):
    """An option with a group of --help, which -h shows or not, and a file of --config may
    have or not.
    """

    def __init__(
        self,
        *declarations: str,
        group: str = "general",
        in_files: bool = True,
        common: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(declarations, **settings)
        self.group = group
        self.common = common
        self.in_files = in_files


def shared_options() -> tuple[click.Option, ...]:
    """Return the options that every command has."""
    disable = GroupedOption(
        "-p",
        "disabled_plugins",
        type=disabled_plugin,
        metavar="no:NAME",
        multiple=True,
        help="Disable a plugin. Can be repeated.",
    )
    debug = GroupedOption(
        "--debug",
        is_flag=True,
        in_files=False,
        expose_value=False,  # `main` looks for it itself
        help="Show tracebacks of errors.",
    )
    return disable, debug


def model_options() -> tuple[click.Option, ...]:
    """Return --model, --variant and --seed, for a command without a configuration."""
    known = flags_by_name(ModelChoice)
    # Nothing else tells the family here.
    help_of_model = "Model family (`dstrain models` lists the installed ones)."
    known["model"] = replace(known["model"], help=help_of_model)
    return tuple(as_option(known[name]) for name in ("model", "variant", "seed"))


def as_option(flag: Flag) -> click.Option:
    """Return the click option for a field; `config.validation.validate` checks choices
    and bounds.
    """
    settings: dict[str, Any] = {"group": flag.group, "help": flag.help}
    settings["common"] = flag.common
    if flag.is_switch:
        switch = f"--{flag.name}/--no_{flag.name}"
        return GroupedOption(switch, default=None, **settings)
    if flag.kind is bool:
        return GroupedOption(f"--{flag.name}", is_flag=True, **settings)
    settings["type"], settings["metavar"] = KINDS[flag.kind]
    if flag.by_name or flag.listed:
        number = settings["metavar"]
        settings["type"] = one_or_several(flag)
        more = f"|NAME={number},..." if flag.by_name else f"[,{number}...]"
        settings["metavar"] = f"{number}{more}"
    if flag.choices:
        settings["metavar"] = f"[{'|'.join(flag.choices)}]"
        settings["shell_complete"] = one_of(flag.choices)
    if flag.choices and len(settings["metavar"]) > LONGEST_CHOICES:
        settings["metavar"] = "NAME"
        settings["help"] = f"{flag.help} One of {', '.join(flag.choices)}."
    if flag.name == "model":
        settings["shell_complete"] = families
    if flag.completes is not None:
        settings["metavar"] = "NAME"
        settings["shell_complete"] = completing(flag.completes)
    if flag.bare is not None:
        metavar = f"[{flag.bare}|PATH]"
        settings |= {"is_flag": False, "flag_value": flag.bare, "metavar": metavar}
    if not flag.required:
        settings |= {"default": flag.default, "show_default": True}
    return GroupedOption(
        f"--{flag.name}", required=flag.required, multiple=flag.many, **settings
    )


def command(
    name: str, body: Callable[..., None], *params: click.Parameter
) -> click.Command:
    """Return a command with the options that all have; its help is the docstring of what
    it calls.
    """
    every = [*params, *shared_options()]
    return Command(name, callback=body, help=body.__doc__, params=every)
