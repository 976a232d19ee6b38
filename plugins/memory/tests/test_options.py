"""Options of memory that cannot be meant are refused by their names."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from dstrain import GenerateConfig, Pipeline, TrainConfig, UsageError, run
from dstrain.cli.main import main
from dstrain.config import CONFIG, validate, with_run_options, write_resolved

from tests.support.command_lines import BASE, toy_config
from tests.support.runs import config, train

SIZES: dict[str, Any] = {"tiled": True, "tile_size": 64}
NOT_STORAGE = (
    *("dit", "dit:", ":fp8", "dit:fp8/", "dit:fp8@", "dit:fp8@a/b", "dit:/a"),
    *("vae:fp8;dit", "", " ; "),
)


@pytest.mark.parametrize(
    ("where", "named", "changes"),
    [
        ("no_use_gradient_checkpointing", "swapped",
         {"use_gradient_checkpointing": False, "blocks_to_swap": 1}),
        ("blocks_to_swap", "--enable_model_cpu_offload", {"blocks_to_swap": 1, "enable_model_cpu_offload": True}),
        ("offload_models", "", {"offload_models": " ,"}),
        ("tile_size", "--tiled", {"tile_size": 64}),
        ("tile_stride", "--tiled", {"tile_stride": 64, "framewise_decoding": True}),
        ("tile_stride", "72", {**SIZES, "tile_stride": 72}),
        *(("quant_options", "", {"quant_options": value}) for value in NOT_STORAGE),
        *(("fp8_models", "", {"fp8_models": value}) for value in ("", " ", ",")),
    ],
)  # fmt: skip
def test_what_contradicts_itself_or_is_not_understood_is_refused(
    where: str, named: str, changes: dict[str, Any]
) -> None:
    validate(toy_config(**SIZES, tile_stride=64))
    with pytest.raises(UsageError) as caught:
        validate(toy_config(**changes))
    assert caught.value.where == f"--{where}"
    assert named in caught.value.what


@pytest.mark.parametrize("is_dry", [False, True])
@pytest.mark.parametrize(
    "flags",
    [{"compile": True}, {"blocks_to_swap": 1}, {"enable_model_cpu_offload": True}],
)
def test_what_cannot_be_sharded_is_refused(
    flags: dict[str, Any], is_dry: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError) as refused:
        run(config(here, output_path=Path("out"), dry_run=is_dry, **flags))
    assert refused.value.where == f"--{next(iter(flags))}"


@pytest.mark.parametrize(
    "given",
    [{"tile_size": 256, "named": "tiled=True"}, {"tiled": True, "named": "tiled=True"}],
)
def test_a_script_is_told_its_parameters(given: dict[str, Any], here: Path) -> None:
    named = given.pop("named")
    with pytest.raises(UsageError, match=rf"--{next(iter(given))}: ") as refused:
        Pipeline.from_pretrained(str(here / "model"), **given)
    (note,) = refused.value.__notes__
    assert named in note


def test_the_start_says_how_weights_are_kept_and_counts_them_as_without(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    share = re.compile(r"128 parameters, ([\d.]+)%")
    train(here, output_path=tmp_path / "plain", max_steps=1)
    plain = share.findall(capsys.readouterr().err)
    flags = {"quant_options": "dit:bitsandbytes_nf4", "blocks_to_swap": 1}
    train(here, output_path=tmp_path / "kept", max_steps=1, **flags)
    printed = capsys.readouterr().err
    assert "dit: bitsandbytes_nf4, 1 block" in printed
    assert share.findall(printed) == plain == ["19.4"]


CHOSEN: dict[str, Any] = {
    "tiled": True, "framewise_decoding": True, "tile_size": 64, "tile_stride": 32, "fp8_models": "dit",
}  # fmt: skip
NO_TILES = {"tiled": False, "tile_size": None, "tile_stride": None}


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, {}),
        ({"quant_options": "dit:fp8"}, {"fp8_models": None}),
        ({"framewise_decoding": True}, NO_TILES),
        ({"tiled": True}, {**NO_TILES, "framewise_decoding": False}),
        ({"tile_size": 128}, {"tile_stride": None}),
        ({"tile_stride": 16}, {"tile_size": None}),
    ],
)
def test_what_a_run_used_is_what_generation_takes(
    given: dict[str, Any], left: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / CONFIG).parent.mkdir()
    write_resolved(tmp_path / CONFIG, TrainConfig(model="m", **CHOSEN), {})
    config: Any = GenerateConfig(
        run=tmp_path, prompt="a", output=Path("a.png"), **given
    )
    found = with_run_options(config)
    expected = {**CHOSEN, **left, **given}
    assert {name: getattr(found, name) for name in expected} == expected


def test_a_toy_swaps_a_block_in_place_of_those_of_a_file(
    runs: list[TrainConfig], tmp_path: Path
) -> None:
    (tmp_path / "a.toml").write_text("blocks_to_swap = 9\n")
    assert main(["--config", str(tmp_path / "a.toml"), *BASE]) == 0
    assert runs == [toy_config(blocks_to_swap=1)]


@pytest.mark.usefixtures("tiny")
def test_graph_says_how_weights_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["graph", "--model", "tiny", "--toy", "--fp8_models", "text_encoder"]
    assert main(words) == 0
    assert re.search(r"text_encoder +fp8", capsys.readouterr().out)
    assert main([*words, "--format", "json"]) == 0
    kept = json.loads(capsys.readouterr().out)["kept"]
    assert kept["text_encoder"].startswith("fp8")
