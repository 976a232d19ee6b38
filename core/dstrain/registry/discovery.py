"""Import the record of one family at a time. Imports no torch."""

from collections.abc import Collection

from dstrain.config import flags_by_name
from dstrain.config.options import GenerateConfig, TrainConfig
from dstrain.errors import UsageError, nearest
from dstrain.installed import (
    GROUP,
    HOOK_GROUP,
    OPTIONS_GROUP,
    Installed,
    how_to_have,
    how_to_install,
    installed,
    refuse_clash,
    refuse_other_interface,
)
from dstrain.registry.family import ModelFamily


def refuse_unknown(name: str) -> None:
    """Raise UsageError if a name is neither that of a plugin nor of a distribution."""
    known: set[str] = set()
    for group in (GROUP, HOOK_GROUP, OPTIONS_GROUP):
        for plugin in installed(group=group):
            known |= {plugin.name, plugin.distribution}
    if name not in known:
        raise UsageError("-p", _no_such("plugin", name, sorted(known)))


def load_family(name: str, disabled_plugins: Collection[str] = ()) -> ModelFamily:
    """Import the record of a family, and of no other; raises UsageError if no
    distribution provides it, or several do, or if the record is not usable.
    """
    plugins = installed(disabled_plugins)
    for plugin in plugins:
        if plugin.name == name:
            refuse_clash(plugin, plugins)
            return checked_family(plugin)
    names = list(dict.fromkeys(plugin.name for plugin in plugins))
    advice = filter(None, [how_to_have("model", name, disabled_plugins)])
    raise UsageError("--model", _no_such("model", name, names), *advice)


def usable_families(
    disabled_plugins: Collection[str] = (), names: Collection[str] | None = None
) -> tuple[list[ModelFamily], list[str]]:
    """Import the records of these families, by default all, without disabled plugins;
    return also why others cannot be used.
    """
    families, broken = [], []
    for name in dict.fromkeys(plugin.name for plugin in installed(disabled_plugins)):
        if names is not None and name not in names:
            continue
        try:
            family = load_family(name, disabled_plugins)
            reason = next(family.missing_targets(), "")
        except UsageError as error:
            reason = error.what
        if reason:
            broken.append(f"{name} is left out, since it is broken: {reason}")
        else:
            families.append(family)
    return families, broken


def _no_such(kind: str, name: str, known: Collection[str]) -> str:
    names = ", ".join(known) or "none"
    return f"no {kind} named {name!r}; installed: {names}{nearest(name, known)}"


def variant_of(family: ModelFamily, name: str | None) -> str:
    """Return the variant of this name, or the family's first one for None; raises
    UsageError for a variant that the family does not have.
    """
    if name is None:
        return family.variants[0]
    if name not in family.variants:
        hint = nearest(name, family.variants)
        known = ", ".join(family.variants)
        what = f"{family.name} has no variant {name!r}; variants: {known}{hint}"
        raise UsageError("--variant", what)
    return name


def checked_family(plugin: Installed) -> ModelFamily:
    """Import the record of a family; raise UsageError if it cannot be used."""
    family = plugin.load()
    if not isinstance(family, ModelFamily):
        what = f"{plugin.entry_point} is a {type(family).__name__}, not a dstrain.plugin.ModelFamily"
        raise UsageError(plugin.where, what)
    refuse_other_interface(plugin, family.api)
    if family.name != plugin.name:
        what = (
            f"its entry point is named {plugin.name!r}, but its record {family.name!r}"
        )
        raise UsageError(plugin.where, what)
    for problem in family.problems():
        raise UsageError(plugin.where, problem)
    for name in family.needs:
        if name not in {one.name for one in installed(group=HOOK_GROUP)}:
            what = f"it needs the plugin {name}, which is not installed"
            raise UsageError(plugin.where, what, how_to_install(name))
    taken = {"config", "debug", "format", "help", "p", "recipe", "versions"}
    taken |= flags_by_name(TrainConfig).keys() | flags_by_name(GenerateConfig).keys()
    for option in family.options:
        if option.name in taken:
            what = f"its flag --{option.name} is already one of dstrain's own"
            raise UsageError(plugin.where, what)
    return family
