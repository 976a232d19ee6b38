"""Writes docs/reference/cli.md from the options themselves.

Run `python docs/reference/make_cli.py`; a test compares the page with a new one.
"""

import shlex
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import click
from dstrain import errors
from dstrain.cli.main import command_group
from dstrain.config.fields import Flag, Group, flags
from dstrain.config.schema import GenerateConfig, TrainConfig
from dstrain.registry.discovery import load_family

PAGE = Path(__file__).with_name("cli.md")
PLUGINS = Path(__file__).parents[2] / "plugins"
HEAD = """# The command line

`dstrain --model FAMILY ...` is `dstrain train --model FAMILY ...`; with a launcher, `accelerate launch -m dstrain ...`.
`--flag_name` and `--flag-name` are one. A flag that has no effect is refused.

This page is written by `python docs/reference/make_cli.py`.
"""
VARIABLES = """## Environment

| variable | does |
|---|---|
| `DSTRAIN_MODEL_BASE_PATH` | the folder that holds model ids, instead of `models` |
| `DIFFSYNTH_MODEL_BASE_PATH` | the same, where the other is not set |
"""


def page() -> str:
    """Return the whole page."""
    parts = [
        HEAD,
        _commands(),
        *_configurations(),
        *_families(),
        VARIABLES,
        _exit_codes(),
    ]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _commands() -> str:
    rows = [
        (f"`dstrain {name}`", " ".join(str(command.help).split()))
        for name, command in command_group().commands.items()
    ]
    return "## Commands\n\n" + _table(("command", "does"), rows)


def _configurations() -> Iterator[str]:
    commands = command_group().commands
    yield "## Flags of `train` and `graph`\n\n" + _by_group(flags(TrainConfig))
    yield "## Flags of `generate`\n\n" + _by_group(flags(GenerateConfig))
    yield "## Other flags\n\n" + _table(("flag", "of", ""), _others(commands))


def _by_group(known: Sequence[Flag]) -> str:
    used = {flag.group for flag in known}
    groups = [group for group in typing.get_args(Group) if group in used]
    tables = [
        f"### {group}\n\n"
        + _table(
            ("flag", "default", ""),
            [_row(flag) for flag in known if flag.group == group],
        )
        for group in groups
    ]
    return "\n".join(tables)


def _row(flag: Flag) -> tuple[str, str, str]:
    default = (
        "required"
        if flag.required
        else ""
        if flag.default in (None, ()) or flag.default is False
        else f"`{flag.default}`"
    )
    text = flag.help + (
        f" One of {', '.join(f'`{choice}`' for choice in flag.choices)}."
        if flag.choices
        else ""
    )
    return f"`{flag.spelled}`", default, text


def _others(commands: dict[str, click.Command]) -> Iterator[tuple[str, str, str]]:
    """Yield the options that are no configuration field, with the commands that take them."""
    fields = {
        flag.name for config in (TrainConfig, GenerateConfig) for flag in flags(config)
    }
    places: dict[tuple[str, str], list[str]] = {}
    for name, command in commands.items():
        for option in command.params:
            own = name == "toy" or option.name not in fields
            if isinstance(option, click.Option) and own:
                places.setdefault((option.opts[0], str(option.help)), []).append(name)
    for (spelled, text), names in places.items():
        yield (
            f"`{spelled}`",
            "every command" if len(names) == len(commands) else ", ".join(names),
            text,
        )


def _families() -> Iterator[str]:
    for folder in sorted(
        path.name for path in PLUGINS.iterdir() if (path / "pyproject.toml").is_file()
    ):
        family = load_family(folder)
        rows = [(f"`--{option.name}`", option.help) for option in family.options]
        targets = [
            (f"`{name}`", ", ".join(f"`{p}`" for p in patterns))
            for name, patterns in family.lora_targets.items()
        ]
        specs = {
            variant: family.load("pipelines")(variant) for variant in family.variants
        }
        defaults = [
            (f"`{variant}`", _spelled(spec.defaults)) for variant, spec in specs.items()
        ]
        yield (
            f"## Family `{family.name}`\n\nVariants: {', '.join(f'`{name}`' for name in family.variants)}. "
            f"Trained by default: LoRA in `{family.default_trainable}`.\n\n"
            + _table(("flag", ""), rows)
            + "\n"
            + _table(("component", "default of `--lora_target_modules`"), targets)
            + "\n"
            + _table(("variant", "defaults of `generate`"), defaults)
        )


def _spelled(values: Mapping[str, object]) -> str:
    own = {flag.name for flag in flags(GenerateConfig)}
    texts = {
        name: textwrap.shorten(str(value), 40, placeholder="...") or str(value)
        for name, value in values.items()
    }
    return ", ".join(
        f"`--{name} {shlex.quote(text)}`"
        if name in own
        else f"`--input {name}={shlex.quote(text)}`"
        for name, text in texts.items()
    )


def _exit_codes() -> str:
    rows = [
        ("0", "Done, or nothing was left to do."),
        ("1", "A defect of dstrain or of a plugin: report it."),
    ]
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.DstrainError)
    ]
    rows += [
        (str(kind.exit_code), str(kind.__doc__))
        for kind in kinds
        if kind is not errors.DstrainError
    ]
    return "## Exit codes\n\n" + _table(("code", "meaning"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n"
        for line in lines
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
