"""How weights are stored is asked for in DiffSynth-Studio's grammar."""

import pytest
from dstrain import UsageError
from dstrain.config.quantization import StorageRequest, parse_storage

FLAG = "--quant_options"


def options(text: str) -> list[tuple[object, ...]]:
    found = parse_storage(None, text)
    return [(one.what, one.method, one.excluded, one.only) for one in found]


def test_nothing_is_asked_for_without_the_flags() -> None:
    assert parse_storage(None, None) == ()


def test_fp8_models_are_names_or_entries_of_the_model_flags() -> None:
    assert parse_storage("dit, Org/Model@v1:transformer/*.safetensors", None) == (
        StorageRequest("--fp8_models", "dit", "fp8"),
        StorageRequest("--fp8_models", "Org/Model@v1:transformer/*.safetensors", "fp8"),
    )


def test_an_entry_names_files_a_method_and_layers() -> None:
    assert options("dit:fp8") == [("dit", "fp8", (), ())]
    both = options(" dit:nf4/img_mod.1,txt_mod.1 ; dit:int8@img_mod.1,txt_mod.1;")
    layers = ("img_mod.1", "txt_mod.1")
    assert both == [("dit", "nf4", layers, ()), ("dit", "int8", (), layers)]
    assert options("dit:fp8/a@b,c") == [("dit", "fp8", ("a",), ("b", "c"))]
    published = "Org/Model@main:transformer/*.safetensors"
    assert options(f"{published}:fp8/a") == [(published, "fp8", ("a",), ())]
    assert options("/data/dit.safetensors:fp8@a") == [
        ("/data/dit.safetensors", "fp8", (), ("a",))
    ]


@pytest.mark.parametrize(
    "text", ["dit", "dit:", ":fp8", "dit:fp8/", "dit:fp8@", "dit:fp8@a/b", "dit:/a"]
)
def test_what_the_grammar_does_not_know_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected WHAT:METHOD") as caught:
        parse_storage(None, f"vae:fp8;{text}")
    assert caught.value.where == FLAG and repr(text) in caught.value.what


@pytest.mark.parametrize("flag", ["fp8_models", "quant_options"])
def test_an_empty_value_is_refused(flag: str) -> None:
    for text in ("", " ", ",", " ; "):
        values = {"fp8_models": None, "quant_options": None, flag: text}
        with pytest.raises(UsageError, match=f"--{flag}: is empty"):
            parse_storage(**values)
