"""Plugins are found by metadata, loaded one at a time, and a broken one harms nothing
else.
"""

import importlib.metadata
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from dstrain import UsageError
from dstrain.cli.inspection import inspect_all
from dstrain.registry import (
    Installed,
    installed,
    load_family,
    refuse_unknown,
    usable_families,
    variant_of,
)

Install = Callable[..., Path]
Source = Callable[..., str]


def test_installed_reads_metadata_and_imports_nothing(fake_plugin: Install) -> None:
    fake_plugin(
        "plugin-faky",
        {"faky": "faky_record:MODEL"},
        {"faky_record": "raise RuntimeError('imported')"},
    )
    assert Installed("faky", "plugin-faky", "1.0", "faky_record:MODEL") in installed()
    assert "faky_record" not in sys.modules


def test_metadata_is_read_once_until_a_plugin_is_installed(
    fake_plugin: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = installed()
    read = importlib.metadata.entry_points
    asked: list[str] = []

    def entry_points(group: str) -> importlib.metadata.EntryPoints:
        asked.append(group)
        return read(group=group)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert installed() == before
    assert asked == []
    assert installed(disabled_plugins=[before[0].name]) == before[1:]
    assert installed(disabled_plugins=[before[0].distribution]) == before[1:]
    time.sleep(0.02)  # longer than the clock of file systems stands still
    fake_plugin("plugin-faky", {"faky": "faky_record:MODEL"}, {})
    assert {one.name for one in installed()} - {one.name for one in before} == {"faky"}
    assert asked == ["dstrain.models"]


def test_a_record_is_loaded_by_name(
    fake_plugin: Install, family_source: Source
) -> None:
    fake_plugin(
        "plugin-faky",
        {"faky": "faky_record:MODEL"},
        {"faky_record": family_source("faky")},
    )
    assert load_family("faky").variants == ("base", "edit")


@pytest.mark.parametrize("written", ["faky_imge", "Faky-Image", "faky_im"])
def test_an_unknown_name_gets_the_installed_ones_and_the_nearest(
    fake_plugin: Install, written: str
) -> None:
    fake_plugin("plugin-faky", {"faky_image": "faky_record:MODEL"}, {})
    with pytest.raises(UsageError) as caught:
        load_family(written)
    first = str(caught.value)
    assert first.startswith(
        f"dstrain: error: --model: no model named {written!r}; installed: faky_image"
    )
    assert first.endswith("; did you mean 'faky_image'?")
    assert caught.value.exit_code == 2


def test_two_distributions_with_one_name_are_refused_naming_both(
    fake_plugin: Install, family_source: Source
) -> None:
    fake_plugin(
        "plugin-one",
        {"faky": "faky_one:MODEL"},
        {"faky_one": family_source("faky", variants="('one',)")},
    )
    fake_plugin("plugin-two", {"faky": "faky_two:MODEL", "other": "faky_other:MODEL"},
                {"faky_two": family_source("faky"), "faky_other": family_source("other")}, version="2.5")  # fmt: skip
    with pytest.raises(
        UsageError,
        match=r"'faky' is provided by plugin-one 1\.0 and by plugin-two 2\.5",
    ):
        load_family("faky")
    assert load_family("other").name == "other"
    assert load_family("faky", ("plugin-two",)).variants == ("one",)
    with pytest.raises(UsageError, match="no model named 'faky'"):
        load_family("faky", ("faky",))
    reasons = {f.distribution: f.reason for f in inspect_all() if f.name == "faky"}
    assert set(reasons) == {"plugin-one", "plugin-two"}
    assert all(
        "plugin-one 1.0 and by plugin-two 2.5" in reason for reason in reasons.values()
    )


def test_families_that_cannot_be_used_are_left_out_with_the_reason(
    fake_plugin: Install, family_source: Source
) -> None:
    sources = {
        "faky": family_source("faky"),
        "leaves": "raise SystemExit(3)",
        "lacks": family_source("lacks", pipelines="'gone_module:build'"),
    }
    records = {name: f"{name}_record:MODEL" for name in sources}
    modules = {f"{name}_record": source for name, source in sources.items()}
    fake_plugin("plugin-faky", records, modules)
    families, broken = usable_families(("flux", "qwen_image", "wan"))
    assert [family.name for family in families] == ["faky"]
    lacks, leaves = broken
    assert lacks.startswith("lacks is left out, since it is broken: its pipelines")
    assert leaves.endswith("leaves_record:MODEL cannot be imported: SystemExit: 3")


def test_only_the_families_that_are_named_are_imported(
    fake_plugin: Install, family_source: Source
) -> None:
    modules = {"faky_record": family_source("faky"), "leaves_record": "import gone"}
    records = {"faky": "faky_record:MODEL", "leaves": "leaves_record:MODEL"}
    fake_plugin("plugin-faky", records, modules)
    families, broken = usable_families(names=["faky"])
    assert [family.name for family in families] == ["faky"]
    assert not broken and "leaves_record" not in sys.modules
    assert usable_families(names=[]) == ([], [])


def test_a_plugin_to_leave_out_must_be_there(fake_plugin: Install) -> None:
    fake_plugin("plugin-faky", {"faky": "faky_record:MODEL"}, {})
    refuse_unknown("faky")
    refuse_unknown("plugin-faky")
    with pytest.raises(
        UsageError, match=r"no plugin named 'fakky'.*did you mean 'faky'"
    ):
        refuse_unknown("fakky")


def test_a_variant_is_the_first_or_the_one_named(
    fake_plugin: Install, family_source: Source
) -> None:
    fake_plugin(
        "plugin-faky",
        {"faky": "faky_record:MODEL"},
        {"faky_record": family_source("faky")},
    )
    family = load_family("faky")
    assert (variant_of(family, None), variant_of(family, "edit")) == ("base", "edit")
    with pytest.raises(
        UsageError,
        match="faky has no variant 'edti'; variants: base, edit; did you mean 'edit'",
    ):
        variant_of(family, "edti")


def test_finding_plugins_needs_no_torch() -> None:
    code = (
        "import sys, dstrain.registry.discovery, dstrain.registry.hooks; "
        "import dstrain.config.options.train; print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
