"""Components are recognized by keys, folders, published names and configurations."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dstrain.models import NATIVE
from dstrain.plugin import CheckpointFormat, Component, DiffusersNetwork, Files, KeyMap

OLD = CheckpointFormat(("old.*",), (KeyMap("new", "old"),))


def component(name: str = "dit", *key_patterns: str, **fields: Any) -> Component:
    given = {"network": SimpleNamespace(), "other_folders": (f"other/{name}",)}
    return Component(name, folder=name, key_patterns=key_patterns, **(given | fields))


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["new.weight", "more"], ("", NATIVE)),
        (["old.weight"], ("", OLD)),
        (["net.new.weight", "vae.x"], ("net.", NATIVE)),
        (["net.old.weight"], ("net.", OLD)),
        (["x.new.weight"], None),
        ([], None),
    ],
)
def test_keys_tell_the_prefix_and_the_format(
    names: list[str], wanted: tuple[str, CheckpointFormat] | None
) -> None:
    dit = component("dit", "new.*", formats=(OLD,), prefixes=("net.",))
    part = dit.part_of(Files(()), names)
    assert (part and (part.prefix, part.checkpoint_format)) == wanted


def test_a_folder_without_weights_has_no_keys() -> None:
    tokenizer = component("tokenizer")
    assert tokenizer.is_folder
    assert tokenizer.part_of(Files(()), ["x"]) is None
    assert not tokenizer.same_keys_as(component("processor"))


def test_names_after_an_exclamation_mark_are_not_in_its_files() -> None:
    half = component("dit", "a.*", "!b.*")
    assert half.part_of(Files(()), ["a.x", "c.x"]) == Files(())
    assert half.part_of(Files(()), ["a.x", "b.x"]) is None
    assert half.part_of(Files(()), ["c.x"]) is None


def test_experts_have_the_same_keys_and_other_names() -> None:
    dit = component("dit", "new.*", formats=(OLD,))
    assert dit.same_keys_as(component("dit2", "new.*", formats=(OLD,)))
    assert not dit.same_keys_as(component("dit2", "new.*"))


@pytest.mark.parametrize(
    ("place", "inside"),
    [("a/dit", True), ("other/dit", True), ("dit/a", False), ("my-dit", False)],
)
def test_a_place_ends_with_the_components_folder(place: str, inside: bool) -> None:
    assert component("dit", "x").is_in_folder(Path(place)) is inside


@pytest.mark.parametrize(
    ("pattern", "published"),
    [
        ("dit/*", True),
        ("other/dit/a", True),
        ("ae.safetensors", True),
        ("a/dit/", False),
    ],
)
def test_a_pattern_tells_what_is_published(pattern: str, published: bool) -> None:
    dit = component("dit", "x", original_filenames=("ae.*",))
    assert dit.is_published_as(pattern) is published


def test_a_configuration_names_the_class_that_it_is_for() -> None:
    network = DiffusersNetwork("diffusers:AutoencoderKL")
    vae = component("vae", "x", network=network)
    assert vae.accepts_config({"_class_name": "AutoencoderKL"})
    assert not vae.accepts_config({"_class_name": "AutoencoderKLWan"})
    assert component("any", "x").accepts_config({"_class_name": "AutoencoderKLWan"})


def test_a_configuration_is_looked_for_beside_the_files(tmp_path: Path) -> None:
    assert Files((tmp_path,)).folder == tmp_path
    assert Files((tmp_path / "model.safetensors",)).folder == tmp_path
