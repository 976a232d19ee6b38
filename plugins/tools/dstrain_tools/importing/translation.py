"""Turn a configuration of another tool into options of a training run."""

import inspect
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dstrain.plugin import TrainConfig, redacted
from dstrain.plugin.commands import flags_by_name

from dstrain_tools.importing.context import Context, Conversion, Model
from dstrain_tools.importing.conversions import (
    encoders,
    memory,
    model_files,
    network,
    optimizer,
    output as outputs,
    plain,
    previews,
    schedule,
    timesteps,
    validation,
)
from dstrain_tools.importing.conversions.datasets import (
    captions,
    frames,
    loss_weights,
    pairs,
    sizes,
)
from dstrain_tools.importing.entries import (
    Entry,
    NoCounterpart,
    Outcome,
    Result,
    Source,
)
from dstrain_tools.importing.tables import Part, Rule, Table

CONVERSIONS = (
    encoders,
    memory,
    model_files,
    network,
    optimizer,
    outputs,
    plain,
    previews,
    schedule,
    timesteps,
    validation,
    captions,
    frames,
    loss_weights,
    pairs,
    sizes,
)
"""The modules whose functions tables name."""
REPEATS = "repeats"
LOSS_WEIGHT = "loss_weight"
"""The options that only a dataset has."""
JOINED = {"fp8_models": ",", "offload_models": ",", "quant_options": ";"}
"""Options that several keys may add to -> what stands between."""
SECRET = re.compile(r"(api_?key|password|secret|(^|_)token)$", re.IGNORECASE)
SECRET_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|[0-9a-f]{40})\b")
OFF: tuple[Any, ...] = (None, "", False, [])
SECRET_REASON = (
    "is a secret, which is written nowhere: set it as a variable of your shell"
)


@dataclass(frozen=True)
class Setting:
    """The value of an option, and which key it is from."""

    value: Any
    comment: str
    is_default: bool = False
    gives_way: bool = False
    """Whether another key's value stays, without a conflict."""


