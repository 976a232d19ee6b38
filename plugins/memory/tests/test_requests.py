"""What is asked of weights is parsed, and a method of another version is another one."""

from dataclasses import replace

import pytest
from dstrain_memory.quantization.method import QuantizationMethod
from dstrain_memory.quantization.requests import parse_storage

ID = "Org/Model@main:transformer/*.safetensors"


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("dit:fp8", [("dit", "fp8", (), ())]),
        (
            " dit:nf4/mod.1,mod.2 ; dit:int8@mod.1,mod.2;",
            [
                ("dit", "nf4", ("mod.1", "mod.2"), ()),
                ("dit", "int8", (), ("mod.1", "mod.2")),
            ],
        ),
        ("dit:fp8/a@b,c", [("dit", "fp8", ("a",), ("b", "c"))]),
        (f"{ID}:fp8/a", [(ID, "fp8", ("a",), ())]),
        ("/data/a.safetensors:fp8@a", [("/data/a.safetensors", "fp8", (), ("a",))]),
    ],
)
def test_how_weights_are_stored_is_asked_for_by_files_method_and_layers(
    text: str, entries: list[tuple[object, ...]]
) -> None:
    found = parse_storage(None, text)
    assert [(one.what, one.method, one.excluded, one.only) for one in found] == entries
    found = parse_storage(f"dit, {ID}", None)
    assert [(one.what, one.method) for one in found] == [("dit", "fp8"), (ID, "fp8")]


def test_a_quantization_method_of_another_version_is_another_one() -> None:
    first = QuantizationMethod("half", lambda layer, weight: layer, lambda shape: 1)
    assert first.identity == "half"
    assert replace(first, version=2).identity != first.identity
