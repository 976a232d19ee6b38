"""Say which layers of a component are quantized, and how. Torch-free, so that a plan can
show it, and what identifies results can contain it, before anything is loaded.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from dstrain_memory.quantization.method import QuantizationMethod


@dataclass(frozen=True)
class StoredLayers:
    """Linear layers of a component that one method quantizes."""

    method: QuantizationMethod
    only: tuple[str, ...] = ()
    """Patterns of the layers; () for all. A layer matches if its dotted name is the
    pattern or ends with '.' + pattern; `*` stands for anything. Layers that the
    component's record leaves unquantized never are."""
    excluded: tuple[str, ...] = ()
    """Patterns of layers that it does not quantize."""
    flag: str = field(default="--quant_options", compare=False)
    """The option that asks for it, for errors."""
    is_among_others: bool = field(default=False, compare=False)
    """Whether the option names other components, too; this one may have no linear layer,
    as the VAE in commands that name every component."""

    def __str__(self) -> str:
        return f"{self.method.identity}{self.patterns}"

    @property
    def patterns(self) -> str:
        """Return which layers it stores, as it is typed; '' for all."""
        excluded = f"/{','.join(self.excluded)}" if self.excluded else ""
        only = f"@{','.join(self.only)}" if self.only else ""
        return excluded + only

    def stores(self, layer: str) -> bool:
        """Return whether it is for a linear layer of this dotted name."""
        is_meant = not self.only or matches(layer, self.only)
        return is_meant and not matches(layer, self.excluded)

    def describe(self) -> str:
        """Return it in words."""
        words = self.method.name
        if self.only:
            words += f" for {', '.join(self.only)}"
        if self.excluded:
            words += f" except {', '.join(self.excluded)}"
        return words


@dataclass(frozen=True)
class StoredComponent:
    """How the linear layers of a component are quantized."""

    methods: tuple[StoredLayers, ...]
    """The others, and all of them without an entry, are in the dtype of the run."""
    unquantized: tuple[str, ...] = ()
    """Patterns of the whole dotted names of layers that no method stores."""

    @property
    def identity(self) -> list[str]:
        """Return what its results depend on, equal for entries that say the same."""
        found = sorted(map(str, combined(self.methods)))
        if found and self.unquantized:
            found.append(f"not {','.join(_sorted(self.unquantized))}")
        return found

    def may_store(self, layer: str) -> bool:
        """Return whether a method may store a linear layer of this dotted name."""
        return not any(fnmatchcase(layer, one) for one in self.unquantized)

    def methods_of(self, layer: str) -> list[StoredLayers]:
        """Return the entries that store a linear layer; more than one are an error
        unless they have the same method.
        """
        if not self.may_store(layer):
            return []
        return [one for one in self.methods if one.stores(layer)]

    def describe(self) -> str:
        """Return it in words."""
        return "; ".join(one.describe() for one in self.methods)


def matches(layer: str, patterns: Iterable[str]) -> bool:
    """Return whether a layer's dotted name is one of the patterns or ends with one."""
    return any(fnmatchcase(f".{layer}", f"*.{one}") for one in patterns)


def combined(entries: Iterable[StoredLayers]) -> tuple[StoredLayers, ...]:
    """Return entries that quantize the same layers, without repetitions and without those
    that another one of the same method contains.
    """
    by_method: dict[QuantizationMethod, list[StoredLayers]] = {}
    for entry in entries:
        by_method.setdefault(entry.method, []).append(entry)
    found: list[StoredLayers] = []
    for method, own in by_method.items():
        named = {one for entry in own if not entry.excluded for one in entry.only}
        rest = {
            StoredLayers(method, _sorted(entry.only), _sorted(entry.excluded))
            for entry in own
            if entry.excluded or not entry.only
        }
        if any(not one.only and named.issuperset(one.excluded) for one in rest):
            found.append(StoredLayers(method))
            continue
        if named:
            rest.add(StoredLayers(method, _sorted(named)))
        found += sorted(rest, key=str)
    return tuple(found)


def _sorted(patterns: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(patterns)))
