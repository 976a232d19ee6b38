"""Complete command lines in a shell: its script, where that is installed, and values that
options may have.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, suppress
from pathlib import Path
from types import MappingProxyType

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
)

from dstrain.errors import DstrainError, SystemFault, UsageError
from dstrain.registry import ModelFamily, Recipe, card_size, name_part, recipes_of

PROGRAM = "dstrain"
VARIABLE = "_DSTRAIN_COMPLETE"
"""The variable by which a shell asks for completions; its value is click's."""
FAMILY = "dstrain.family"
"""Key of `Context.meta` for the family that --model names, or --model_id tells."""
OPTION = "--install_completion"
SHELLS: MappingProxyType[str, type[ShellComplete]] = MappingProxyType(
    {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
)

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem[str]]]


def answer(group: click.Group, instruction: str) -> int:
    """Print what a shell asked for by `VARIABLE`: its script, or completions.

    Nothing else is printed, whatever fails: it would stand in the middle of what is typed.
    """
    shell, _, what = instruction.partition("_")
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
        try:
            asked = SHELLS[shell](group, {}, PROGRAM, VARIABLE)
            text = asked.source() if what == "source" else _completions(asked)
        except (Exception, SystemExit):
            return 1
    # As bytes: Windows would write the ends of lines otherwise.
    click.echo(text.encode())
    return 0


def _completions(asked: ShellComplete) -> str:
    words, incomplete = asked.get_completion_args()
    # click compares the names of options with the words, as they are.
    args = [folded(word) if word.startswith("--") else word for word in words]
    found = asked.get_completions(args, incomplete)
    return "\n".join(map(asked.format_completion, found))


def install(shell: str, environment: dict[str, str]) -> str:
    """Write the script of a shell where it looks for scripts, and return what to say.

    A startup file such as ~/.bashrc is never changed. Raises UsageError where the shell is
    not known, and for a file of the same name that is not such a script.
    """
    shell = shell or Path(environment.get("SHELL", "")).name
    if shell not in SHELLS:
        what = f"expected one of {', '.join(SHELLS)}, got {shell!r}"
        raise UsageError(OPTION, what if shell else "the shell is not known; name it")
    path = _place(shell, environment)
    script = SHELLS[shell](click.Group(PROGRAM), {}, PROGRAM, VARIABLE).source()
    try:
        done = _write(path, script)
    except OSError as error:
        raise SystemFault(str(path), str(error.strerror)) from error
    lines = [done, "it takes effect in new shells"]
    if shell == "bash":
        lines[1] += "; if it does not (without the package bash-completion),"
        lines.append(f"  add this line to ~/.bashrc: source '{path}'")
    if shell == "zsh":
        lines[1] += ", once this line is in ~/.zshrc:"
        lines.append(f"  autoload -Uz compinit && compinit; source '{path}'")
    return "\n".join(lines)


def _write(path: Path, script: str) -> str:
    """Write a script, unless it is there; return what was done."""
    if path.is_file():
        there = path.read_text(encoding="utf-8", errors="replace")
        if there == script:
            return f"{path} is already there"
        if VARIABLE not in there:
            what = f"{path} exists and is not of dstrain; it was not modified"
            raise UsageError(
                OPTION, what, "move it away, and run the same command again"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script, encoding="utf-8")
    return f"wrote {path}"


def _place(shell: str, environment: dict[str, str]) -> Path:
    """Return the file of a shell's script."""
    home = Path(environment.get("HOME") or Path.home())
    data = Path(environment.get("XDG_DATA_HOME") or home / ".local/share")
    if shell == "bash":
        own = environment.get("BASH_COMPLETION_USER_DIR")
        folder = Path(own) if own else data / "bash-completion"
        return folder / "completions" / PROGRAM
    if shell == "zsh":
        return data / "zsh/site-functions" / f"_{PROGRAM}"
    config = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    return config / "fish/completions" / f"{PROGRAM}.fish"


