"""Options follow from the fields of a configuration."""

import typing
from pathlib import Path

import pytest
from dstrain import TrainConfig
from dstrain.cli.main import main
from dstrain.config import Group, flags

from tests.support.command_lines import BASE


def test_help_names_every_flag_as_documented(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for flag in flags(TrainConfig):
        assert f"--{flag.name}" in text.split()
    groups = [group for group in typing.get_args(Group) if group != "generation"]
    places = [text.splitlines().index(f"{group}:") for group in groups]
    assert places == sorted(places)


def test_values_reach_the_configuration_with_their_types(
    runs: list[TrainConfig],
) -> None:
    assert (
        main(
            [
                *BASE,
                "--learning_rate",
                "1e-5",
                "--max_steps=7",
                "--use_gradient_checkpointing",
                "--variant",
                "edit",
            ]
        )
        == 0
    )
    config = runs[0]
    assert (
        config.learning_rate,
        config.max_steps,
        config.use_gradient_checkpointing,
    ) == (1e-5, 7, True)
    assert config.variant == "edit"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], None),
        (["--use_gradient_checkpointing"], True),
        (["--no-use-gradient-checkpointing"], False),
    ],
)
def test_a_switch_can_be_turned_off_too(
    words: list[str], value: bool | None, runs: list[TrainConfig]
) -> None:
    assert main([*BASE, *words]) == 0
    assert runs[0].use_gradient_checkpointing is value


def test_several_words_may_follow_a_flag_that_takes_them(
    runs: list[TrainConfig],
) -> None:
    words = ["--optimizer-args", "a=1", "b=2", "--seed", "3", "--optimizer_args", "c=4"]
    assert main([*BASE, *words]) == 0
    assert runs[0].optimizer_args == ("a=1", "b=2", "c=4")
    assert runs[0].seed == 3
    assert main([*BASE, "--optimizer_args"]) == 2
    assert main([*BASE, "--seed", "3", "4"]) == 2


def test_a_learning_rate_may_be_one_for_each_component(runs: list[TrainConfig]) -> None:
    assert main([*BASE, "--learning_rate", "1e-4,text_encoder=1e-5"]) == 0
    assert runs[0].learning_rate == "1e-4,text_encoder=1e-5"


def test_frames_may_be_one_number_or_several(runs: list[TrainConfig]) -> None:
    for given in ("33", "17,33"):
        assert main([*BASE, "--num_frames", given]) == 0
    assert [config.num_frames for config in runs] == [33, "17,33"]
    assert main([*BASE, "--num_frames", "many"]) == 2


def test_option_names_are_folded_and_values_are_not(runs: list[TrainConfig]) -> None:
    words = [
        "--model",
        "faky",
        "--toy",
        "--dataset-base-path",
        "my-data_set",
        "--output_path=out-put",
    ]
    words += [
        "--lora-target_modules",
        "to-q,to_k",
        "--lr-scheduler",
        "constant_with_warmup",
        "--lr-warmup-steps",
        "2",
    ]
    assert main(words) == 0
    assert runs[0].dataset_base_path == Path("my-data_set")
    assert (runs[0].output_path, runs[0].lora_target_modules) == (
        Path("out-put"),
        "to-q,to_k",
    )
    assert (
        main(
            [*BASE, "--lr_scheduler", "constant-with-warmup", "--lr_warmup_steps", "2"]
        )
        == 2
    )
    assert len(runs) == 1


def test_resume_may_stand_alone_or_name_a_path(
    runs: list[TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "somewhere").mkdir()
    (tmp_path / "somewhere/record.json").touch()
    for more in (
        (),
        ("--resume",),
        ("--resume", "--seed", "3"),
        ("--resume", "somewhere"),
    ):
        assert main([*BASE, *more]) == 0
    assert [config.resume for config in runs] == [None, "auto", "auto", "somewhere"]
    assert runs[2].seed == 3
