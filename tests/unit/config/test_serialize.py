"""A configuration is written as data, without secrets and without options of one start."""

import json
from pathlib import Path

from dstrain.config.fields import LoraFile, NamedInput, flags
from dstrain.config.options import GenerateConfig, TrainConfig, options_affecting
from dstrain.config.serialize import as_flags, write_resolved

CONFIG = TrainConfig(
    model="faky",
    toy=True,
    dataset_base_path=Path("data"),
    output_path=Path("out"),
    preview_prompt=("a dog", "a cat"),
    resume="auto",
    family_options={"area": "64"},
    disabled_plugins=("plugin-other",),
)


def test_every_option_is_written_by_its_name() -> None:
    written = as_flags(CONFIG)
    own = {flag.name for flag in flags(TrainConfig)}
    assert set(written) == own | {"area", "p"}
    assert written["dataset_base_path"] == "data"
    assert written["preview_prompt"] == ["a dog", "a cat"]
    assert (written["area"], written["p"]) == ("64", ["no:plugin-other"])
    assert written["variant"] is None


def test_files_and_inputs_are_written_as_on_the_command_line() -> None:
    config = GenerateConfig(
        model="faky",
        output=Path("x.png"),
        lora=(LoraFile(Path("a.s"), 0.5),),
        input=(NamedInput("edit_image", "a.png"),),
    )
    written = as_flags(config)
    assert (written["lora"], written["input"]) == (["a.s:0.5"], ["edit_image=a.png"])


def test_options_of_one_start_are_not_in_the_file(tmp_path: Path) -> None:
    write_resolved(tmp_path / "a.json", CONFIG, {"torch": "2"})
    text = (tmp_path / "a.json").read_text()
    written = json.loads(text)
    assert set(as_flags(CONFIG)) - set(written) == set(options_affecting("start"))
    assert written["versions"] == {"torch": "2"}
    assert list(written) == sorted(written) and text.endswith("\n")


def test_secrets_are_not_written(tmp_path: Path) -> None:
    path = "https://user:password1@host/x"
    config = TrainConfig(model="faky", dataset_metadata_path=Path(path))
    write_resolved(tmp_path / "a.json", config, {})
    assert "password1" not in (tmp_path / "a.json").read_text()


def test_a_path_that_is_not_utf_8_is_written(tmp_path: Path) -> None:
    config = TrainConfig(model="faky", output_path=Path("d\udcff"))
    write_resolved(tmp_path / "a.json", config, {})
    assert json.loads((tmp_path / "a.json").read_bytes())["output_path"] == "d\udcff"
