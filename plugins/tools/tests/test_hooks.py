"""The package's metadata names the commands that its hooks add: help lists these by it."""

import tomllib
from pathlib import Path

from dstrain_tools.hooks import dstrain_commands

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_the_metadata_names_every_command() -> None:
    points = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"][
        "entry-points"
    ]
    added = {command.name for command in dstrain_commands()}
    assert points["dstrain.commands"].keys() == added
    assert {*points["dstrain.commands"].values()} == {*points["dstrain"].values()}