@dataclass
class Translation:
    """What a configuration is here."""

    title: str
    """Name of the tool."""
    family: str
    """Name of the family of the model."""
    run: dict[str, Setting] = field(default_factory=dict)
    datasets: list[dict[str, Setting]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    defaults: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keys that are not given -> the options of their defaults in the tool."""
    tables: Mapping[Path, str] = field(default_factory=dict)
    """Tables of datasets that are written beside the output."""

    def drop(self, option: str, reason: str) -> bool:
        """Leave an option out, and say so of the keys it is from; return whether it was
        there.
        """
        found = False
        for options in (self.run, *self.datasets):
            found = options.pop(option, None) is not None or found
        for index, one in enumerate(self.outcomes):
            if option in one.result.options:
                rest = {k: v for k, v in one.result.options.items() if k != option}
                result = Result(rest, one.result.note, reason)
                self.outcomes[index] = Outcome(one.entry, result)
        for key, own in list(self.defaults.items()):
            if option in own:
                del self.defaults[key]
                place = f"{key}, a default of {self.title}"
                rest = {k: v for k, v in own.items() if k != option}
                result = Result(rest, lost=reason)
                self.outcomes.append(Outcome(Entry(key, None, place), result))
        return found


CONVERTED = ("option", "value", "context")
"""The parameters of a conversion; other functions of the modules help those."""


@cache
def conversions() -> Mapping[str, Conversion]:
    """Return the conversions by the names that tables use."""
    return {
        name: one
        for module in CONVERSIONS
        for name, one in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_")
        and one.__module__ == module.__name__
        and tuple(inspect.signature(one).parameters) == CONVERTED
    }


def translate(
    source: Source, table: Table, model: Model, output: Path | None
) -> Translation:
    """Return the options that a configuration means, and what becomes of each key."""
    given = {entry.key: entry for entry in source.run}
    tables: dict[Path, str] = {}
    context = Context(source, table, model, output, given, tables=tables)
    found = Translation(
        table.title, model.family.name, outcomes=list(source.apart), tables=tables
    )
    _place_model(found, source, model)
    for entry in source.run:
        found.outcomes.append(_run_outcome(entry, table, context, found))
    if source.run:
        _place_trained(found, source, context)
        for key, value in table.defaults["run"].items():
            _place_default(key, value, table.run, table, context, found, found.run)
        for option, (value, reason) in table.always.items():
            found.run.setdefault(option, Setting(value, reason, True))
            found.defaults[reason] = {option: value}
    for number, own in enumerate(source.datasets, 1):
        _place_dataset(number, own, table, context, found)
    _lift_the_only_dataset(found)
    return found


def _place_model(found: Translation, source: Source, model: Model) -> None:
    """Name the model: by its id, or by its family where flags name its files."""
    if not model.model_id or source.tool == "diffsynth":
        found.run["model"] = Setting(model.family.name, model.reason)
    else:
        found.run["model_id"] = Setting(model.model_id, model.reason)


def _place_trained(found: Translation, source: Source, context: Context) -> None:
    """Train full weights where the tool trains no LoRA."""
    if not context.trains_lora and source.tool != "diffsynth":
        what = f"{found.title} trains full weights without a LoRA"
        try:
            name = model_files.denoiser(context)
        except ValueError:
            # The report has the key of the timestep that cannot be read.
            name = context.model.family.default_trainable
        name = ",".join([name, *context.trained_encoders])
        found.run["trainable_models"] = Setting(name, what)


def _run_outcome(
    entry: Entry, table: Table, context: Context, found: Translation
) -> Outcome:
    rule = table.run.rule(entry.key)
    if rule is None and table.same_names:
        own = {option.name for option in context.model.family.options}
        if entry.key in own or entry.key in flags_by_name(TrainConfig):
            rule = Rule(entry.key, "same_name")
    return _converted(entry, rule, table.run, context, found, found.run)


def _place_dataset(
    number: int,
    own: Iterable[Entry],
    table: Table,
    context: Context,
    found: Translation,
) -> None:
    keys = {entry.key: entry for entry in own}
    inner = Context(
        context.source,
        table,
        context.model,
        context.output,
        context.given,
        keys,
        number=number,
        tables=context.tables,
    )
    options: dict[str, Setting] = {}
    found.datasets.append(options)
    known = {one.entry.place: index for index, one in enumerate(found.outcomes)}
    for entry in keys.values():
        rule = table.dataset.rule(entry.key)
        outcome = _converted(entry, rule, table.dataset, inner, found, options)
        index = known.get(entry.place)
        if index is None:
            found.outcomes.append(outcome)
        elif outcome.result.lost or not found.outcomes[index].result.options:
            found.outcomes[index] = outcome
    for key, value in table.defaults["dataset"].items():
        _place_default(key, value, table.dataset, table, inner, found, options)


def _place_default(
    key: str,
    value: Any,
    part: Part,
    table: Table,
    context: Context,
    found: Translation,
    options: dict[str, Setting],
) -> None:
    """Say what the tool does without a key, where we would do something else."""
    if key in (context.own or context.given):
        return
    entry = Entry(key, value, f"{key}, a default of {table.title}", is_default=True)
    rule = part.rule(key)
    result = _result(entry, rule, part, context)
    for option, one in result.options.items():
        place = options if _is_of_dataset(option, context) else found.run
        if option not in place:
            place[option] = Setting(one, entry.place, True)
            found.defaults[key] = result.options
    if result.lost:
        found.outcomes.append(Outcome(entry, result))


def _converted(
    entry: Entry,
    rule: Rule | None,
    part: Part,
    context: Context,
    found: Translation,
    options: dict[str, Setting],
) -> Outcome:
    """Return what becomes of an entry, whose options are put in their place."""
    if is_secret(entry):
        return Outcome(entry, Result(lost=SECRET_REASON))
    result = _result(entry, rule, part, context)
    comment = entry.place + (f" ({result.note})" if result.note else "")
    for option, value in result.options.items():
        place = options if _is_of_dataset(option, context) else found.run
        setting = Setting(value, comment, gives_way=option in result.gives_way)
        other = _put(place, option, setting)
        if other:
            what = f"{option} is already given by {other}"
            rest = {k: v for k, v in result.options.items() if k != option}
            result = Result(rest, result.note, what)
    return Outcome(entry, result)


def _result(entry: Entry, rule: Rule | None, part: Part, context: Context) -> Result:
    if rule is None:
        reason = part.reason(entry.key)
        switch = context.table.switches.get(entry.key)
        if switch is not None and not context.is_on(switch):
            return Result(note=f"has an effect only with {switch}")
        is_off = entry.value in OFF or str(entry.value).lower() == "false"
        return Result(note="is off, as here") if reason.lost and is_off else reason
    context.key = entry.key
    try:
        return conversions()[rule.conversion](rule.option, entry.value, context)
    except NoCounterpart as error:
        return Result(lost=str(error))
    except OSError as error:
        return _unreadable(entry, error.strerror or "it is no file")
    except ValueError as error:
        return _unreadable(entry, str(error))


def _unreadable(entry: Entry, why: str) -> Result:
    return Result(lost=f"{shown(entry.value)} cannot be read: {why}")


def _is_of_dataset(option: str, context: Context) -> bool:
    flag = flags_by_name(TrainConfig).get(option)
    is_shared = flag is not None and "dataset" in flag.affects
    return bool(context.number) and (is_shared or option in (REPEATS, LOSS_WEIGHT))


def _put(options: dict[str, Setting], option: str, setting: Setting) -> str:
    """Set an option; return which key says otherwise, '' if none does."""
    old = options.get(option)
    if old is None or old.is_default:
        options[option] = setting
        return ""
    if str(old.value) == str(setting.value):
        return ""
    comment = f"{old.comment}; {setting.comment}"
    flag = flags_by_name(TrainConfig).get(option)
    if option in JOINED:
        mark = JOINED[option]
        parts = [*str(old.value).split(mark), *str(setting.value).split(mark)]
        options[option] = Setting(mark.join(dict.fromkeys(parts)), comment)
    elif option == "model_paths":
        paths = [*json.loads(old.value), *json.loads(setting.value)]
        options[option] = Setting(json.dumps(paths), comment)
    elif flag is not None and flag.many:
        options[option] = Setting([*old.value, *setting.value], comment)
    elif setting.gives_way:
        return ""
    else:
        return old.comment
    return ""


def _lift_the_only_dataset(found: Translation) -> None:
    """Give the options of a single dataset as the run's own, unless its loss has a
    weight, which only one of several has.
    """
    if len(found.datasets) != 1 or LOSS_WEIGHT in found.datasets[0]:
        return
    for option, setting in found.datasets.pop().items():
        found.run["dataset_repeat" if option == REPEATS else option] = setting


def is_secret(entry: Entry) -> bool:
    """Return whether a key holds what nobody else may read."""
    if not entry.value or isinstance(entry.value, bool):
        return False
    name = entry.key.rpartition(".")[2]
    text = str(entry.value)
    has_one = SECRET_VALUE.search(text) or redacted(text) != text
    return bool(SECRET.search(name) or has_one)


def shown(value: Any) -> str:
    """Return a value as a report has it: on one line, not too long."""
    text = " ".join(redacted(str(value)).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
