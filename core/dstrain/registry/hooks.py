"""The table of contents of what a plugin can add by hooks (entry-point group `dstrain`).

Beside these, `dstrain.options` names a class of options (config/plugin_records.py),
`dstrain.models` the record of a family (registry/family.py), `dstrain.commands` the names
of commands, for help. An optimizer or a schedule needs no plugin: its path names it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pluggy

from dstrain.installed import HOOK_GROUP

if TYPE_CHECKING:
    import click
    from torch import nn
    from torch.optim import Optimizer

    from dstrain.graph import Task
    from dstrain.graph.keeper import Keeper, KeeperRequest


hookspec = pluggy.HookspecMarker(HOOK_GROUP)
hookimpl = pluggy.HookimplMarker(HOOK_GROUP)
RETIRED: Mapping[str, str] = MappingProxyType(
    {"dstrain_quantizers": "dstrain_keepers", "dstrain_step_end": "dstrain_observers"}
)
"""Hook that there was -> the one that took its place."""


@dataclass(frozen=True)
class Section:
    """A part of what a dry run prints."""

    title: str
    lines: Sequence[str] = ()
    """Lines that fit on a page."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The same as JSON data, for `--json`."""
    is_answer: bool = False
    """Whether it stands at the end, where a reader looks for an answer."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", tuple(self.lines))
        "".join(self.page())
        json.dumps({**self.data})

    def page(self) -> list[str]:
        """Return its lines on a page."""
        return ["", self.title, *self.lines]


@dataclass(frozen=True)
class Defaults:
    """Values of options, which what is typed and what a file says take precedence of."""

    source: str
    """Where they are from, as errors say it."""
    values: Mapping[str, Any]
    """Option -> its value as text, or a list of texts, as a file of options has them."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Option -> what is added to an error about its value."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", dict(self.values))
        if None in self.values.values():
            raise TypeError("values are texts, not None")


class Hooks:
    """The hooks. A plugin's module implements any of them with `@hookimpl`, and says
    `api = 2`: the version of the interface that it is made for.

    A plugin that does not fit is left out and named when it is registered. One that
    fails in a hook without which the run would be another one is refused by its name:
    keepers, defaults, the updater, changed steps. Other hooks that fail are warned of.
    """

    @hookspec
    def dstrain_commands(self) -> Sequence[click.Command]:
        """Return extra commands of the command line; one named as dstrain's own, or as
        another plugin's, is left out.
        """
        raise NotImplementedError

    @hookspec
    def dstrain_hints(self) -> Mapping[str, str]:
        """Return word -> sentence, what to do instead of a word that is not ours: `--NAME`
        is an option, `--NAME VALUE` its value, `$NAME` a variable; `*` stands for anything.
        """
        raise NotImplementedError

    @hookspec
    def dstrain_tasks(self) -> Sequence[Task]:
        """Return extra tasks for `--task`, each with its loss; names are as for commands."""
        raise NotImplementedError

    @hookspec
    def dstrain_forms(self, options: Any) -> Sequence[Any]:
        """Return forms of datasets (`dstrain.plugin.Form`) for a run with these options,
        a TrainConfig: each finds the rows of a dataset, reads them from files, or opens
        URLs. Two that find rows in one place are refused, unless --dataset_form chooses.
        """
        raise NotImplementedError

    @hookspec
    def dstrain_keepers(self, request: KeeperRequest) -> Sequence[Keeper]:
        """Return how the weights of components are kept, as the plugin's options ask, each
        a `Keeper`; an empty list where they ask nothing. A component has at most one of a
        kind. Raises UsageError for what the command cannot have.
        """
        raise NotImplementedError

    @hookspec
    def dstrain_lora_formats(self) -> Sequence[Any]:
        """Return formats of LoRA files, each a `dstrain.plugin.lora.LoraFormat`: values of
        `--lora_format`, and files to read. A file that two of them read is refused.
        """
        raise NotImplementedError

    @hookspec
    def dstrain_lora_types(self) -> Sequence[Any]:
        """Return types of LoRA layers, each a `dstrain.plugin.lora.LoraType`: values of
        `--lora_type`.
        """
        raise NotImplementedError

    @hookspec
    def dstrain_rows(self, options: Any) -> Sequence[PromptRow]:
        """Return rows without latents, whose prompts stage 1 encodes as well, so that
        images can be made of them in training by `WatchedRun.images`; `options` is the
        TrainConfig.
        """
        raise NotImplementedError

    @hookspec
    def dstrain_observers(self, run: Any) -> Sequence[Any]:
        """Return observers of a run, of type `dstrain.plugin.Observer`; `run` is what
        they will see of it, a `dstrain.plugin.WatchedRun`, with all networks. A
        DstrainError refuses the run.
        """
        raise NotImplementedError

    @hookspec
    def dstrain_updater(self, options: Any) -> Any:
        """Return the `dstrain.plugin.Updater` that turns losses into steps, or None for
        dstrain's own; `options` is the TrainConfig. At most one plugin may return one.
        """
        raise NotImplementedError

    @hookspec
    def dstrain_defaults(
        self, options: Mapping[str, Any], disabled_plugins: Collection[str]
    ) -> Sequence[Defaults]:
        """Return values in place of the defaults of `train`, each with its source;
        `options` are those that are typed or in a file, as text. Raises UsageError for
        what is asked for and is not there.
        """
        raise NotImplementedError

    @hookspec
    def dstrain_dry_run(self, planned: Any) -> Sequence[Section]:
        """Return what `--dry_run` says beside rows, steps and files; `planned` is the
        PlannedRun. That of `generate` has `config`, `components` and `kept` alone, and
        'generate' as its `stage`.
        """
        raise NotImplementedError

    @hookspec
    def dstrain_modify_step(
        self, step: int, model: nn.Module, optimizer: Optimizer
    ) -> None:
        """Change what is trained, or the optimizer, after optimizer step `step`, from 1,
        in every process alike and without gradients. `model` is the TrainingModule.
        """


@dataclass(frozen=True)
class PromptRow:
    """A row without latents: inference with its prompt, while the run trains."""

    option: str
    """What asks for it, in messages: '--preview_prompt'."""
    text: str
    """As it was given; it names the row in a feature cache."""
    prompt: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of inference, by name; `seed` is that of the run otherwise."""

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            raise TypeError(f"prompt is {self.prompt!r}, no text")
