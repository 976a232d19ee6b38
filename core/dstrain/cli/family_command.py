"""The commands that open a model: they have the options of a configuration and, once it is
known, of the model's family.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from dstrain.cli.click_options import (
    ORIGINS,
    GroupedOption,
    as_option,
    file_path,
    place,
    repeat_flags,
    shared_options,
)
from dstrain.cli.completion import FAMILY, folded
from dstrain.cli.config_file import read_file
from dstrain.cli.errors import DISABLED, hints, variables_without_effect
from dstrain.cli.file_values import default_map, for_toy, is_true, with_choice_of_model
from dstrain.cli.help import (
    BRIEF,
    HELP,
    Command,
    first_clause,
    show_brief,
    write_sections,
)
from dstrain.config import flags, read_resolved
from dstrain.config.datasets import repeated_base_paths
from dstrain.config.options import ModelChoice, TrainConfig
from dstrain.config.plugin_options import headings
from dstrain.console import get_logger, number_of, status
from dstrain.errors import UsageError
from dstrain.installed import how_to_have
from dstrain.registry import ModelFamily, Option

if TYPE_CHECKING:  # it imports pluggy
    from dstrain.registry import Defaults

logger = get_logger(__name__)

TYPED = "dstrain.typed"
"""Key of `Context.meta` for the names of the options that are typed."""
DEFAULTS = "dstrain.defaults"
"""Key of `Context.meta` for the values that plugins have in place of defaults."""


class FamilyCommand(Command):
    """A command with the options of a configuration, and of the family that --model names
    or --model_id tells.
    """

    def __init__(
        self,
        name: str,
        config: type[ModelChoice],
        body: Callable[..., None],
        extra: Sequence[click.Option] = (),
    ) -> None:
        """Make a command whose help is the body's docstring: it is called with the
        configuration, whose fields are options, and the values of the `extra` options.
        """
        file = GroupedOption(
            "--config",
            type=file_path,
            metavar="FILE",
            in_files=False,
            common=True,
            help="Read options from a TOML, YAML or JSON file. The command line takes precedence.",
        )
        brief = GroupedOption(
            "-h",
            is_flag=True,
            is_eager=True,
            in_files=False,
            common=True,
            expose_value=False,
            callback=show_brief,
            help="Show the common options and exit.",
        )
        own: list[click.Parameter] = [as_option(flag) for flag in flags(config)]
        params = [*own, *extra, file, *shared_options(), brief]
        super().__init__(name, params=params, help=body.__doc__)
        self.config = config
        self.body = body

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's options and, once the family is known, the family's."""
        params = super().get_params(ctx)
        family: ModelFamily | None = ctx.meta.get(FAMILY)
        if family is None:
            return params
        options = [
            GroupedOption(
                f"--{option.name}",
                group=family.name,
                common=True,
                help=option.help,
                # click takes False to mean that the value may be left out.
                is_flag=option.is_flag or None,
            )
            for option in self._family_options(family)
        ]
        return [*options, *params]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read --config, --model, --model_id and -p first: what the other options are
        depends on them.
        """
        several = [flag.name for flag in flags(self.config) if flag.several]
        args = repeat_flags(args, several)
        if issubclass(self.config, TrainConfig):
            args = repeated_base_paths(args)
        if not ctx.resilient_parsing:
            self._read_first(ctx, args)
        elif not ctx.ignore_unknown_options:
            # A shell asks for completions; what is typed may be half a command.
            with suppress(Exception):
                self._read_first(ctx, args)
        return super().parse_args(ctx, args)

    def shell_complete(
        self, ctx: click.Context, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Complete options, the family's among them, typed in either spelling."""
        return super().shell_complete(ctx, folded(incomplete))

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return --help: -h is another one here."""
        found = super().get_help_option(ctx)
        if found is not None:
            found.help = "Show all options and exit."
        return found

    def _read_first(self, ctx: click.Context, args: list[str]) -> None:
        # Imported once a command runs, since they import pluggy.
        from dstrain.models.naming import family_of
        from dstrain.registry import load_family

        early = self.make_context(
            ctx.info_name,
            list(args),
            parent=ctx.parent,
            resilient_parsing=True,
            ignore_unknown_options=True,
            allow_extra_args=True,
        )
        first = early.params
        typed = {
            name: value
            for name, value in first.items()
            if early.get_parameter_source(name) is ParameterSource.COMMANDLINE
        }
        ctx.meta[TYPED] = frozenset(typed)
        file = first["config"]
        values = read_file(file) if file else {}
        if first.get("run") is not None:
            values.setdefault("model", read_resolved(first["run"])["model"])
        disabled = first["disabled_plugins"] or [
            name.removeprefix("no:") for name in values.get("p", ())
        ]
        ctx.meta[DISABLED] = tuple(disabled)
        named = first["model_id"] or values.get("model_id")
        model = first["model"] or values.get("model")
        is_run = not ctx.resilient_parsing and {*HELP}.isdisjoint(args)
        defaults = self._defaults({**values, **typed}, disabled, is_run)
        ctx.meta[DEFAULTS] = defaults
        for one in defaults:
            model = model or one.values.get("model")
        if model is not None:
            try:
                ctx.meta[FAMILY] = load_family(str(model), disabled)
            except UsageError as error:
                error.help_lines += (*hints(f"--model {model}", ctx),)
                raise
        elif named is not None:
            with status():
                known = family_of(str(named), disabled, in_help=not is_run)
            if known is None:
                return
            ctx.meta[FAMILY] = known
            ctx.default_map = {"model": known.name}
        else:
            for name in values:
                if advice := how_to_have("options", name, disabled):
                    what = "no such option is installed"
                    raise UsageError(f"{file}:{name}", what, advice)
            return  # click says that it is required
        family: ModelFamily = ctx.meta[FAMILY]
        values = with_choice_of_model(first, values, family, file)
        # What is read later takes precedence, and what is typed over all of it.
        read: list[tuple[object, dict[str, Any]]] = []
        is_toy = first["toy"] or is_true(values.get("toy", ""))
        for one in reversed(defaults):
            own = dict(one.values)
            read.append((one.source, for_toy(own, family) if is_toy else own))
        if values:
            read.append((file or first["run"], values))
        options = {
            param.opts[0].lstrip("-"): param
            for param in self.get_params(ctx)
            if isinstance(param, GroupedOption) and param.in_files
        }
        origins = ctx.meta.setdefault(ORIGINS, {})
        for origin, given in read:
            found = default_map(origin, given, options)
            origins.update(dict.fromkeys(found, origin))
            ctx.default_map = {**(ctx.default_map or {}), **found}

    def _defaults(
        self, given: dict[str, Any], disabled: Collection[str], is_run: bool
    ) -> "list[Defaults]":
        """Ask plugins for values below those that are given; for help and completion, only if
        an option is given that says where values are from.
        """
        if not issubclass(self.config, TrainConfig):
            return []
        says = any(
            one.name in given for one in flags(self.config) if "origin" in one.affects
        )
        if not says and not is_run:
            return []
        from dstrain.registry import Defaults, load_extensions

        found = load_extensions(disabled).answers(
            "dstrain_defaults",
            Defaults,
            True,
            options=MappingProxyType(given),
            disabled_plugins=disabled,
        )
        return [one for _, one in found]

    def invoke(self, ctx: click.Context) -> None:
        """Build the configuration and call the body with it."""
        from dstrain.distributed import interrupt_on_signals

        family: ModelFamily = ctx.meta[FAMILY]
        family_options = {}
        for option in self._family_options(family):
            value = ctx.params.pop(option.name)
            if value not in (None, False):
                family_options[option.name] = str(value)
                if option.idle:
                    logger.info(f"--{option.name} has no effect: {option.idle}")
        values: dict[str, Any] = {}
        for flag in flags(self.config):
            value = ctx.params.pop(flag.name)
            # click's () for one that is not given
            values[flag.name] = None if value == () and flag.default is None else value
        ctx.params.pop("config")
        config = self.config(
            **values,
            family_options=family_options,
            typed=ctx.meta[TYPED],
            disabled_plugins=ctx.params.pop("disabled_plugins"),
        )
        for line in variables_without_effect(config.disabled_plugins):
            logger.info(line)
        try:
            _check_family(config, family)
            with interrupt_on_signals():
                self.body(config, **ctx.params)
        except UsageError as error:
            for param in self.get_params(ctx):
                if error.where == param.opts[0]:
                    error.where = place(param, ctx)
            for one in ctx.meta[DEFAULTS]:
                for name, note in one.notes.items():
                    if error.where == f"{one.source}:{name}":
                        error.what += f"; {note}"
            raise

    def format_options(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the options group by group; the family's follow the model's. -h shows
        the common ones alone, under fewer headings.
        """
        is_brief = BRIEF in ctx.meta
        family: ModelFamily | None = ctx.meta.get(FAMILY)
        own = self.get_params(ctx)
        groups = headings(getattr(param, "group", "general") for param in own)
        if family is not None and family.name in groups:
            groups.remove(family.name)
            groups.insert(1, family.name)
        # -h shows itself and --help, which are no `GroupedOption`, and the common ones.
        params = [one for one in own if not is_brief or getattr(one, "common", True)]
        rows = []
        for group in groups:
            heading = group.partition(":")[0] if is_brief else group
            for param in params:
                record = param.get_help_record(ctx)
                if record is None or getattr(param, "group", "general") != group:
                    continue
                name, text = record
                rows.append((heading, (name, first_clause(text) if is_brief else text)))
        write_sections(formatter, rows)
        if is_brief:
            more = number_of(len(own) - len(params), "more option")
            formatter.write_paragraph()
            formatter.write_text(f"{more}: {ctx.command_path} --help")

    def _family_options(self, family: ModelFamily) -> list[Option]:
        """Return the family's options that act here; what is saved is for training."""
        is_training = issubclass(self.config, TrainConfig)
        return [option for option in family.options if is_training or not option.saves]


def _check_family(config: ModelChoice, family: ModelFamily) -> None:
    """Refuse what the family's record refuses, before anything of it is imported."""
    from dstrain.registry import variant_of

    if config.variant is not None:
        variant_of(family, config.variant)
    for option in family.options:
        names_file = option.component and not option.field
        if config.toy and names_file and option.name in config.family_options:
            what = f"has no effect: --toy builds its own {option.component}"
            raise UsageError(f"--{option.name}", what)
