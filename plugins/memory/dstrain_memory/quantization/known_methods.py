"""The methods by which weights can be quantized, by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import MappingProxyType

from dstrain.plugin import UsageError, nearest
from torch import Tensor, nn

from dstrain_memory.quantization import encodings, libraries
from dstrain_memory.quantization.encodings import Encode
from dstrain_memory.quantization.linear import QuantizedLinear, Restore
from dstrain_memory.quantization.method import QuantizationMethod


def stored_linear(
    encode: Encode, restore: Restore, linear: nn.Linear, weight: Tensor
) -> QuantizedLinear:
    """Return the layer with this weight encoded; with the first two arguments filled in,
    it is a method's `store`.

    Args:
        encode: (weight (out, in)) -> the stored weight, of 8 bits a number, then its
            scales.
        restore: Restores the weight from these.
        linear: The layer; its own weight is not read.
        weight: The weight, on its device.
    """
    return QuantizedLinear(linear, tuple(encode(weight)), restore, weight.dtype)


@dataclass(frozen=True)
class _In4Bits:
    """The `store` of a method of bitsandbytes, whose packed weight has no shape."""

    kind: str

    def __call__(self, linear: nn.Linear, weight: Tensor) -> QuantizedLinear:
        encode = partial(libraries.to_4bit, self.kind)
        rows, columns = weight.shape
        restore = partial(libraries.from_4bit, self.kind, (rows, columns))
        return stored_linear(encode, restore, linear, weight)


FP8 = QuantizationMethod(
    "fp8",
    partial(stored_linear, encodings.to_fp8, encodings.from_fp8),
    encodings.fp8_bytes,
)
INT8_BLOCK = QuantizationMethod(
    "int8_block",
    partial(stored_linear, encodings.to_int8_block, encodings.from_int8_block),
    encodings.int8_block_bytes,
)
METHODS: Mapping[str, QuantizationMethod] = MappingProxyType(
    {
        one.name: one
        for one in (
            FP8,
            INT8_BLOCK,
            QuantizationMethod(
                "bitsandbytes_nf4", _In4Bits("nf4"), libraries.bytes_of_4bit
            ),
            QuantizationMethod(
                "bitsandbytes_fp4", _In4Bits("fp4"), libraries.bytes_of_4bit
            ),
            QuantizationMethod(
                "torchao_int8_w8a16",
                partial(
                    stored_linear, libraries.to_int8_rows, encodings.from_int8_rows
                ),
                encodings.fp8_bytes,
            ),
            QuantizationMethod(
                "torchao_fp8_w8a16",
                partial(stored_linear, libraries.to_fp8_rows, encodings.from_fp8),
                encodings.fp8_bytes,
            ),
        )
    }
)
"""dstrain's own methods, and those of libraries that it can use where installed."""
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "torchao_int4_w4a16": "torchao computes it on some GPUs alone, with a package of its own; use bitsandbytes_nf4",
        "torchao_nvfp4_w4a16": "torchao computes it on some GPUs alone; use bitsandbytes_nf4",
        **dict.fromkeys(
            (
                *("torchao_int8_w8a8", "torchao_fp8_w8a8", "torchao_int4_w4a8"),
                *("torchao_mxfp8_w8a8", "torchao_mxfp4_w4a4", "torchao_nvfp4_w4a4"),
            ),
            "it quantizes activations too, and gives no gradient to train with; use int8_block",
        ),
        **dict.fromkeys(
            ("comfy_kitchen_int8_w8a8", "comfy_kitchen_fp8_w8a8"),
            "it quantizes activations too, so that gradients would not be those of the computation; use int8_block",
        ),
    }
)
"""DiffSynth-Studio's methods that dstrain does not have -> why, and what to use."""
DISTRIBUTIONS = ("bitsandbytes", "torchao")
"""What a method's name begins with if it needs that package."""


METHODS_GROUP = "dstrain.quantizers"
"""The entry-point group in which other plugins name their `QuantizationMethod`s."""


def known_methods() -> dict[str, QuantizationMethod]:
    """Return the methods of this plugin, and those that other plugins name.

    Raises UsageError for one that cannot be imported, or that has a name of ours.
    """
    found = dict(METHODS)
    for entry in entry_points(group=METHODS_GROUP):
        where = f"quantization method {entry.name}"
        try:
            method = entry.load()
        except Exception as error:
            what = f"{entry.value} cannot be imported: {type(error).__name__}: {error}"
            raise UsageError(where, what) from error
        if not isinstance(method, QuantizationMethod):
            raise UsageError(where, f"{entry.value} is no QuantizationMethod")
        if method.name in METHODS:
            raise UsageError(where, f"{method.name!r} is one of plugin-memory's own")
        found[method.name] = method
    return found


def method_named(
    name: str, methods: Mapping[str, QuantizationMethod], where: str
) -> QuantizationMethod:
    """Return a method; raises UsageError for one that is not known or not installed.

    Args:
        name: Its name, as it was typed.
        methods: The methods that there are.
        where: The flag, for errors.
    """
    if name in REFUSED and name not in methods:
        raise UsageError(where, f"{name} is not supported: {REFUSED[name]}")
    if name not in methods:
        ending = [one for one in methods if name and one.endswith(f"_{name.lower()}")]
        hint = f"; did you mean {ending[0]!r}?" if ending else nearest(name, methods)
        what = f"no method named {name!r}{hint}"
        raise UsageError(where, what, f"methods: {', '.join(methods)}")
    package = name.partition("_")[0]
    if package in DISTRIBUTIONS and name in METHODS and find_spec(package) is None:
        raise UsageError(
            where,
            f"{name} needs {package}, which is not installed",
            f"pip install {package}",
        )
    return methods[name]
