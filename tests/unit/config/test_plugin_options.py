"""Options that plugins add: as keywords, flags, entries of files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from dstrain.cli.main import main
from dstrain.config import as_flags, flags_by_name, validate
from dstrain.config.options import GenerateConfig, TrainConfig, recorded_values
from dstrain.config.plugin_options import schema
from dstrain.config.plugin_records import records
from dstrain.errors import UsageError

Install = Callable[..., Path]
RECORD = """
from dstrain.plugin import UsageError, converted, option, options

def parsed(given):
    return tuple(given.split("+")) if isinstance(given, str) else given

@options
class Own:
    choices = {"lr_scheduler": ("wavy",)}
    depth: int = option("memory: depth", "How deep.", 3, minimum=1, affects={"training"},
                        commands=("train", "generate"))
    parts: tuple[str, ...] = converted("memory", "Parts.", converter=parsed, default=())
    loud: bool = option("output", "Whether it is loud.", False)

    def check(self, config):
        if self.loud and self.depth > 5:
            raise UsageError("--loud", "is too deep")
"""


@pytest.fixture
def deep(fake_plugin: Install) -> None:
    modules = {"deep_options": RECORD}
    fake_plugin(
        "extra-deep", {"deep": "deep_options:Own"}, modules, group="dstrain.options"
    )


@pytest.mark.usefixtures("deep")
def test_options_of_a_plugin_are_keywords_and_arrive_parsed() -> None:
    (record,) = (one for one in records() if one.plugin.name == "deep")
    config = TrainConfig(model="m", parts="a+b", depth=4)
    own = config.of(record.options)
    assert (own.depth, own.parts, own.loud) == (4, ("a", "b"), False)
    again = replace(config, depth=3, seed=2).of(record.options)
    assert (again.depth, again.parts) == (3, ("a", "b"))
    assert GenerateConfig(model="m", output=Path("x"), depth=7).of(record.options).depth
    with pytest.raises(TypeError, match="no option 'dept'; did you mean 'depth'"):
        TrainConfig(model="m", dept=4)
    with pytest.raises(TypeError, match="no option 'loud'"):
        GenerateConfig(model="m", output=Path("x"), loud=True)


@pytest.mark.usefixtures("deep")
def test_an_option_that_is_not_given_is_recorded_nowhere() -> None:
    plain = TrainConfig(model="m", depth=3)
    assert plain == TrainConfig(model="m")
    assert not {"depth", "parts", "loud"} & as_flags(plain).keys()
    assert "depth" not in recorded_values(plain, "training")
    given = replace(plain, depth=4)
    assert as_flags(given)["depth"] == 4
    assert recorded_values(given, "training")["depth"] == 4


@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"depth": 0}, "--depth"),
        ({"depth": "x"}, "--depth"),
        ({"depth": 6, "loud": True}, "--loud"),
    ],
)
def test_its_values_are_checked(given: dict[str, object], where: str) -> None:
    with pytest.raises(UsageError) as refused:
        validate(TrainConfig(model="m", toy=True, task="sft", **given))  # type: ignore[arg-type]  # of a plugin
    assert refused.value.where == where


@pytest.mark.usefixtures("deep")
def test_a_disabled_plugin_has_no_options() -> None:
    config = TrainConfig(model="m", toy=True, depth=4, disabled_plugins=("deep",))
    with pytest.raises(UsageError) as refused:
        validate(config)
    assert refused.value.where == "--depth"
    assert all(one.plugin.name != "deep" for one in records(("extra-deep",)))


OFFERS = """
from types import SimpleNamespace
api = 2
def dstrain_lora_types():
    return [SimpleNamespace(name="mine")]
"""


def test_what_a_hook_offers_is_a_value_without_a_record(fake_plugin: Install) -> None:
    fake_plugin("extra-own", {"own": "own_types"}, {"own_types": OFFERS}, "dstrain")
    config = TrainConfig(model="m", toy=True, lora_base_model="dit", lora_type="mine")
    validate(replace(config, dataset_base_path=Path("data"), output_path=Path("out")))
    for other in {"lora_type": "mein"}, {"lora_format": "mine"}:
        with pytest.raises(UsageError, match="expected one of"):
            validate(replace(config, **other))


@pytest.mark.usefixtures("deep")
def test_help_and_schema_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    said = capsys.readouterr().out
    assert said.index("memory: depth:") > said.index("memory:")
    assert "--depth INT" in said
    found = schema(TrainConfig)["properties"]
    assert found["depth"]["minimum"] == 1
    assert found["depth"]["type"] == "integer"
    assert found["parts"]["type"] == "array"
    assert found["height"]["type"] == ["integer", "null"]
    assert None in found["lora_format"]["enum"]
    assert "wavy" in found["lr_scheduler"]["anyOf"][0]["enum"]
    assert "wavy" in flags_by_name(TrainConfig)["lr_scheduler"].choices
