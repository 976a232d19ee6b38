"""Values of options are read as they are typed, or as a script gives them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import GenerateConfig, LoraConfig, TrainConfig, UsageError, run
from dstrain.config import (
    LearningRates,
    LoraFile,
    NamedInput,
    as_size,
    parse_alpha,
    parse_input,
    parse_learning_rates,
    parse_lora,
    parse_model_paths,
    parse_origins,
    split_commas,
    validate,
)

from tests.support.command_lines import toy_config


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (split_commas, " to_q, to_k,,", ("to_q", "to_k")),
        (split_commas, None, ()),
        (parse_input, "edit-image=a=b", NamedInput("edit_image", "a=b")),
        (parse_alpha, "rank", "rank"),
        (parse_alpha, "4", 4.0),
        (parse_model_paths, '["a", ["b", "c"]]', (("a",), ("b", "c"))),
        (parse_model_paths, '"a"', (("a",),)),
        (parse_model_paths, None, ()),
        (parse_origins, "a/b:c/*.s, d/e:t/", (("a/b", "c/*.s", ""), ("d/e", "t/", ""))),
        (parse_origins, "a/b@v1:c:d,a/b:e", (("a/b", "c:d", "v1"), ("a/b", "e", "v1"))),
        (as_size, 38.06 * 2**30, "38.06 GiB"),
        (as_size, 2**30 / 10, "0.10 GiB"),
        (as_size, 2**20 / 10, "0.1 MiB"),
        (as_size, 3174, "3.1 KiB"),
    ],
)
def test_what_is_typed_is_understood(
    parse: Callable[[Any], Any], text: Any, value: object
) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("option", "values"),
    {
        "model_paths": (
            "a.safetensors",
            '{"a": 1}',
            '""',
            "[1]",
            "[[]]",
            '[""]',
            "null",
        ),
        "model_id_with_origin_paths": (
            *("a/b", "a/b:", ":c", "a/b@:c", "a/b@v1:c,a/b@v2:c"),
            *("a/b:/etc/x", "a/b:../b/c", "a/b:c/../../d"),
        ),
        "resolution": ("", "0", "-64", "64,", "512x512", "1e3", "٣", "64,64"),
        "num_frames": ("17,", "17,0", "17,a", "17,17"),
        "lora_rank": (
            *("", "attn=x", "attn=1.5", "attn=0", "8,attn=99999999999999999999"),
            *("32769", "=1", "attn=1,2", "attn=1,attn=2"),
        ),
        "lora_alpha": ("ff=x", "ff=inf", "ff=0"),
        "learning_rate": (
            *("", "dit=x", "dit=nan", "dit=-1", "=1", "dit=1,2", "dit=1,dit=2"),
        ),
    }.items(),
)
def test_what_is_not_understood_is_refused_by_its_option(
    option: str, values: tuple[str, ...]
) -> None:
    for value in values:
        config = toy_config(**{"toy": False, "dry_run": True, option: value})
        with pytest.raises(UsageError) as caught:
            validate(config)
        assert caught.value.where == f"--{option}"


def test_a_folder_as_model_paths_is_told_the_flag_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "a model"
    folder.mkdir()
    with pytest.raises(UsageError, match=f"--model_id '{folder}'"):
        parse_model_paths(str(folder))


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (None, LearningRates(1.0)),
        (1e-4, LearningRates(1e-4)),
        ("1e-4", LearningRates(1e-4)),
        ("dit=1e-4, vae=1e-5", LearningRates(None, {"dit": 1e-4, "vae": 1e-5})),
        ("2e-4,text_encoder=1e-5", LearningRates(2e-4, {"text_encoder": 1e-5})),
    ],
)
def test_a_learning_rate_may_be_one_for_each_component(
    value: float | str | None, want: LearningRates
) -> None:
    assert parse_learning_rates(value, 1.0) == want
    if value is not None:
        assert parse_learning_rates(str(want), 1.0) == want


def test_the_learning_rate_of_the_longest_name_wins() -> None:
    rates = parse_learning_rates("1,dit=2,dit.blocks.3=3", 1.0)
    assert rates.of("dit.blocks.3.weight") == 3
    assert rates.of("dit.blocks.30.weight") == 2
    assert rates.of("text_encoder.weight") == 1
    assert parse_learning_rates("dit=2", 1.0).of("vae") is None
    assert parse_learning_rates("1,dit=2", 1.0).plain == "1,dit=2"
    assert parse_learning_rates(2.0, 1.0).plain == 2.0


@pytest.mark.parametrize(
    ("given", "rank", "alpha", "ranks", "alphas"),
    [
        ({}, 32, 32.0, (), ()),
        ({"lora_rank": 16}, 16, 16.0, (), ()),
        ({"lora_rank": "16,ff=8"}, 16, None, (("ff", 8),), ()),
        ({"lora_rank": "attn=4, ff=8"}, 32, None, (("attn", 4), ("ff", 8)), ()),
        ({"lora_alpha": 0.5}, 32, 0.5, (), ()),
        ({"lora_alpha": "1,ff=2.5"}, 32, 1.0, (), (("ff", 2.5),)),
    ],
)
def test_ranks_and_alphas_may_be_given_by_layer(
    given: dict[str, Any], rank: int, alpha: float | None, ranks: Any, alphas: Any
) -> None:
    found = LoraConfig.of(toy_config(**given), "dit", ("to_q",))
    assert (found.rank, found.alpha) == (rank, alpha)
    assert (found.ranks, found.alphas) == (ranks, alphas)


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("a.s", LoraFile(Path("a.s"))),
        ("a.s:0.5", LoraFile(Path("a.s"), 0.5)),
        ("a.s:0", LoraFile(Path("a.s"), 0.0)),
        ("a:b.s", LoraFile(Path("a:b.s"))),
        ("a:b.s:-1", LoraFile(Path("a:b.s"), -1.0)),
        ("a:nan", LoraFile(Path("a:nan"))),
        (":0.5", LoraFile(Path(":0.5"))),
        ("a.s@alpha=rank", LoraFile(Path("a.s"), alpha="rank")),
        ("a.s:0.5@alpha=8", LoraFile(Path("a.s"), 0.5, alpha=8.0)),
        ("a.s@skip_missing", LoraFile(Path("a.s"), skip_missing=True)),
        (
            "a:b.s:2@skip_missing@alpha=0.5",
            LoraFile(Path("a:b.s"), 2.0, alpha=0.5, skip_missing=True),
        ),
        ("me@home.s", LoraFile(Path("me@home.s"))),
        ("a.s@skip", LoraFile(Path("a.s@skip"))),
        ("a@alpha=rank.s", LoraFile(Path("a@alpha=rank.s"))),
        ("a.s@alpha=rank:0.5", LoraFile(Path("a.s@alpha=rank"), 0.5)),
        ("dit2=a.s:0.5", LoraFile(Path("a.s"), 0.5, "dit2")),
        ("dit=dit2=a.s", LoraFile(Path("dit2=a.s"), component="dit")),
        ("x/dit2=a.s", LoraFile(Path("x/dit2=a.s"))),
        ("dit3=a.s", LoraFile(Path("dit3=a.s"))),
        ("dit2=", LoraFile(Path("dit2="))),
        ("./dit=a.s:0.5", LoraFile(Path("dit=a.s").absolute(), 0.5)),
        ("./x/dit=a.s", LoraFile(Path("x/dit=a.s"))),
        ("./", LoraFile(Path())),
    ],
)
def test_a_lora_file_has_component_scale_and_options(text: str, file: LoraFile) -> None:
    components = ("dit", "dit2")
    assert parse_lora(text).of(components).of(components) == file
    assert parse_lora(str(file)).of(components) == file
    assert parse_lora(file.typed).of(components) == file


@pytest.mark.parametrize(
    ("parse", "text", "where"),
    [
        (parse_input, "=x", "--input"),
        (parse_input, "x", "--input"),
        (parse_alpha, "0", "--alpha"),
        (parse_alpha, "x", "--alpha"),
        (parse_alpha, "-1", "--alpha"),
        (parse_alpha, "nan", "--alpha"),
        (parse_alpha, "inf", "--alpha"),
        (parse_lora, "a.s@alpha=0", "@alpha"),
        (parse_lora, "a.s@alpha=2@alpha=rank", "@alpha"),
        (parse_lora, "a.s@training_only", "@training_only"),
    ],
)
def test_what_is_malformed_names_its_option(
    parse: Callable[[str], Any], text: str, where: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert caught.value.where == where


def test_a_script_gives_one_value_or_a_list_where_several_may_be() -> None:
    config = toy_config(
        column="prompt=text",
        dataset_root=["a", Path("b")],
        dataset=[{"dataset_base_path": Path("photos"), "repeats": 2}],
        lora_target_modules=["to_q", "to_k"],
        model_id=Path("model"),
        model_paths=[Path("a.safetensors"), ("b.safetensors", "c.safetensors")],
    )
    assert config.column == ("prompt=text",)
    assert config.dataset_root == (Path("a"), Path("b"))
    photos = {"dataset_base_path": "photos", "repeats": 2}
    assert [json.loads(one) for one in config.dataset] == [photos]
    assert config.lora_target_modules == "to_q,to_k"
    assert config.model_id == "model"
    assert json.loads(config.model_paths or "") == [
        "a.safetensors",
        ["b.safetensors", "c.safetensors"],
    ]
    assert toy_config(column=[], dataset=[]) == toy_config()
    assert toy_config(model_paths=Path("a")).model_paths == '["a"]'


def test_a_script_writes_lora_files_and_inputs_as_on_the_command_line() -> None:
    config = GenerateConfig(
        model="m", output="out.png", lora="dogs.safetensors:0.5", input="image=a.png"
    )
    assert config.lora == (LoraFile(Path("dogs.safetensors"), 0.5),)
    assert config.input == (NamedInput("image", "a.png"),)
    several = replace(
        config, lora=[Path("a"), LoraFile(Path("b"))], input=["x=1", "y=2"]
    )
    assert [one.path.name for one in several.lora] == ["a", "b"]
    assert [str(one) for one in several.input] == ["x=1", "y=2"]


def test_an_option_that_there_is_not_is_answered_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"'rank'.*'lora_rank'"):
        TrainConfig(model="m", rank=32)  # type: ignore[call-arg]  # which is refused
    with pytest.raises(TypeError, match=r"'promt'.*'prompt'"):
        GenerateConfig(model="m", output="o", promt="a")  # type: ignore[call-arg]  # which is refused


@pytest.mark.usefixtures("tiny")
def test_flags_in_an_error_are_told_as_a_script_writes_them() -> None:
    for given, keywords in (
        ({"lora_rank": 0}, "lora_rank=..."),
        ({"resume": "auto", "overwrite": True}, "resume='auto', overwrite=True"),
    ):
        with pytest.raises(UsageError) as caught:
            run(toy_config(**{"model": "tiny", **given}))
        (note,) = caught.value.__notes__
        assert keywords in note
