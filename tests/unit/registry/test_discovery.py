"""Plugins are found by metadata and loaded one at a time; a broken one harms no other."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.installed import Installed, installed
from dstrain.registry import load_family, refuse_unknown, usable_families

Install = Callable[..., Path]
Source = Callable[..., str]
OTHERS = tuple(one.name for one in installed())


@pytest.fixture
def faky(fake_plugin: Install, family_source: Source) -> Path:
    """Install the family `faky`; returns the folder on sys.path."""
    modules = {"faky_record": family_source("faky")}
    return fake_plugin("plugin-faky", {"faky": "faky_record:MODEL"}, modules)


@pytest.mark.usefixtures("faky")
def test_metadata_is_read_and_nothing_is_imported_before_a_record_is_loaded() -> None:
    assert Installed("faky", "plugin-faky", "1.0", "faky_record:MODEL") in installed()
    assert "faky_record" not in sys.modules
    assert load_family("faky").variants == ("base", "edit")


@pytest.mark.parametrize("written", ["faky_imge", "Faky-Image", "faky_im"])
def test_an_unknown_name_gets_the_installed_ones_and_the_nearest(
    fake_plugin: Install, written: str
) -> None:
    fake_plugin("plugin-faky", {"faky_image": "faky_record:MODEL"}, {})
    with pytest.raises(UsageError) as caught:
        load_family(written)
    assert caught.value.where == "--model"
    assert all(repr(name) in caught.value.what for name in (written, "faky_image"))
    assert all(name in caught.value.what for name in OTHERS)


def test_two_distributions_with_one_name_are_refused_naming_both(
    fake_plugin: Install, family_source: Source
) -> None:
    one = {"faky_one": family_source("faky", variants="('one',)")}
    fake_plugin("plugin-one", {"faky": "faky_one:MODEL"}, one)
    two = {"faky_two": family_source("faky"), "faky_other": family_source("other")}
    entries = {"faky": "faky_two:MODEL", "other": "faky_other:MODEL"}
    fake_plugin("plugin-two", entries, two, version="2.5")
    with pytest.raises(UsageError, match=r"plugin-one 1\.0 .*plugin-two 2\.5"):
        load_family("faky")
    assert load_family("other").name == "other"
    assert load_family("faky", ("plugin-two",)).variants == ("one",)
    with pytest.raises(UsageError, match=r"--model: .*'faky'"):
        load_family("faky", ("faky",))


def test_only_families_named_are_imported(faky: Path, fake_plugin: Install) -> None:
    modules = {"leaves_record": "import gone"}
    fake_plugin("plugin-leaves", {"leaves": "leaves_record:MODEL"}, modules)
    families, broken = usable_families(names=["faky"])
    assert [family.name for family in families] == ["faky"]
    assert not broken and "leaves_record" not in sys.modules
    assert usable_families(names=[]) == ([], [])


@pytest.mark.usefixtures("faky")
def test_a_plugin_to_leave_out_must_be_there() -> None:
    refuse_unknown("faky")
    refuse_unknown("plugin-faky")
    with pytest.raises(UsageError, match=r"-p: .*'fakky'.*'faky'"):
        refuse_unknown("fakky")


def test_finding_plugins_needs_no_torch() -> None:
    code = (
        "import sys; from dstrain import TrainConfig; from dstrain.installed import installed; "
        "from dstrain.registry import load_extensions, load_family; load_extensions(); "
        "[load_family(one.name) for one in installed()]; print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_a_plugin_that_a_family_needs_is_named_with_the_line_that_installs_it(
    fake_plugin: Install, family_source: Source
) -> None:
    modules = {"needy_record": family_source("needy", needs="('tables',)")}
    fake_plugin("plugin-needy", {"needy": "needy_record:MODEL"}, modules)
    with pytest.raises(UsageError, match="needs the plugin tables") as caught:
        load_family("needy")
    assert (
        "pip install -c constraints.txt ./plugins/tables" in caught.value.help_lines[0]
    )
    fake_plugin("plugin-tables", {"tables": "json"}, {}, group="dstrain")
    assert load_family("needy").needs == ("tables",)
