"""What graph, generate and toy hand on."""

import io
import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dstrain import GenerateConfig, TrainConfig
from dstrain.cli.click_options import COMMAND_NAMES
from dstrain.cli.commands import commands
from dstrain.cli.main import command_group, main
from dstrain.config import LoraFile
from dstrain.console import LOADING
from dstrain.pipeline import variant_choice
from dstrain.plugin import Column
from dstrain.registry import load_family

Install = Callable[..., Path]
Source = Callable[..., str]
TOY = """
def toy(folder, variant, seed):
    folder.mkdir(exist_ok=True)
    (folder / "is").write_text(f"{variant} {seed}")
"""


@pytest.fixture
def faky(fake_plugin: Install, family_source: Source) -> None:
    """The family `faky` is installed."""
    modules = {"faky_record": family_source("faky") + TOY}
    fake_plugin("plugin-faky", {"faky": "faky_record:MODEL"}, modules)


def stub(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("faky")
def test_graph_prints_the_plan_of_a_training_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[TrainConfig] = []

    def plan_of(config: TrainConfig) -> tuple[str, dict[str, str]]:
        asked.append(config)
        return "plan", {"dit": "fp8"}

    stub(monkeypatch, "dstrain.runs.runner", plan_of=plan_of)
    stub(
        monkeypatch,
        "dstrain.graph.render",
        as_text=lambda plan, kept: f"text of {plan}, {kept['dit']}\n",
        as_data=lambda plan, kept: {"of": plan, "kept": kept},
    )
    assert main(["graph", "--model", "faky", "--task", "sft:train"]) == 0
    assert capsys.readouterr().out == "text of plan, fp8\n"
    assert asked == [TrainConfig(model="faky", task="sft:train", dry_run=True)]
    assert main(["graph", "--model", "faky", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"of": "plan", "kept": {"dit": "fp8"}}
    assert main(["graph", "--model", "faky", "--height", "3"]) == 2


@pytest.mark.usefixtures("faky")
def test_generate_hands_on_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[GenerateConfig] = []
    stub(monkeypatch, "dstrain.generation.run", start=asked.append)
    words = ["generate", "--model", "faky", "--toy", "--prompt", "-a cat", "--lora", "a.safetensors", "--lora",
             "b.safetensors:0.5", "--num-inference-steps", "4", "--output", "x.png"]  # fmt: skip
    assert main(words) == 0
    assert asked == [
        GenerateConfig(
            model="faky",
            toy=True,
            prompt="-a cat",
            lora=(
                LoraFile(Path("a.safetensors")),
                LoraFile(Path("b.safetensors"), 0.5),
            ),
            num_inference_steps=4,
            output=Path("x.png"),
        )
    ]
    assert main([*words, "--num_inference_steps", "0"]) == 2
    assert len(asked) == 1


@pytest.mark.usefixtures("faky")
def test_toy_writes_a_new_folder_and_touches_no_users_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "toy"
    words = ["toy", "--model", "faky", "--seed", "3", "--output", str(place)]
    assert main([*words, "--variant", "edit"]) == 0
    assert (place / "is").read_text() == "edit 3"
    assert main(words) == 2
    assert "existing files were not modified" in capsys.readouterr().err
    assert (place / "is").read_text() == "edit 3"
    assert main([*words[:-1], str(place / "is")]) == 2
    assert main([*words[:-1], str(tmp_path / "more"), "--variant", "none"]) == 2


@pytest.mark.parametrize(
    ("told", "more"),
    (("base", ""), ("other", " --variant base"), (None, " --variant base")),
)
def test_toy_says_how_its_model_is_named(
    told: str | None,
    more: str,
    monkeypatch: pytest.MonkeyPatch,
    fake_plugin: Install,
    family_source: Source,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    modules = {"faky_record": family_source("faky") + TOY}
    fake_plugin("plugin-faky", {"faky": "faky_record:MODEL"}, modules)
    monkeypatch.setattr(variant_choice, "variant_of_folder", lambda *_: told)
    place = tmp_path / "my toy"
    assert main(["toy", "--model", "faky", "--output", str(place)]) == 0
    printed = capsys.readouterr().out
    assert printed == f"wrote {place}; use it with --model_id '{place}'{more}\n"


@pytest.mark.parametrize("name", ["diffsynth", "reference"])
def test_the_names_of_diffsynth_studio_have_an_alias(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    programs: list[str] = []

    def export(source: Path, output: Path, program: str, *rest: object) -> str:
        programs.append(program)
        return "1 layer"

    stub(monkeypatch, "dstrain.lora.export", export=export)
    assert main(["export", "--format", name, "in", "out"]) == 0
    assert programs == ["diffsynth"]
    assert capsys.readouterr().out == "wrote out: 1 layer\n"


def test_the_public_commands_are_these() -> None:
    assert tuple(command.name for command in commands()) == COMMAND_NAMES
    assert sorted(command_group().commands) == [
        "cache",
        "export",
        "generate",
        "graph",
        "models",
        "plugins",
        "recipes",
        "toy",
        "train",
    ]


def test_plugins_are_listed_as_table_and_as_data(
    fake_plugin: Install, family_source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = {
        "model_files": "{'Some/Model': {'dit': 'dit/*'}}",
        "model_ids": "{'edit': ('Some/*',)}",
    }
    fake_plugin(
        "plugin-faky",
        {"faky": "faky_record:MODEL"},
        {"faky_record": family_source("faky", **ids)},
    )
    fake_plugin(
        "plugin-bad",
        {"bad": "bad_record:MODEL"},
        {"bad_record": "1 / 0"},
        version="3.1",
    )
    assert main(["plugins", "--json"]) == 0
    found: dict[str, dict[str, Any]] = {
        row["name"]: row for row in json.loads(capsys.readouterr().out)
    }
    assert found["faky"] == {"name": "faky", "distribution": "plugin-faky", "version": "1.0",
                             "variants": ["base", "edit"], "model_ids": {"Some/Model": "edit"},
                             "adds": [], "state": "ready", "reason": ""}  # fmt: skip
    assert (found["bad"]["state"], found["bad"]["version"]) == ("broken", "3.1")
    assert "ZeroDivisionError" in found["bad"]["reason"]
    assert main(["plugins"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines]
    assert ["faky", "plugin-faky", "1.0", "ready", "base,", "edit"] in rows
    assert main(["models", "-p", "no:bad"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["faky", "plugin-faky", "1.0", "base,", "edit"] in rows
    assert ["--model_id", "of", "faky", "variants"] in rows
    assert ["Some/Model", "edit"] in rows
    assert not any(row and row[0] == "bad" for row in rows)


def test_help_shows_each_command_in_a_whole_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    own, _, others = (
        capsys.readouterr()
        .out.partition("Commands:\n")[2]
        .partition("\nCommands of plugins:\n")
    )
    lines = own.splitlines()
    assert [line.split()[0] for line in lines] == sorted(COMMAND_NAMES)
    lines += others.splitlines()
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


def test_a_missing_argument_is_named_as_help_names_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["export", "a", "--format", "kohya"]) == 2
    expected = "dstrain: error: command line: missing argument 'OUTPUT'\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("family", ["flux", "qwen_image", "wan"])
def test_the_columns_of_each_variant_of_a_family_are_listed(
    family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", family]) == 0
    text = capsys.readouterr().out
    record = load_family(family)
    parts = dict(
        zip(
            record.variants,
            re.split(r"\n*^[\w-]+$\n", text, flags=re.M)[1:],
            strict=True,
        )
    )
    for variant, part in parts.items():
        for source in record.spec(variant).inputs.values():
            if isinstance(source, Column):
                assert re.search(rf"\b{source.name}\b", part), (variant, source.name)
        for component in record.spec(variant).components:
            assert re.search(rf"\b{component}\b", part), (variant, component)
    assert max(map(len, text.splitlines())) <= 80


def test_one_variant_is_described_by_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["models", "wan", "--variant", "flf2v"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "flf2v"
    assert lines[1].split(maxsplit=1) == ["columns", "prompt (text), video (video)"]
    assert "Wan-AI/Wan2.1-FLF2V-14B-720P," in " ".join(lines)
    assert main(["models", "wan", "--variant", "none"]) == 2
    assert main(["models", "--variant", "flf2v"]) == 2
    assert main(["models", "wn"]) == 2
    assert "did you mean 'wan'?" in capsys.readouterr().err


class Terminal(io.StringIO):
    """A terminal that keeps what it is shown."""

    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("faky")
@pytest.mark.parametrize(
    ("words", "module", "function"),
    [
        (["train", "--toy", "--dataset_base_path", "d", "--output_path", "o"], "dstrain.runs.runner", "start"),
        (["graph"], "dstrain.runs.runner", "plan_of"),
        (["generate", "--toy", "--prompt", "a", "--output", "o"], "dstrain.generation.run", "start"),
    ],
)  # fmt: skip
def test_a_terminal_is_told_that_a_command_works_before_torch_is_imported(
    words: list[str],
    module: str,
    function: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    shown: list[str] = []

    def start(config: object) -> tuple[str, dict[str, str]]:
        shown.append(terminal.getvalue())
        return "plan", {}

    stub(monkeypatch, module, **{function: start})
    stub(
        monkeypatch,
        "dstrain.graph.render",
        as_text=lambda plan, kept: f"{plan}\n",
        as_data=None,
    )
    assert main([*words, "--model", "faky"]) == 0
    assert shown == [f"{LOADING}\r"]
    # Nothing of it stays, and none of it is in the answer.
    assert terminal.getvalue() == f"{LOADING}\r\r{' ' * len(LOADING)}\r"
    assert LOADING not in capsys.readouterr().out
