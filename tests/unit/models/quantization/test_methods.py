"""Methods are found by name; those that cannot be had are refused in words."""

import pytest
import torch
from dstrain import UsageError
from dstrain.models import METHODS
from dstrain.models.quantization import encodings, methods
from dstrain.models.quantization.methods import REFUSED, method_named
from dstrain.plugin import QuantizationMethod
from torch import nn

from tests.support.weights_to_store import normal, stored

FLAG = "--quant_options"


def test_every_method_of_diffsynth_studio_is_known_or_refused_in_words() -> None:
    theirs = {
        *("bitsandbytes_nf4", "bitsandbytes_fp4", "torchao_int8_w8a16"),
        *("torchao_int4_w4a16", "torchao_fp8_w8a16", "torchao_int8_w8a8"),
        *("torchao_fp8_w8a8", "torchao_int4_w4a8", "torchao_mxfp8_w8a8"),
        *("torchao_mxfp4_w4a4", "torchao_nvfp4_w4a4", "torchao_nvfp4_w4a16"),
        *("comfy_kitchen_int8_w8a8", "comfy_kitchen_fp8_w8a8"),
    }
    assert {*METHODS, *REFUSED} == {*theirs, "fp8", "int8_block"}
    for name in REFUSED:
        with pytest.raises(UsageError, match=f"{name} is not supported: ") as caught:
            method_named(name, METHODS, FLAG)
        # What to use instead is there.
        assert caught.value.what.rpartition("use ")[2] in METHODS


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("nf4", "bitsandbytes_nf4"),
        ("NF4", "bitsandbytes_nf4"),
        ("bitsandbytes_fp5", "bitsandbytes_fp4"),
        ("int8", "int8_block"),
        ("fp", "fp8"),
    ],
)
def test_an_unknown_method_is_refused_with_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean '{meant}'") as caught:
        method_named(typed, METHODS, FLAG)
    assert caught.value.help_lines == (f"methods: {', '.join(METHODS)}",)


@pytest.mark.parametrize("name", [one for one in METHODS if "_" in one])
def test_a_method_of_a_package_that_is_not_installed_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods, "find_spec", lambda package: None)
    package = name.partition("_")[0]
    if name == "int8_block":
        assert method_named(name, METHODS, FLAG) is METHODS[name]
        return
    with pytest.raises(UsageError, match=f"needs {package}, which is not") as caught:
        method_named(name, METHODS, FLAG)
    assert caught.value.help_lines == (f"pip install {package}",)


def test_a_method_of_a_plugin_may_have_a_refused_name() -> None:
    own = QuantizationMethod(
        "torchao_int4_w4a16", METHODS["fp8"].store, lambda shape: 1
    )
    assert method_named(own.name, {**METHODS, own.name: own}, FLAG) is own


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda one: one.name)
def test_a_stored_layer_has_the_bias_of_the_layer(method: QuantizationMethod) -> None:
    layer = nn.Linear(64, 4)
    stored = method.store(layer, torch.randn(4, 64))
    assert stored.bias is layer.bias
    assert (stored.in_features, stored.out_features) == (64, 4)
    stored = method.store(nn.Linear(64, 4, bias=False), torch.randn(4, 64))
    assert stored.bias is None


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("shape", [(130, 9), (64, 128), (3, 7)])
def test_a_weight_encoded_in_parts_is_what_it_is_encoded_at_once(
    name: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = normal(0.02, *shape).bfloat16()
    whole = stored(METHODS[name], weight).stored
    monkeypatch.setattr(encodings, "AT_ONCE", 1)
    parts = stored(METHODS[name], weight).stored
    assert len(parts) == len(whole) and all(map(torch.equal, parts, whole))
