"""Describe a file of options as a JSON Schema."""

from types import MappingProxyType
from typing import Any

from dstrain.config.fields import Flag
from dstrain.config.plugin_options import flags

TYPES = MappingProxyType({bool: "boolean", int: "integer", float: "number"})
"""Type of an option -> that of JSON Schema; any other is a string."""


def schema(config: type) -> dict[str, Any]:
    """Return a JSON Schema (draft 2020-12) of a file of options, those of plugins
    included.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {flag.name: _schema_of(flag) for flag in flags(config)},
    }


def _schema_of(flag: Flag) -> dict[str, Any]:
    kind: Any = TYPES.get(flag.kind, "string")
    # A number may be text that says several, or one for each of several names.
    found: dict[str, Any] = {
        "type": [kind, "string"] if flag.by_name or flag.listed else kind
    }
    if flag.is_open:
        found["anyOf"] = [{"enum": list(flag.choices)}, {"pattern": r"\."}]
    elif flag.choices:
        found["enum"] = list(flag.choices)
    for name, bound in (
        ("minimum", flag.minimum),
        ("maximum", flag.maximum),
        ("exclusiveMinimum", flag.above),
        ("exclusiveMaximum", flag.below),
    ):
        if bound is not None:
            found[name] = bound
    if flag.many:
        found = {"type": "array", "items": found}
    if flag.default not in (None, ()) and not flag.required:
        found["default"] = flag.default
    return {"description": flag.help, **found, "group": flag.group}
