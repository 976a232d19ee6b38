"""Make click options from the fields of a configuration and from a family's own
options.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import click
from click.core import ParameterSource

from dstrain.cli.config_file import default_map, read_file
from dstrain.config.fields import (
    Flag,
    Group,
    LoraFile,
    NamedInput,
    flags,
    parse_input,
    parse_lora,
)
from dstrain.config.options.model import ModelChoice
from dstrain.config.options.train import TrainConfig
from dstrain.config.serialize import read_resolved
from dstrain.errors import UsageError
from dstrain.registry.family import ModelFamily, Option

COMMAND_NAMES = (
    *("train", "graph", "generate", "cache"),
    *("export", "toy", "models", "plugins"),
)
"""Names of dstrain's own commands, which a plugin's command cannot have."""
FAMILY = "dstrain.family"
"""Key of `Context.meta` for the family that --model names."""
CONFIG_FILE = "dstrain.config_file"
"""Key of `Context.meta` for the file of --config."""


def file_path(text: str) -> Path:
    """Return a path as written; '' is refused, because it would mean the current
    directory.
    """
    if not text:
        raise click.BadParameter("is empty")
    return Path(text)


def number_or_names(text: object) -> object:
    """Return a number, or NAME=NUMBER,... as it is: what parses it says what is wrong
    in it.
    """
    return _or_names(text, float)


def integer_or_names(text: object) -> object:
    """Return an integer, or NAME=INTEGER,... as it is."""
    return _or_names(text, int)


def _or_names(text: object, kind: type) -> object:
    if "=" in str(text):
        return text
    try:
        return kind(text)
    except ValueError:
        what = f"{text!r} is not a valid {NAMES_OF_NUMBERS[kind]}."
        raise click.BadParameter(what) from None


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
    from dstrain.registry.discovery import refuse_unknown

    if not text.startswith("no:"):
        raise click.BadParameter(f"expected no:NAME, got {text!r}")
    name = text.removeprefix("no:")
    refuse_unknown(name)
    return name


def place(param: click.Parameter, ctx: click.Context) -> str:
    """Return how errors name a value: by its option, or by the file and key it is
    from.
    """
    option = param.opts[0]
    if ctx.get_parameter_source(str(param.name)) is not ParameterSource.DEFAULT_MAP:
        return option
    return f"{ctx.meta[CONFIG_FILE]}:{option.lstrip('-')}"


KINDS = MappingProxyType(
    {
        int: (int, None),
        float: (float, None),
        str: (str, None),
        Path: (file_path, "PATH"),
        LoraFile: (parse_lora, "FILE[:SCALE]"),
        NamedInput: (parse_input, "NAME=VALUE"),
    }
)
"""Type of an option -> how click parses it, and how help shows it (None: click's own)."""

NAMES_OF_NUMBERS = MappingProxyType({int: "integer", float: "float"})
"""Type of a number -> what click calls it."""


class GroupedOption(click.Option):
    """An option with a group of --help, which a file of --config may have or not."""

    def __init__(
        self,
        *declarations: str,
        group: str = "general",
        in_files: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(declarations, **settings)
        self.group = group
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
    names = ("model", "variant", "seed")
    return tuple(as_option(flag) for flag in flags(ModelChoice) if flag.name in names)


def as_option(flag: Flag) -> click.Option:
    """Return the click option for a field.

    Choices and bounds are left to `config.validation.validate`, which scripts go through, too.
    """
    settings: dict[str, Any] = {"group": flag.group, "help": flag.help}
    if flag.kind is bool:
        return GroupedOption(f"--{flag.name}", is_flag=True, **settings)
    settings["type"], settings["metavar"] = KINDS[flag.kind]
    if flag.by_name:
        is_integer = flag.kind is int
        settings["type"] = integer_or_names if is_integer else number_or_names
        number = NAMES_OF_NUMBERS[flag.kind].upper()
        settings["metavar"] = f"{number}|NAME={number},..."
    if flag.choices:
        settings["metavar"] = f"[{'|'.join(flag.choices)}]"
    if flag.bare is not None:
        metavar = f"[{flag.bare}|PATH]"
        settings |= {"is_flag": False, "flag_value": flag.bare, "metavar": metavar}
    if not flag.required:
        settings |= {"default": flag.default, "show_default": True}
    return GroupedOption(
        f"--{flag.name}", required=flag.required, multiple=flag.many, **settings
    )


class FamilyCommand(click.Command):
    """A command with the options of a configuration, and of the family that --model
    names.
    """

    def __init__(
        self,
        name: str,
        config: type[ModelChoice],
        body: Callable[..., None],
        extra: Sequence[click.Option] = (),
    ) -> None:
        """Make a command whose help is the body's docstring.

        Args:
            name: The word that stands for the command.
            config: The configuration whose fields are options.
            body: What is called with the configuration and the values of `extra`.
            extra: Options that are not in the configuration.
        """
        file = GroupedOption(
            "--config",
            type=file_path,
            metavar="FILE",
            in_files=False,
            help="Read options from a TOML, YAML or JSON file. The command line takes precedence.",
        )
        own: list[click.Parameter] = [as_option(flag) for flag in flags(config)]
        params = [*own, *extra, file, *shared_options()]
        super().__init__(name, params=params, help=body.__doc__)
        self.config = config
        self.body = body

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's options and, once --model is read, the family's."""
        params = super().get_params(ctx)
        family: ModelFamily | None = ctx.meta.get(FAMILY)
        if family is None:
            return params
        options = [
            GroupedOption(
                f"--{option.name}",
                group=family.name,
                help=option.help,
                # click takes False to mean that the value may be left out.
                is_flag=option.is_flag or None,
            )
            for option in self._family_options(family)
        ]
        return [*options, *params]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read --config, --model and -p first: what the other options are depends on
        them.
        """
        several = [flag.name for flag in flags(self.config) if flag.several]
        args = repeat_flags(args, several)
        if not ctx.resilient_parsing:
            self._read_first(ctx, args)
        return super().parse_args(ctx, args)

    def _read_first(self, ctx: click.Context, args: list[str]) -> None:
        from dstrain.registry.discovery import load_family

        first = self.make_context(
            ctx.info_name,
            list(args),
            parent=ctx.parent,
            resilient_parsing=True,
            ignore_unknown_options=True,
            allow_extra_args=True,
        ).params
        file = first["config"]
        values = read_file(file) if file is not None else {}
        if first.get("run") is not None:
            values.setdefault("model", read_resolved(first["run"])["model"])
        model = first["model"] or values.get("model")
        if model is None:
            return  # click says that it is required
        disabled = [name.removeprefix("no:") for name in values.get("p", ())]
        ctx.meta[FAMILY] = load_family(
            str(model), first["disabled_plugins"] or disabled
        )
        if values:
            path = file or first["run"]
            ctx.meta[CONFIG_FILE] = path
            options = {
                param.opts[0].lstrip("-"): param
                for param in self.get_params(ctx)
                if isinstance(param, GroupedOption) and param.in_files
            }
            ctx.default_map = default_map(path, values, options)

    def invoke(self, ctx: click.Context) -> None:
        """Build the configuration and call the body with it."""
        from dstrain.distributed.signals import interrupt_on_signals

        family: ModelFamily = ctx.meta[FAMILY]
        family_options = {}
        for option in self._family_options(family):
            value = ctx.params.pop(option.name)
            if value not in (None, False):
                family_options[option.name] = str(value)
        values = {flag.name: ctx.params.pop(flag.name) for flag in flags(self.config)}
        ctx.params.pop("config")
        config = self.config(
            **values,
            family_options=family_options,
            disabled_plugins=ctx.params.pop("disabled_plugins"),
        )
        try:
            _check_family(config, family)
            with interrupt_on_signals():
                self.body(config, **ctx.params)
        except UsageError as error:
            for param in self.get_params(ctx):
                if error.where == param.opts[0]:
                    error.where = place(param, ctx)
            raise

    def format_options(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the options group by group; the family's follow the model's."""
        family: ModelFamily | None = ctx.meta.get(FAMILY)
        groups: list[str] = list(get_args(Group))
        if family is not None:
            groups.insert(1, family.name)
        records = [(one, one.get_help_record(ctx)) for one in self.get_params(ctx)]
        for group in groups:
            rows = [
                record
                for param, record in records
                if record and getattr(param, "group", "general") == group
            ]
            if rows:
                with formatter.section(group):
                    formatter.write_dl(rows)

    def _family_options(self, family: ModelFamily) -> list[Option]:
        """Return the family's options that act here; what is saved is for training."""
        is_training = issubclass(self.config, TrainConfig)
        return [option for option in family.options if is_training or not option.saves]


def _check_family(config: ModelChoice, family: ModelFamily) -> None:
    """Refuse what the family's record refuses, before anything of it is imported."""
    from dstrain.registry.discovery import variant_of

    if config.variant is not None:
        variant_of(family, config.variant)
    for option in family.options:
        names_file = option.component and not option.field
        if config.toy and names_file and option.name in config.family_options:
            what = f"has no effect: --toy builds its own {option.component}"
            raise UsageError(f"--{option.name}", what)
