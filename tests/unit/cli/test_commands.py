"""What graph, generate, toy, export, models and plugins take and print."""

import json
import re
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import GenerateConfig
from dstrain.cli.family_command import FamilyCommand
from dstrain.cli.main import main
from dstrain.config import LoraFile, NamedInput
from dstrain.installed import installed
from dstrain.plugin import Column
from dstrain.registry import load_family

from tests.support.command_lines import Terminal
from tests.support.family import MODEL, PIPELINES, write

Install = Callable[..., Path]
Source = Callable[..., str]
Printed = pytest.CaptureFixture[str]


@pytest.mark.usefixtures("tiny")
def test_graph_prints_the_plan_of_a_training_command_line(capsys: Printed) -> None:
    words = ["graph", "--model", "tiny", "--toy"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "encode_prompt(prompt) -> prompt_emb" in text
    assert main([*words, "--format", "json", "--task", "sft:train"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["family"], data["task"]) == ("tiny", "sft")
    assert main([*words, "--height", "3"]) == 2


@pytest.mark.usefixtures("tiny")
def test_generate_reads_a_command_line_and_a_file(tmp_path: Path) -> None:
    found: list[GenerateConfig] = []
    command = FamilyCommand("generate", GenerateConfig, found.append)
    file = tmp_path / "a.yaml"
    file.write_text(
        "model: tiny\nprompt: no\nlora: ['~/a.s:0.5', b.s]\ninput: [edit-image=a.png]\n"
    )
    home = Path.home()
    typed = f"--model tiny --prompt -no --lora {home}/a.s:0.5 --lora b.s --input edit_image=a.png"
    for words in (typed, f"--config {file}"):
        more = ("--toy", "--num_inference_steps", "4", "--output", "x.png")
        with command.make_context("generate", [*words.split(), *more]) as context:
            command.invoke(context)
    assert [config.prompt for config in found] == ["-no", "no"]
    for config in found:
        assert config.lora == (LoraFile(home / "a.s", 0.5), LoraFile(Path("b.s")))
        assert config.input == (NamedInput("edit_image", "a.png"),)
        assert (config.num_inference_steps, config.output) == (4, Path("x.png"))


def contents(folder: Path) -> dict[Path, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): path.read_bytes() for path in files}


@pytest.mark.usefixtures("tiny")
def test_toy_writes_a_new_folder_and_says_how_its_model_is_named(
    tmp_path: Path, capsys: Printed
) -> None:
    place = tmp_path / "my toy"
    place.mkdir()
    words = ["toy", "--model", "tiny", "--seed", "3", "--output", str(place)]
    assert main([*words, "--variant", "other"]) == 0
    assert f"--model_id '{place}' --variant other\n" in capsys.readouterr().out
    write(tmp_path / "wanted", "other", 3)
    written = contents(tmp_path / "wanted")
    assert contents(place) == written
    assert main(words) == 2
    assert "--output: " in capsys.readouterr().err
    assert contents(place) == written
    assert main([*words[:-1], str(place / "vae/config.json")]) == 2
    assert main([*words[:-1], str(tmp_path / "more"), "--variant", "none"]) == 2


HOOKS = """
import click
from dstrain import Task
from dstrain.plugin import hookimpl
api = 2
@hookimpl
def dstrain_commands():
    return [click.Command("shout"), click.Command("train")]
@hookimpl
def dstrain_tasks():
    def loss(predict): return predict
    return [Task.of("whisper", loss)]
@hookimpl
def dstrain_keepers(request): return []
@hookimpl
def dstrain_observers(run): return []
@hookimpl
def dstrain_updater(options): pass
@hookimpl
def dstrain_modify_step(step): pass
"""


def test_plugins_are_listed_with_what_they_add_or_why_they_cannot_be_used(
    fake_plugin: Install, family_source: Source, capsys: Printed
) -> None:
    others = [word for one in installed() for word in ("-p", f"no:{one.name}")]
    ids = {
        "model_files": "{'Some/Model': {'dit': 'dit/*'}}",
        "model_ids": "{'edit': ('Some/*',)}",
    }
    source = "__import__('os').write(1, b'1')\n" + family_source("faky", **ids)
    modules = {"faky_record": source}
    fake_plugin("plugin-faky", {"faky": "faky_record:MODEL"}, modules)
    broken = {"bad_record": "1 / 0"}
    fake_plugin("plugin-bad", {"bad": "bad_record:MODEL"}, broken, version="3.1")
    hooks = {"some_hooks": HOOKS}
    fake_plugin("extra-some", {"some": "some_hooks"}, hooks, group="dstrain")
    assert main(["plugins", "--json", *others]) == 0
    found: dict[str, dict[str, Any]] = {
        row["name"]: row for row in json.loads(capsys.readouterr().out)
    }
    assert found["faky"] == {
        "name": "faky",
        "distribution": "plugin-faky",
        "version": "1.0",
        "variants": ["base", "edit"],
        "model_ids": {"Some/Model": "edit"},
        "adds": [],
        "state": "ready",
        "reason": "",
    }
    assert (found["bad"]["state"], found["bad"]["version"]) == ("broken", "3.1")
    assert "ZeroDivisionError" in found["bad"]["reason"]
    named, more = found["some"]["adds"][:2], found["some"]["adds"][2:]
    assert (named, len(more)) == (["command shout", "task whisper"], 4)
    assert "'train'" in found["some"]["reason"]
    assert main(["plugins", *others]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines]
    assert ["faky", "plugin-faky", "1.0", "ready", "base,", "edit"] in rows
    assert main(["models", *others]) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines()]
    assert ["faky", "plugin-faky", "1.0", "base,", "edit"] in rows
    assert ["Some/Model", "edit"] in rows
    assert "ZeroDivisionError:" in said
    first = {row[0] for row in rows if row}
    assert "bad" in first and not {"flux", "wan"} & first


