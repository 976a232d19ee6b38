"""`dstrain plugins new` writes a package, and nothing over what is there."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from dstrain.cli.main import main

Printed = pytest.CaptureFixture[str]
MODULES = ["__init__", "components", "model_fn", "networks", "pipeline", "toy", "units"]
TRAINED = ("dit", "text_encoder", "text_encoder+dit")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def test_the_package_has_the_files_of_a_family(here: Path, capsys: Printed) -> None:
    assert main(["plugins", "new", "ab_2"]) == 0
    assert "ab_2" in capsys.readouterr().out
    place = here / "ab_2"
    files = [path for path in place.rglob("*") if path.is_file()]
    assert {path.relative_to(place).as_posix() for path in files} == {
        "README.md",
        "pyproject.toml",
        "tests/fingerprints.json",
        "tests/test_conformance.py",
        *(f"tests/plans/base-sft-{trained}.txt" for trained in TRAINED),
        *(f"dstrain_ab_2/{module}.py" for module in MODULES),
    }
    project = tomllib.loads((place / "pyproject.toml").read_text())["project"]
    assert project["name"] == "plugin-ab-2"
    assert project["entry-points"]["dstrain.models"] == {"ab_2": "dstrain_ab_2:MODEL"}
    assert not any("my_model" in path.read_text() for path in files)


@pytest.mark.parametrize(
    "name", ["My", "a-b", "2a", "_a", "a__b", "a_", "class", "", "../a", "ä"]
)
def test_a_bad_name_is_refused(name: str, here: Path, capsys: Printed) -> None:
    assert main(["plugins", "new", name]) == 2
    assert repr(name) in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_the_name_of_an_installed_family_is_refused_and_what_is_there_left_as_it_is(
    fake_plugin: Callable[..., Path], here: Path, capsys: Printed
) -> None:
    fake_plugin("plugin-faky", {"faky": "faky_record:MODEL"}, {})
    (here / "mine").write_text("mine")
    for name, told in (("faky", "plugin-faky 1.0"), ("mine", "mine")):
        assert main(["plugins", "new", name]) == 2
        assert told in capsys.readouterr().err
    assert [path.read_text() for path in here.iterdir()] == ["mine"]


def test_flags_and_commands_of_others_are_refused(here: Path, capsys: Printed) -> None:
    assert main(["plugins", "--json", "new", "ab"]) == 2
    assert "error: --json: " in capsys.readouterr().err
    assert main(["plugins", "knew", "x"]) == 2
    assert list(here.iterdir()) == []
