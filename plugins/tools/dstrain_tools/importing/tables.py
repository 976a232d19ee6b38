"""The tables of tools: which key is which option here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from dstrain_tools.hints import advice
from dstrain_tools.importing.entries import Result

FOLDER = Path(__file__).with_name("tables")
TOOLS = ("musubi", "ai-toolkit", "kohya", "diffsynth")
LEAVE_OUT = "leave it out: "
"""How a line of core's advice begins for a flag without which nothing is lost."""


@dataclass(frozen=True)
class Rule:
    """An option that a key becomes, and the conversion of its value."""

    option: str
    conversion: str

    @classmethod
    def parsed(cls, text: str) -> "Rule":
        """Return the rule that `option`, or `option by conversion`, writes."""
        option, _, conversion = text.partition(" by ")
        return cls(option, conversion or "as_it_is")


@dataclass(frozen=True)
class Part:
    """The keys of a run, or those of a dataset."""

    carried: Mapping[str, Rule]
    needless: Mapping[str, str]
    """Key -> why nothing is lost without it."""
    missing: Mapping[str, str]
    """Key -> why it has no counterpart, and what to do."""

    def rule(self, key: str) -> Rule | None:
        """Return the rule of a key that is carried over; None for another."""
        found: Rule | None = _found(self.carried, key)
        return found

    def reason(self, key: str) -> Result:
        """Return what becomes of a key without a rule; core's advice on flags of other
        tools says it for those that the table lacks.
        """
        why = _found(self.needless, key)
        if why is not None:
            return Result(note=why)
        why = _found(self.missing, key)
        if why is not None:
            return Result(lost=why)
        name = key.rpartition(".")[2].replace("-", "_")
        for line, flags in advice().items():
            if any(fnmatchcase(name, flag) for flag in flags):
                is_needless = line.startswith(LEAVE_OUT)
                text = line.removeprefix(LEAVE_OUT)
                return Result(note=text) if is_needless else Result(lost=text)
        return Result(lost="is not known to the importer; see `dstrain train --help`")


@dataclass(frozen=True)
class Table:
    """What a tool's keys are here."""

    title: str
    run: Part
    dataset: Part
    defaults: Mapping[str, Mapping[str, Any]]
    """`run` and `dataset` -> key -> the tool's own default, where ours differs."""
    models: Sequence[Mapping[str, Any]]
    """How scripts and architectures tell the model; the first that fits is it."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Module of a LoRA -> the script that trains it."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Option -> its value and the reason, whatever the configuration says."""
    switches: Mapping[str, str] = field(default_factory=dict)
    """Key -> the key that switches on what it is a setting of."""
    shift: float = 1.0
    """The tool's shift of timesteps, where none is given."""
    same_names: bool = False
    """Whether a flag of the tool that dstrain has means the same here."""
    trains_encoders: bool = False
    """Whether text encoders of the family are trained if the tool trains them."""
    lora_of_encoders: bool = False
    """Whether the tool adds LoRA to text encoders unless told otherwise."""


def table_of(tool: str, family: str = "") -> Table:
    """Return the table of a tool, or its own one of a family, where it has one."""
    name = tool.replace("-", "_")
    own = f"{name}_{family}"
    data = _read(own if (FOLDER / f"{own}.json").is_file() else name)
    return Table(
        title=data["title"],
        run=_part(data["run"]),
        dataset=_part(data["dataset"]),
        defaults=data["defaults"],
        models=data["models"],
        modules=data.get("modules", {}),
        always=data.get("always", {}),
        switches=_by_key(data.get("switches", {})),
        shift=data.get("shift", 1.0),
        same_names=data.get("same_names", False),
        trains_encoders=data.get("trains_encoders", False),
        lora_of_encoders=data.get("lora_of_encoders", False),
    )


def _read(name: str) -> dict[str, Any]:
    """Return a table with what it has from the one that it is like; a default of null is
    one that it does not have.
    """
    data: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    if "like" not in data:
        return data
    base = _read(data["like"])
    for part in ("run", "dataset"):
        _without(base[part], data[part])
        old, own = base[part], data[part]
        own["carried"] = {**old["carried"], **own["carried"]}
        for kind in ("needless", "missing"):
            lines = {**old[kind], **own[kind]}
            own[kind] = {
                line: [*old[kind].get(line, ()), *own[kind].get(line, ())]
                for line in lines
            }
        both = {**base["defaults"][part], **data["defaults"][part]}
        kept = {key: value for key, value in both.items() if value is not None}
        data["defaults"][part] = kept
    return {**base, **data}


def _without(base: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Take what a table says of keys from the one that it is like."""
    said = [*own["carried"]]
    for kind in ("needless", "missing"):
        said += [key for keys in own[kind].values() for key in keys]
    base["carried"] = {
        key: rule for key, rule in base["carried"].items() if key not in said
    }
    for kind in ("needless", "missing"):
        lines = base[kind].items()
        base[kind] = {
            line: [key for key in keys if key not in said] for line, keys in lines
        }


def _part(data: Mapping[str, Any]) -> Part:
    carried = {key: Rule.parsed(text) for key, text in data["carried"].items()}
    return Part(carried, _by_key(data["needless"]), _by_key(data["missing"]))


def _by_key(lines: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {key: line for line, keys in lines.items() for key in keys}


def _found(known: Mapping[str, Any], key: str) -> Any:
    """Return what a key means: by its whole name, or by a pattern; None for nothing."""
    if key in known:
        return known[key]
    for pattern, value in known.items():
        if "*" in pattern and fnmatchcase(key, pattern):
            return value
    return None