@pytest.mark.parametrize("family", [one.name for one in installed()])
def test_the_columns_of_each_variant_are_listed(family: str, capsys: Printed) -> None:
    assert main(["models", family]) == 0
    text = capsys.readouterr().out
    record = load_family(family)
    parts = re.split(r"\n*^[\w-]+$\n", text, flags=re.M)[1:]
    for variant, part in zip(record.variants, parts, strict=True):
        spec = record.spec(variant)
        columns = [one.name for one in spec.inputs.values() if isinstance(one, Column)]
        for name in (*columns, *spec.components):
            assert re.search(rf"\b{name}\b", part), (variant, name)
    assert max(map(len, text.splitlines())) <= 80


NEAR = replace(
    MODEL,
    name="near",
    variants=("oth", "other"),
    pipelines=f"{__name__}:NEAR_PIPELINES",
)
"""A family of variants of which one's name is a part of the other's."""
NEAR_PIPELINES = dict.fromkeys(NEAR.variants, PIPELINES["other"])


def test_a_variant_is_listed_with_its_own_models(
    fake_plugin: Install, capsys: Printed
) -> None:
    fake_plugin("plugin-near", {"near": f"{__name__}:NEAR"}, {})
    for variant in NEAR.variants:
        assert main(["models", "near", "--variant", variant]) == 0
        said = capsys.readouterr().out
        assert ("Tiny/Other" in said) == (variant == "other")


@pytest.mark.usefixtures("tiny")
def test_a_terminal_is_told_that_a_command_works_meanwhile(capsys: Printed) -> None:
    with redirect_stderr(Terminal()) as terminal:
        assert main(["graph", "--model", "tiny", "--toy"]) == 0
        assert main(["-h"]) == 0
    shown, *_, blank, end = terminal.getvalue().split("\r")
    assert shown.strip()
    assert (blank, end) == (" " * len(blank), "")
    printed = capsys.readouterr().out
    assert shown.strip() not in printed and "\x1b" not in printed


@pytest.mark.usefixtures("tiny")
def test_one_variant_is_described_by_its_name(capsys: Printed) -> None:
    assert main(["models", "tiny", "--variant", "other"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "other"
    said = " ".join(lines)
    assert "mood (text)" in said and "Tiny/Other" in said and "Tiny/Tiny" not in said
    assert main(["models", "tiny", "--variant", "none"]) == 2
    assert main(["models", "--variant", "other"]) == 2
    assert main(["models", "tny"]) == 2
    assert "'tiny'" in capsys.readouterr().err
