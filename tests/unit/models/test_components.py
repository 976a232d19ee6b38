"""Components are recognized by keys, folders and published names."""

from types import SimpleNamespace
from typing import Any

import pytest
from dstrain import ModelConfig
from dstrain.models import NATIVE, component_at
from dstrain.plugin import CheckpointFormat, Component, Files, KeyMap

OLD = CheckpointFormat(("old.*",), (KeyMap("new", "old"),))


def component(name: str = "dit", *key_patterns: str, **fields: Any) -> Component:
    given = {"network": SimpleNamespace(), "other_folders": (f"other/{name}",)}
    return Component(name, folder=name, key_patterns=key_patterns, **(given | fields))


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["new.weight", "more"], ("", NATIVE)),
        (["old.weight"], ("", OLD)),
        (["new.weight", "old.weight"], ("", OLD)),
        (["net.new.weight", "vae.x"], ("net.", NATIVE)),
        (["net.old.weight"], ("net.", OLD)),
        (["x.new.weight"], None),
        (["new.weight", "not.mine"], None),
        ([], None),
    ],
)
def test_keys_tell_the_prefix_and_the_format(
    names: list[str], wanted: tuple[str, CheckpointFormat] | None
) -> None:
    """Names after an exclamation mark are not in its files."""
    fields: dict[str, Any] = {"formats": (OLD,), "prefixes": ("net.",)}
    part = component("dit", "new.*", "!not.*", **fields).part_of(Files(()), names)
    assert (part and (part.prefix, part.checkpoint_format)) == wanted


def test_experts_have_the_same_keys_and_a_folder_has_none() -> None:
    tokenizer = component("tokenizer")
    assert tokenizer.is_folder
    assert tokenizer.part_of(Files(()), ["x"]) is None
    assert not tokenizer.same_keys_as(component("processor"))
    dit = component("dit", "new.*", formats=(OLD,))
    assert dit.same_keys_as(component("dit2", "new.*", formats=(OLD,)))
    assert not dit.same_keys_as(component("dit2", "new.*"))
    behind = component("dit2", "new.*", formats=(OLD,), prefixes=("net.",))
    assert not dit.same_keys_as(behind)


WORDS = Component("words", SimpleNamespace(), "tokenizer", other_folders=("a/words",))


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("dit/*", "dit"),
        ("other/dit/a", "dit"),
        ("ae.safetensors", "dit"),
        ("a/words/", "words"),
        ("a/dit/", ""),
        ("ae.pth", ""),
        (None, ""),
        ("dits/x", ""),
    ],
)
def test_a_pattern_may_name_a_components_folder_of_any_depth_or_its_file(
    pattern: str | None, name: str
) -> None:
    """Without one, all files are meant, whatever their names end with."""
    dit = component("dit", "x", original_filenames=("ae.saf*", "*.saf*"))
    assert component_at(ModelConfig(None, "A/B", pattern), (dit, WORDS)) == name


@pytest.mark.parametrize(
    ("place", "name"),
    [("a/dit/x", "dit"), ("other/dit", "dit"), ("dit/a/x", ""), ("my-dit/x", "")],
)
def test_a_place_ends_with_the_components_folder(place: str, name: str) -> None:
    assert component_at(ModelConfig([place]), (component("dit", "x"), WORDS)) == name
