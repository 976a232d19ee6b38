"""Frozen dataclasses that convert and freeze what an author gives them."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any, Generic, TypeVar

Given = TypeVar("Given")
Kept = TypeVar("Kept")


class ConvertedField(Generic[Given, Kept]):
    """A field of a dataclass whose value is converted when it is set.

    As an annotation, it says what the constructor takes and what the attribute is.
    """

    def __init__(
        self, convert: Callable[[Given], Kept], default: Any = MISSING
    ) -> None:
        self.convert = convert
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object | None, owner: type | None = None) -> Kept:
        if instance is not None:
            kept: Kept = instance.__dict__[self.name]
            return kept
        if self.default is MISSING:
            # How `dataclass` learns that the field has no default.
            raise AttributeError(self.name)
        default: Kept = self.default
        return default

    def __set__(self, instance: object, value: Given) -> None:
        instance.__dict__[self.name] = self.convert(value)


def freeze(record: Any) -> None:
    """Replace the mappings and lists in a dataclass's fields by read-only copies."""
    for field in fields(record):
        # The class refuses to set its fields.
        object.__setattr__(record, field.name, frozen(getattr(record, field.name)))


def frozen(value: Any) -> Any:
    """Return a mapping or list as a read-only copy, other values as they are."""
    if isinstance(value, Mapping):
        return MappingProxyType({key: frozen(item) for key, item in value.items()})
    if isinstance(value, list):
        return tuple(value)
    return value
