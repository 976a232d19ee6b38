"""Parse the options that say how weights are quantized."""

from dataclasses import dataclass

from dstrain.plugin import UsageError, split_commas

FLAG = "--quant_options"
FP8_FLAG = "--fp8_models"
GRAMMAR = "expected WHAT:METHOD, WHAT:METHOD/EXCLUDED,... or WHAT:METHOD@ONLY,...; several with semicolons"


@dataclass(frozen=True)
class StorageRequest:
    """Layers to quantize, as they were asked for."""

    flag: str
    what: str
    """A component, or files as one of the model flags has them."""
    method: str
    only: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()


def parse_storage(
    fp8_models: str | None, quant_options: str | None
) -> tuple[StorageRequest, ...]:
    """Return what --fp8_models and --quant_options ask for.

    Raises UsageError for what the grammar does not know.
    """
    found = []
    for flag, text in ((FP8_FLAG, fp8_models), (FLAG, quant_options)):
        if text is not None and not text.strip(" ,;"):
            raise UsageError(flag, "is empty")
    for what in split_commas(fp8_models):
        found.append(StorageRequest(FP8_FLAG, what, "fp8"))
    for entry in (quant_options or "").split(";"):
        if entry.strip():
            found.append(_parsed(entry.strip()))
    return tuple(found)


def _parsed(entry: str) -> StorageRequest:
    # Names of published models and files contain ':', '/' and '@', methods and layers
    # no ':'.
    what, colon, rest = entry.rpartition(":")
    rest, at, only = rest.partition("@")
    method, slash, excluded = rest.partition("/")
    names, layers = split_commas(excluded), split_commas(only)
    is_complete = bool(names) >= bool(slash) and bool(layers) >= bool(at)
    if not (colon and what.strip() and method.strip() and is_complete) or "/" in only:
        raise UsageError(FLAG, f"cannot read {entry!r}", GRAMMAR)
    return StorageRequest(FLAG, what.strip(), method.strip(), layers, names)
