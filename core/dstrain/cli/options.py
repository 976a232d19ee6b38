"""Options of the command line, made from a configuration's flags and from a family's
record.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import click

from dstrain.cli.config_file import TextOrNumber, read_file, values_of
from dstrain.config.fields import (
    Flag,
    Group,
    LoraFile,
    NamedInput,
    flags,
    parse_input,
    parse_lora,
)
from dstrain.config.schema import ModelChoice, TrainConfig
from dstrain.errors import UsageError, nearest
from dstrain.registry.family import ModelFamily, Option

COMMAND_NAMES = ("train", "graph", "generate", "export", "toy", "models", "plugins")
"""The names of dstrain's own commands, in the order of --help; a plugin's command must
have another name.
"""
CONFIG_HELP = "A file that gives flags by name (TOML, YAML or JSON); those of the command line win."
FAMILY = "dstrain.family"
"""Where a context keeps the record of the family that --model names."""


class FilePath(click.ParamType[Path]):
    """A path as written; '' is refused, for it would mean the current folder."""

    name = "path"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        """Return the path."""
        return Path(str(value)) if str(value) else self.fail("is empty", param, ctx)


class OneOf(click.Choice[str]):
    """One of several names; for another the nearest is told."""

    def __init__(
        self, choices: Sequence[str], aliases: Mapping[str, str] | None = None
    ) -> None:
        """Accept aliases of some names without showing them."""
        super().__init__(choices)
        self.aliases = aliases or {}

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Return the name."""
        value = self.aliases.get(str(value), value)
        if value not in self.choices:
            names = ", ".join(self.choices)
            self.fail(
                f"want one of {names}, got {str(value)!r}{nearest(str(value), self.choices)}",
                param,
                ctx,
            )
        return str(value)


class LoraText(click.ParamType[LoraFile]):
    """FILE or FILE:SCALE."""

    name = "FILE[:SCALE]"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> LoraFile:
        """Return the file and its scale."""
        return value if isinstance(value, LoraFile) else parse_lora(str(value))


class InputText(click.ParamType[NamedInput]):
    """NAME=VALUE."""

    name = "NAME=VALUE"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> NamedInput:
        """Return the name and its text."""
        return value if isinstance(value, NamedInput) else parse_input(str(value))