def install_option() -> click.Option:
    """Return --install_completion."""

    def run(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        if value is not None and not ctx.resilient_parsing:
            click.echo(install(value, dict(os.environ)))
            ctx.exit()

    return click.Option(
        [OPTION],
        metavar=f"[{'|'.join(SHELLS)}]",
        is_flag=False,
        flag_value="",
        expose_value=False,
        is_eager=True,
        callback=run,
        shell_complete=one_of(SHELLS),
        help="Let the shell complete dstrain's commands and options, and exit.",
    )


def one_of(values: Iterable[str]) -> Completer:
    """Return the completer of an option with these values."""
    known = tuple(values)

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        return _matching(((value, "") for value in known), incomplete)

    return complete


def families(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Complete the name of a family, by the metadata of what is installed."""
    from dstrain.installed import installed

    found = {one.name: f"{one.distribution} {one.version}" for one in installed()}
    return _matching(found.items(), incomplete)


def variants(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Complete the variant of the family that is named."""
    family = ctx.meta.get(FAMILY) or _named(ctx)
    return _matching(((one, "") for one in getattr(family, "variants", ())), incomplete)


def model_ids(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Complete a published id: of the family that is named, else of all; or a file."""
    from dstrain.registry import usable_families

    family = ctx.meta.get(FAMILY)
    families = [family] if family is not None else usable_families()[0]
    known = {one: family.name for family in families for one in family.model_files}
    return _matching(known.items(), incomplete) or [file_item(incomplete)]


def family_knowing(model_id: str) -> ModelFamily | None:
    """Return the family of a published id; None if that needs a closer look."""
    from dstrain.registry import usable_families

    found = [family for family in usable_families()[0] if family.knows(model_id)]
    return found[0] if len(found) == 1 else None


def optimizers(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Complete the short name of an optimizer."""
    from dstrain.training.optimizers import OPTIMIZERS

    return _matching(((name, "") for name in OPTIMIZERS), incomplete)


def recipe_names(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Complete the name of a recipe; only families that it can be of are imported."""
    typed = incomplete.lower().replace("_", "-")
    return _matching(((one.name, one.title) for one in _recipes(typed)), typed)


def recipe_goals(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Complete the goal of a recipe."""
    goals = sorted({one.goal for one in _recipes()})
    return _matching(((goal, "") for goal in goals), incomplete)


def recipe_cards(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Complete the size of a card that a recipe is for, the smallest first."""
    cards = sorted({one.card for one in _recipes()}, key=card_size)
    return _matching(((card, "") for card in cards), incomplete.upper())


def _recipes(beginning: str = "") -> list[Recipe]:
    """Return the recipes of the families of which a recipe's name may begin so."""
    from dstrain.installed import installed
    from dstrain.registry import usable_families

    names = [one.name for one in installed() if _may_be_of(one.name, beginning)]
    families, _ = usable_families(names=names)
    found: list[Recipe] = []
    for family in families:
        with suppress(DstrainError):
            found += recipes_of(family)
    return found


def _may_be_of(family: str, beginning: str) -> bool:
    """Return whether names of a family's recipes can begin so."""
    own = f"{name_part(family)}-"
    return own.startswith(beginning) or beginning.startswith(own)


def plugins(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Complete no:NAME with the plugins that are installed."""
    from dstrain.installed import HOOK_GROUP, installed

    found = (*installed(), *installed(group=HOOK_GROUP))
    return _matching(((f"no:{one.name}", "") for one in found), incomplete)


def files(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Let the shell complete a file."""
    return [file_item(incomplete)]


def file_item(incomplete: str) -> CompletionItem[str]:
    """Return what tells the shell to complete a file."""
    return CompletionItem(incomplete, type="file")


def spelled(
    incomplete: str, items: list[CompletionItem[str]]
) -> list[CompletionItem[str]]:
    """Return options as the user spells them: with '-' between words after a '-'."""
    if "-" in incomplete.lstrip("-"):
        for item in items:
            item.value = item.value[:2] + item.value[2:].replace("_", "-")
    return items


def folded(incomplete: str) -> str:
    """Return an option, or the beginning of one, in dstrain's own spelling."""
    name, equals, value = incomplete.partition("=")
    body = name.lstrip("-")
    dashes = name[: len(name) - len(body)]
    return dashes + body.replace("-", "_") + equals + value


def _named(ctx: click.Context) -> ModelFamily | None:
    """Return the family that a command without a configuration names."""
    from dstrain.registry import load_family

    with suppress(DstrainError):
        return load_family(str(ctx.params.get("model") or ctx.params.get("family")))
    return None


def _matching(
    known: Iterable[tuple[str, str]], incomplete: str
) -> list[CompletionItem[str]]:
    return [
        CompletionItem(value, help=help or None)
        for value, help in known
        if value.startswith(incomplete)
    ]
