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