class LeftOut(click.ParamType[str]):
    """The value of -p: no:NAME, where NAME is a plugin or a distribution that is
    installed.
    """

    name = "no:NAME"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Return NAME; whether such a plugin is there is read off metadata."""
        from dstrain.registry.discovery import refuse_unknown

        if not str(value).startswith("no:"):
            self.fail(f"want no:NAME, got {value!r}", param, ctx)
        name = str(value).removeprefix("no:")
        refuse_unknown((name,))
        return name


class FlagOption(click.Option):
    """An option that stands in a group of --help."""

    def __init__(self, *declarations: str, group: str, **settings: Any) -> None:
        """Make the option as click does, in `group`."""
        super().__init__(list(declarations), **settings)
        self.group = group


def shared_options() -> tuple[click.Option, ...]:
    """The options that every command has."""
    return (
        FlagOption(
            "-p",
            "left_out",
            group="general",
            type=LeftOut(),
            metavar="no:NAME",
            multiple=True,
            help="Leave a plugin out.",
        ),
        FlagOption(
            "--debug",
            group="general",
            is_flag=True,
            expose_value=False,
            help="Show tracebacks of errors.",
        ),
    )


def model_options() -> tuple[click.Option, ...]:
    """--model, --variant and --seed, for a command that has no configuration of its
    own.
    """
    return tuple(
        as_option(flag)
        for flag in flags(ModelChoice)
        if flag.name in ("model", "variant", "seed")
    )


def as_option(flag: Flag) -> click.Option:
    """The option for a flag. Its choices and bounds are left to `config.validate`,
    which scripts go through too.
    """
    settings: dict[str, Any] = {
        "group": flag.group,
        "help": flag.help,
        "required": flag.required,
    }
    if flag.kind is bool:
        return FlagOption(flag.spelled, is_flag=True, default=flag.default, **settings)
    types: dict[type, click.ParamType[Any]] = {
        int: click.INT,
        float: click.FLOAT,
        Path: FilePath(),
        LoraFile: LoraText(),
        NamedInput: InputText(),
    }
    settings.update(type=types.get(flag.kind, click.STRING), multiple=flag.many)
    if not flag.required:
        settings.update(
            default=flag.default,
            show_default=flag.default is not None and not flag.many,
        )
    if flag.choices:
        settings["metavar"] = f"[{'|'.join(flag.choices)}]"
    if flag.bare is not None:
        settings.update(
            is_flag=False, flag_value=flag.bare, metavar=f"[{flag.bare}|PATH]"
        )
    return FlagOption(flag.spelled, **settings)


class FamilyCommand(click.Command):
    """A command made from a configuration; the family that --model names adds its own
    flags.

    body: called with the configuration and the values of `extra` options.
    """

    def __init__(
        self,
        name: str,
        config: type[ModelChoice],
        body: Callable[..., None],
        extra: Sequence[click.Option] = (),
    ) -> None:
        """Make a command with a flag per field of `config`; its help text is the body's
        docstring.
        """
        own = [as_option(flag) for flag in flags(config)]
        file = FlagOption(
            "--config",
            group="general",
            type=FilePath(),
            metavar="FILE",
            help=CONFIG_HELP,
        )
        super().__init__(
            name, params=[*own, *extra, file, *shared_options()], help=body.__doc__
        )
        self.config, self.body = config, body

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's options and, once --model is read, the family's."""
        family: ModelFamily | None = ctx.meta.get(FAMILY)
        if family is None:
            return super().get_params(ctx)
        options = [
            # Not is_flag=False: click then takes the value for one that may be left
            # out.
            FlagOption(
                f"--{o.name}",
                group=family.name,
                help=o.help,
                **(
                    {"is_flag": True}
                    if o.is_flag
                    else {}
                    if o.component
                    else {"type": TextOrNumber()}
                ),
            )
            for o in self._own(family)
        ]
        return [*options, *super().get_params(ctx)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read --config, --model and -p before all else, then everything with the
        family's flags.
        """
        if not ctx.resilient_parsing:
            first = {
                "resilient_parsing": True,
                "ignore_unknown_options": True,
                "allow_extra_args": True,
            }
            given = self.make_context(
                ctx.info_name, list(args), parent=ctx.parent, **first
            ).params
            written = read_file(given["config"]) if given["config"] is not None else {}
            early = {
                option.opts[0].lstrip("-"): option for option in self._options(ctx)
            }
            early = {key: early[key] for key in ("model", "p")}
            found = values_of(
                given["config"],
                {k: v for k, v in written.items() if k in early},
                early,
                (),
            )
            model = given["model"] if given["model"] is not None else found.get("model")
            if model is not None:
                left_out = [
                    str(name).removeprefix("no:") for name in found.get("left_out", ())
                ]
                ctx.meta[FAMILY] = self._record(model, given["left_out"] or left_out)
                known = {
                    option.opts[0].lstrip("-"): option for option in self._options(ctx)
                }
                ctx.default_map = values_of(
                    given["config"], written, known, flags(self.config)
                )
        return super().parse_args(ctx, args)

    def _options(self, ctx: click.Context) -> list[click.Option]:
        """The options that a file may give: the configuration's, the family's, and -p."""
        names = {*(flag.name for flag in flags(self.config)), "left_out"}
        family: ModelFamily | None = ctx.meta.get(FAMILY)
        names |= {option.name for option in family.options} if family else set()
        return [
            param
            for param in self.get_params(ctx)
            if isinstance(param, click.Option) and param.name in names
        ]

    def invoke(self, ctx: click.Context) -> None:
        """Build the configuration and call the body with it."""
        family: ModelFamily = ctx.meta[FAMILY]
        given = {
            option.name: ctx.params.pop(option.name) for option in self._own(family)
        }
        values = {flag.name: ctx.params.pop(flag.name) for flag in flags(self.config)}
        options = {
            name: str(value)
            for name, value in given.items()
            if value not in (None, False)
        }
        ctx.params.pop("config")
        config = self.config(
            **values, family_options=options, left_out=ctx.params.pop("left_out")
        )
        _refuse(config, family)
        self.body(config, **ctx.params)

    def format_options(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the options group by group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            if row is not None:
                groups.setdefault(getattr(param, "group", "general"), []).append(row)
        known = get_args(Group)
        order = {group: place for place, group in enumerate(known)}
        # The family's own options have a group of its name, right after the model's.
        for group in sorted(groups, key=lambda group: order.get(group, 0.5)):
            rows = groups[group]
            with formatter.section(group):
                formatter.write_dl(rows)

    def _own(self, family: ModelFamily) -> list[Option]:
        """The family's flags that this command has: those of what is saved are for
        training.
        """
        return [
            option
            for option in family.options
            if not option.saves or issubclass(self.config, TrainConfig)
        ]

    def _record(self, model: str, left_out: Sequence[str]) -> ModelFamily:
        from dstrain.registry.discovery import load_family

        return load_family(model, left_out)


def _refuse(config: ModelChoice, family: ModelFamily) -> None:
    """What the family's record refuses before anything of it is imported."""
    from dstrain.registry.discovery import variant_of

    if config.variant is not None:
        variant_of(family, config.variant)
    for option in family.options:
        if (
            config.toy
            and option.component
            and not option.field
            and option.name in config.family_options
        ):
            raise UsageError(
                f"--{option.name}",
                f"has no effect: --toy builds its own {option.component}",
            )
