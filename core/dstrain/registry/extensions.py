"""Ask the plugins that implement hooks; one that fails harms no other."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from dstrain.config.plugin_options import changed_of_plugins
from dstrain.console import get_logger
from dstrain.errors import DstrainError, UsageError
from dstrain.installed import HOOK_GROUP, Installed, NamingPlugin, described, installed
from dstrain.storage import hash_json

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from dstrain.graph.keeper import KeeperRequest
    from dstrain.graph.keepers import Keepers

logger = get_logger(__name__)
T = TypeVar("T")
told: ContextVar[set[str]] = ContextVar("told")
"""What `warn_once` has logged in a command."""


@dataclass(frozen=True, eq=False)
class Extensions:
    """The plugins that implement hooks."""

    managers: dict[Installed, pluggy.PluginManager]
    """A manager for each plugin, so that one that raises harms no other."""
    broken: list[str]
    """Why other plugins, or things that these offer, cannot be used."""

    def _note(self, reason: str) -> None:
        if reason not in self.broken:
            self.broken.append(reason)

    def refuse_unheard(self, config: Any) -> None:
        """Raise UsageError for an option whose plugin is broken, so that nothing does what
        the option asks for.
        """
        enabled = installed(config.disabled_plugins, HOOK_GROUP)
        unheard = {one.distribution: one for one in enabled if one not in self.managers}
        for option, owner in changed_of_plugins(config):
            if plugin := unheard.get(owner.distribution):
                what = f"is of {plugin.where}, which is broken and would not be heard"
                own = [one for one in self.broken if one.startswith(plugin.where)]
                raise UsageError(f"--{option}", what, *own)

    def implement(self, hook: str) -> bool:
        """Return whether any of the plugins implements a hook."""
        managers = self.managers.values()
        return any(getattr(one.hook, hook).get_hookimpls() for one in managers)

    def _returned(self, plugin: Installed, hook: str, given: Mapping[str, Any]) -> Any:
        """Return what a plugin's hook returns, in a list; [] if it has no such hook."""
        call = getattr(self.managers[plugin].hook, hook)
        answers = call(**given)
        # pluggy leaves out None. A wrapper answers nothing itself.
        own = [one for one in call.get_hookimpls() if not one.hookwrapper | one.wrapper]
        if len(answers) < len(own):
            raise TypeError("returned None")
        return answers

    def _ask(
        self, plugin: Installed, hook: str, kind: type[T], given: Mapping[str, Any]
    ) -> list[T]:
        """Return what a plugin's hook returns, all of one kind."""
        found = []
        for answer in self._returned(plugin, hook, given):
            for one in answer:
                if not isinstance(one, kind):
                    what = f"returned {type(one).__name__}, not {kind.__name__}"
                    raise TypeError(what)
                found.append(one)
        return found

    def answers(
        self, hook: str, kind: type[T], needed: bool = False, **given: Any
    ) -> list[tuple[Installed, T]]:
        """Return what plugins answer, each with its plugin. One that raises a
        DstrainError refuses the run, and if the answer is `needed`, any other error
        does; else one that fails is named in the log and left out.
        """
        found = []
        for plugin in self.managers:
            try:
                answers = self._ask(plugin, hook, kind, given)
            except DstrainError:
                raise
            except (Exception, SystemExit) as error:
                if needed:
                    raise _fault(plugin, hook, error) from error
                logger.warning(f"{plugin.where}: {hook} failed: {described(error)}")
            else:
                found += [(plugin, one) for one in answers]
        return found

    def offered(
        self, hook: str, kind: type[Any], own: Collection[str], **given: Any
    ) -> dict[str, Any]:
        """Return what plugins offer by a hook that returns things of a kind with a
        name, by name; what cannot be used, such as one of dstrain's own names, is added
        to `broken`.
        """
        offers: dict[str, Any] = {}
        owners: dict[str, Installed] = {}
        for plugin in self.managers:
            try:
                items = self._ask(plugin, hook, kind, given)
            except (Exception, SystemExit) as error:
                self._note(f"{plugin.where}: {hook} failed: {described(error)}")
                continue
            for item in items:
                what_it_is = kind.__name__.lower().replace("lora", "LoRA ")
                word = f"{plugin.where}: its {what_it_is} {item.name!r}"
                if hasattr(item, "plugin"):
                    object.__setattr__(item, "plugin", plugin.where)
                if what := _unusable(item):
                    self._note(f"{word} {what}")
                elif item.name in own:
                    what = "has the same name as one of dstrain's own, and is ignored"
                    self._note(f"{word} {what}")
                elif item.name in owners:
                    other = owners[item.name].where
                    self._note(f"{word} is also provided by {other}; both are ignored")
                    offers.pop(item.name, None)
                else:
                    owners[item.name] = plugin
                    offers[item.name] = item
        return offers

    def hints(self) -> dict[str, str]:
        """Return what plugins say of words that are not ours; of one that several know,
        the first.
        """
        found: dict[str, str] = {}
        for plugin in self.managers:
            try:
                for answer in self._returned(plugin, "dstrain_hints", {}):
                    found = {**_texts(answer), **found}
            except (Exception, SystemExit) as error:
                what = f"{plugin.where}: dstrain_hints failed: {described(error)}"
                self._note(what)
                warn_once([what])
        return found

    def keepers(self, request: KeeperRequest) -> Keepers:
        """Return how plugins keep the weights of components; raises UsageError naming one
        that fails.
        """
        from dstrain.graph.keeper import Keeper
        from dstrain.graph.keepers import Keepers

        found = self.answers("dstrain_keepers", Keeper, True, request=request)
        return Keepers.checked((plugin.where, one) for plugin, one in found)

    def updater(self, options: Any) -> tuple[Installed, Any] | None:
        """Return the plugin that updates weights in a way of its own, and its updater;
        raises UsageError for two of them, and naming one that raised.
        """
        found: list[tuple[Installed, Any]] = []
        for plugin, manager in self.managers.items():
            with NamingPlugin(plugin.where, "its dstrain_updater hook"):
                answers = manager.hook.dstrain_updater(options=options)
            found += [(plugin, answer) for answer in answers]
        if len(found) > 1:
            (first, _), (second, _) = found[:2]
            what = f"updates weights in a way of its own, as {second.where} does"
            advice = f"disable one of them, such as with -p no:{second.name}"
            raise UsageError(first.where, what, advice)
        return found[0] if found else None

    def modify_step(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Let plugins change what is trained, or the optimizer, after a step; raises
        UsageError naming one that raised: without it, the run would be another one.
        """
        for plugin, manager in self.managers.items():
            hook = manager.hook.dstrain_modify_step
            try:
                hook(step=step, model=model, optimizer=optimizer)
            except (Exception, SystemExit) as error:
                when = f" after step {step}"
                raise _fault(plugin, "dstrain_modify_step", error, when) from error

    def modifiers(self, options: Any = None) -> dict[str, str]:
        """Return the plugins that change the steps of a run with these options, each with
        the digest of the code by which it does: a run is another one without them.
        """
        # It imports torch.
        from dstrain.graph import code_of

        found = {}
        for plugin, manager in self.managers.items():
            hooks = manager.hook.dstrain_modify_step.get_hookimpls()
            # Of a method, the function.
            functions = [
                getattr(one.function, "__func__", one.function) for one in hooks
            ]
            if functions:
                digests = [code_of(function).digest for function in functions]
                # A distribution may have several, which are disabled one by one.
                name = f"{plugin.name} ({plugin.distribution} {plugin.version})"
                found[name] = hash_json("dstrain_modify_step", digests)
        updating = self.updater(options)
        if updating is not None:
            plugin, updater = updating
            digest = code_of(type(updater)).digest
            name = f"{plugin.name} ({plugin.distribution} {plugin.version})"
            found[name] = hash_json("dstrain_updater", [found.get(name), digest])
        return found


def _fault(
    plugin: Installed, hook: str, error: BaseException, when: str = ""
) -> UsageError:
    """Return the error of a hook without which the run would be another one."""
    what = f"its {hook} hook raised {described(error)}{when}"
    advice = f"mend it, or disable it with -p no:{plugin.name}"
    return UsageError(plugin.where, what, advice)


def _unusable(offer: Any) -> str:
    """Return why an offer cannot be used, '' if it can."""
    if not offer.name:
        return "has no name"
    with suppress(re.error, TypeError):
        re.compile(getattr(offer, "keys", ""))
        return ""
    return "has keys that are no regular expression"


def warn_once(reasons: Collection[str]) -> None:
    """Log why things of plugins cannot be used, each once in a command."""
    known = told.get(set[str]())
    for reason in reasons:
        if reason not in known:
            logger.warning(reason)
        known.add(reason)


def _texts(answer: Mapping[str, str]) -> dict[str, str]:
    for word, sentence in answer.items():
        if not isinstance(word, str) or not isinstance(sentence, str):
            raise TypeError(f"expected word -> sentence, got {word!r}: {sentence!r}")
    return dict(answer)
