"""A command has the flags of the model's family, which --model names, or --model_id tells."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from dstrain import TrainConfig
from dstrain.cli.main import main

from tests.support.command_lines import BASE

Install = Callable[..., Path]
Source = Callable[..., str]
PLACES = ("--dataset_base_path", "data", "--output_path", "out")


def test_the_family_adds_its_flags_to_help(
    runs: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("train", "graph", "generate"):
        assert main([command, "--help"]) == 0
        assert "--tokenizer_path" not in capsys.readouterr().out
        assert main([command, "--model", "faky", "--help"]) == 0
        assert "--tokenizer_path" in capsys.readouterr().out


def test_the_familys_flags_reach_the_configuration(
    runs: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    given = (
        "--model_paths",
        '["a"]',
        "--dataset_base_path",
        "d",
        "--output_path",
        "o",
        "--tokenizer-path",
        "here",
    )
    assert main([*given, "--model", "faky"]) == 0
    assert runs[0].family_options == {"tokenizer_path": "here"}
    assert main([*BASE, "--tokenizer_path", "here"]) == 2
    assert (
        "--tokenizer_path: has no effect: --toy builds its own tokenizer"
        in capsys.readouterr().err
    )


def test_a_familys_flag_without_its_value_is_refused(
    runs: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--model_paths", '["a"]', "--dataset_base_path", "d", "--output_path", "o")
    assert main([*given, "--model", "faky", "--tokenizer_path"]) == 2
    assert not runs
    assert "--tokenizer_path" in capsys.readouterr().err


def test_a_family_flag_named_like_one_of_dstrain_is_refused(
    fake_plugin: Install, family_source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    source = family_source("clashy", options="(Option('seed', 'Another seed.'),)")
    fake_plugin(
        "plugin-clashy", {"clashy": "clashy_record:MODEL"}, {"clashy_record": source}
    )
    assert main(["--model", "clashy"]) == 2
    assert (
        "plugin plugin-clashy 1.0: its flag --seed is already one of dstrain's own"
        in capsys.readouterr().err
    )


@pytest.fixture
def listed(fake_plugin: Install, family_source: Source) -> None:
    """Install a family that lists a model."""
    fields = {
        "model_files": "{'Some/Model': {'dit': 'dit/*.safetensors'}}",
        "pipeline_classes": "('SomePipeline',)",
        "options": "(Option('shade', 'A shade.'),)",
    }
    source = family_source("shady", **fields)
    fake_plugin(
        "plugin-shady", {"shady": "shady_record:MODEL"}, {"shady_record": source}
    )


@pytest.mark.usefixtures("listed")
def test_an_id_tells_the_family_and_its_flags_are_known(
    runs: list[TrainConfig], tmp_path: Path
) -> None:
    words = ["--model_id", "Some/Model@v2", *PLACES]
    assert main([*words, "--shade", "blue"]) == 0
    file = tmp_path / "run.toml"
    file.write_text('model_id = "Some/Model@v2"\nshade = "blue"\nseed = 3\n')
    assert main(["--config", str(file), *PLACES]) == 0
    for config in runs:
        assert (config.model, config.model_id) == ("shady", "Some/Model@v2")
        assert config.family_options == {"shade": "blue"}
    assert runs[1].seed == 3


@pytest.mark.usefixtures("listed")
def test_model_is_taken_at_its_word_beside_an_id(runs: list[TrainConfig]) -> None:
    assert main(["--model", "faky", "--model_id", "Some/Model", *PLACES]) == 0
    assert runs[0].model == "faky"


@pytest.mark.usefixtures("listed")
def test_help_of_a_model_that_is_named_by_its_id_imports_no_torch(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    (folder / "transformer").mkdir(parents=True)
    (folder / "model_index.json").write_text('{"_class_name": "SomePipeline"}')
    code = (
        "import sys\nfrom dstrain.cli.main import main\nassert main(sys.argv[1:]) == 0\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    for named, shown in (
        ("Some/Model", True),
        (str(folder), True),
        (str(folder / "transformer"), False),
    ):
        path = [one for one in sys.path if one]
        done = subprocess.run(
            [sys.executable, "-c", code, "train", "--model_id", named, "--help"],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONPATH": ":".join(path)},
        )
        assert ("--shade" in done.stdout) == shown


def test_without_either_the_model_is_asked_for(
    runs: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLACES]) == 2
    printed = capsys.readouterr().err
    assert "--model: is required: model family, unless --model_id tells it" in printed
    assert not runs
