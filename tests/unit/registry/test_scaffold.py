"""`dstrain plugins new` writes a package under its name, and nothing over what is
there.
"""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from dstrain.cli.main import main

Install = Callable[..., Path]
Source = Callable[..., str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def test_the_package_has_the_files_of_a_family_under_its_own_name(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "new", "ab_2"]) == 0
    assert capsys.readouterr().out.startswith("wrote ab_2; ")
    files = {
        path.relative_to(here / "ab_2").as_posix()
        for path in (here / "ab_2").rglob("*")
        if path.is_file()
    }
    modules = (
        "__init__",
        "components",
        "model_fn",
        "networks",
        "pipeline",
        "toy",
        "units",
    )
    assert files == {
        "README.md",
        "pyproject.toml",
        "tests/fingerprints.json",
        "tests/test_conformance.py",
        *(
            f"tests/plans/base-sft-{trained}.txt"
            for trained in ("dit", "text_encoder", "text_encoder+dit")
        ),
        *(f"dstrain_ab_2/{module}.py" for module in modules),
    }
    project = tomllib.loads((here / "ab_2/pyproject.toml").read_text())["project"]
    assert project["name"] == "plugin-ab-2"
    assert project["entry-points"]["dstrain.models"] == {"ab_2": "dstrain_ab_2:MODEL"}
    assert not any(
        "my_model" in path.read_text()
        for path in (here / "ab_2").rglob("*.*")
        if path.is_file()
    )


@pytest.mark.parametrize(
    "name", ["My", "a-b", "2a", "_a", "a__b", "a_", "class", "", "../a", "ä"]
)
def test_a_name_that_no_package_can_have_is_refused(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "new", name]) == 2
    assert f"{name!r} is not a valid family name" in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_the_name_of_an_installed_family_is_refused(
    fake_plugin: Install,
    family_source: Source,
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_plugin(
        "plugin-faky",
        {"faky": "faky_record:MODEL"},
        {"faky_record": family_source("faky")},
    )
    assert main(["plugins", "new", "faky"]) == 2
    assert (
        "a family named 'faky' is installed, by plugin plugin-faky 1.0"
        in capsys.readouterr().err
    )
    assert list(here.iterdir()) == []


def test_what_is_there_is_left_as_it_is(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "mine").write_text("mine")
    assert main(["plugins", "new", "mine"]) == 2
    assert (
        "mine already exists; existing files were not modified"
        in capsys.readouterr().err
    )
    assert (here / "mine").read_text() == "mine"


def test_flags_of_the_list_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "--json", "new", "ab"]) == 2
    assert "--json: has no effect" in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_alone_it_lists_as_before(
    fake_plugin: Install, family_source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_plugin(
        "plugin-faky",
        {"faky": "faky_record:MODEL"},
        {"faky_record": family_source("faky")},
    )
    assert main(["plugins"]) == 0
    assert "faky" in capsys.readouterr().out
    assert main(["plugins", "knew", "x"]) == 2
