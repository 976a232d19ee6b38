"""`--config FILE` is the command line that it stands for; faults name file and key."""

import json
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dstrain import GenerateConfig, TrainConfig
from dstrain.cli.family_command import FamilyCommand
from dstrain.cli.main import main
from dstrain.config import (
    Flag,
    LoraFile,
    NamedInput,
    command_line,
    flags,
    write_resolved,
)
from dstrain.config.options import ModelChoice, options_affecting
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.support.command_lines import BASE, toy_config

Install = Callable[..., Path]
Source = Callable[..., str]
Printed = pytest.CaptureFixture[str]
OPTIONS = "(Option('tokenizer_path', 'A.', 'tokenizer'), Option('bare', 'B.', 'dit', 'bare'), Option('area', 'C.'))"
TOML = """
model = "faky"
toy = true
dataset-base-path = "data"
output_path = "out"
learning_rate = 1e-5
seed = 3
column = ["prompt=a dog", "b=c"]
area = 64
"""
YAML = """
# what a run is
model: faky
toy: true
dataset_base_path: data
output_path: "out"
learning_rate: 1e-5
seed: 3
num_epochs: null
column: [prompt=a dog, 'b=c']
area: 64
"""
JSON = json.dumps({
    "model": "faky", "toy": True, "dataset_base_path": "data", "output_path": "out", "learning_rate": 1e-5, "seed": 3,
    "column": ["prompt=a dog", "b=c"], "area": "64", "overwrite": False, "versions": {"torch": "2"},
})  # fmt: skip
WANTED = toy_config(
    learning_rate=1e-5,
    seed=3,
    column=("prompt=a dog", "b=c"),
    family_options={"area": "64"},
)
BAD = {
    "toml": {
        "batchsize = 3": "x.toml:batchsize: 'batch_size'",
        "loss_type = 'l1'": "x.toml:loss_type:",
        "hf_token = 'hf_abcdefghijklmnopqrstu'": "x.toml:hf_token:",
        "config = 'y.toml'": "x.toml:config:",
        "seed = 1.5": "x.toml:seed: '1.5'",
        "seed = true": "x.toml:seed: 'true'",
        "learning_rate = 0": "x.toml:learning_rate: 0.0",
        "variant = 2511": "x.toml:variant: '2511' base, edit",
        "toy = 2": "x.toml:toy: '2'",
        "bare = 'maybe'": "x.toml:bare: 'maybe'",
        "hub = 'hugingface'": "x.toml:hub: modelscope, 'hugingface' 'huggingface'",
        "column = 'a'": "x.toml:column:",
        "column = [['a']]": "x.toml:column:",
        "trainable_models = ['a', 'b']": "x.toml:trainable_models:",
        "[dataset]\nseed = 1": "x.toml:dataset:",
        "stray = 1\n[[datasets]]\na = 1": "x.toml:datasets:",
        "[seed]\na = 1": "x.toml:seed:",
        "output_path = ''": "x.toml:output_path:",
        "p = ['nope']": "x.toml:p: no:NAME 'nope'",
        "model = 'fakky'": "--model: 'fakky' 'faky'",
        "model = 3": "--model: '3'",
        "seed = 1\nseed = 2": "x.toml:",
        "output_path = out": "x.toml: line 1, TOML",
        r'output_path = "C:\photos"': "x.toml: line 1, TOML",
        r'output_path = "C:\Users"': "x.toml: line 1, TOML",
        "seed 1": "x.toml: line 1,",
        "\udcff": "x.toml: utf-8",
        "toy = true\nheight = 64": "x.toml:height: --width",
    },
    "yaml": {
        "tokeniser_path: a": "x.yaml:tokeniser_path: 'tokenizer_path'",
        "seed: three": "x.yaml:seed: 'three'",
        "job: extension\nconfig:\n  name: a": "x.yaml:config:",
        "seed: {a: 1}": "x.yaml:seed:",
        "seed: !!int x": "x.yaml:seed: 'x'",
        "seed: !!python/object/apply:os.system [touch hacked]": "x.yaml:seed:",
        "a: b: c": "x.yaml: line 1",
        "a: \x07": "x.yaml:",
        "- seed": "x.yaml:",
        "a: 1\n---\nb: 1": "x.yaml:",
        "a: " + "[" * 600 + "]" * 600: "x.yaml:",
    },
    "json": {
        '{"learning_rate": NaN}': "x.json:learning_rate: nan",
        '{"seed": {"a": 1}}': "x.json:seed:",
        "[1]": "x.json:",
        "{": "x.json: line 1",
    },
    "ini": {"seed = 1": "--config: x.ini .toml, .json"},
}
"""Kind of file -> its text -> the place of the error, then what it must name."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def family_source(family_source: Source) -> Source:
    """Give the family `faky` options."""
    return partial(family_source, options=OPTIONS)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("a.toml", TOML), ("a.yaml", YAML), ("a.yml", YAML), ("a.json", JSON)),
        ("a.toml", f"\ufeff{TOML}"),
    ],
)
def test_a_file_is_the_command_line_it_stands_for(
    here: Path, runs: list[TrainConfig], name: str, text: str
) -> None:
    (here / name).write_text(text)
    assert main(["--config", name]) == 0
    assert main(["train", f"--config={name}"]) == 0
    assert runs == [WANTED, WANTED]
    assert (type(runs[0].learning_rate), type(runs[0].seed)) == (float, int)


@pytest.mark.parametrize("null", ["", "~", "null", "Null", "NULL", "# a comment"])
def test_a_null_of_yaml_counts_as_absent_unless_it_is_quoted(
    here: Path, runs: list[TrainConfig], null: str
) -> None:
    absent = f"{YAML}preset_lora_path: {null}\n"
    (here / "a.yaml").write_text(
        absent.replace("num_epochs: null", f"num_epochs: {null}")
    )
    assert main(["--config", "a.yaml"]) == 0
    assert runs == [WANTED]
    (here / "a.yaml").write_text(f"{YAML}preset_lora_path: '{null or '~'}'\n")
    assert main(["--config", "a.yaml"]) == 0
    assert runs[1].preset_lora_path == Path(null or "~")


def test_a_path_may_begin_at_home(
    here: Path, runs: list[TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/you")
    text = """
        model = "faky"
        model_id = "~/model"
        model_paths = '["~/a.safetensors", ["~/b.safetensors"]]'
        tokenizer_path = "~/tokenizer"
        output_path = "~/out"
        preset_lora_path = "./~/lora.safetensors"
        column = ["prompt=~/a wave"]
        [[dataset]]
        dataset-base-path = "~/data"
    """
    (here / "a.toml").write_text(text)
    assert main(["--config", "a.toml"]) == 0
    (config,) = runs
    assert config.model_paths == (
        '["/home/you/a.safetensors", ["/home/you/b.safetensors"]]'
    )
    assert config.model_id == "/home/you/model"
    assert config.output_path == Path("/home/you/out")
    assert config.family_options == {"tokenizer_path": "/home/you/tokenizer"}
    assert config.preset_lora_path == Path("~/lora.safetensors")
    assert config.column == ("prompt=~/a wave",)
    assert json.loads(config.dataset[0])["dataset-base-path"] == "/home/you/data"
    # A run records paths as they are.
    write_resolved(here / "b.json", replace(config, output_path=Path("~/out")), {})
    assert main(["--config", "b.json"]) == 0
    assert runs[1].output_path == Path("~/out")


def test_a_toy_that_is_typed_replaces_the_files_of_a_file_and_nothing_else(
    here: Path, runs: list[TrainConfig]
) -> None:
    files = 'model_id = "a"\nhub = "modelscope"\ntokenizer_path = "here"\n'
    kept = 'model = "faky"\nbare = true\narea = 64\n'
    (here / "a.toml").write_text(files + kept)
    assert main(["--config", "a.toml", *BASE[2:]]) == 0
    options = {"bare": "True", "area": "64"}
    assert runs == [toy_config(family_options=options)]


def test_words_of_yaml_mean_what_flags_do(here: Path, runs: list[TrainConfig]) -> None:
    (here / "a.yaml").write_text(
        YAML
        + "mixed_precision: no\nweight_decay: 1e-2\nuse_gradient_checkpointing: yes\noverwrite: off\n"
        "resume: auto\nlr_scheduler: 'constant'\nbare: on\nvariant: edit\ntask: ~\np: []\n"
    )
    assert main(["--config", "a.yaml"]) == 0
    assert runs == [
        replace(
            WANTED,
            mixed_precision="no",
            weight_decay=0.01,
            use_gradient_checkpointing=True,
            resume="auto",
            variant="edit",
            family_options={"area": "64", "bare": "True"},
        )
    ]
    assert main(shlex.split(command_line(runs[0]))[1:]) == 0
    assert runs[1] == runs[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [(f"x.{kind}", text) for kind, texts in BAD.items() for text in texts],
    ids=lambda value: ascii(value)[:40],
)
def test_what_does_not_fit_is_named_by_file_and_key(
    here: Path, runs: list[TrainConfig], capsys: Printed, name: str, text: str
) -> None:
    (here / name).write_text(text, errors="surrogateescape")
    before = (here / name).read_bytes()
    model = () if text.startswith("model =") else ("--model", "faky")
    assert main(["--config", name, *model]) == 2
    said = capsys.readouterr().err
    place, *named = BAD[name.removeprefix("x.")][text].split(" ")
    assert said.startswith(f"dstrain: error: {place} ")
    assert [word for word in named if word not in said] == []
    assert len(said.splitlines()) <= 4
    assert "hf_abcdef" not in said
    assert not runs
    assert [path.name for path in here.iterdir()] == [name]
    assert (here / name).read_bytes() == before


def test_a_file_that_cannot_be_read_is_named(here: Path, capsys: Printed) -> None:
    (here / "folder.toml").mkdir()
    for name, place in (("gone.toml", "--config: gone.toml"), ("folder.toml",) * 2):
        assert main(["--config", name]) == 2
        assert capsys.readouterr().err.startswith(f"dstrain: error: {place}")


TEXTS = st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)
PATHS = st.text("abc /.:-é猫 ", min_size=1, max_size=8).map(Path)
NAMES = st.from_regex(r"[a-z][a-z_]{0,6}[a-z]", fullmatch=True)


def values(flag: Flag) -> st.SearchStrategy[Any]:
    low = flag.minimum if flag.minimum is not None else flag.above
    floats = partial(st.floats, allow_nan=False, allow_infinity=False)
    is_open = flag.above is not None
    kinds: dict[Any, Callable[[], st.SearchStrategy[Any]]] = {
        bool: st.booleans,
        int: lambda: st.integers(
            *(None if end is None else int(end) for end in (low, flag.maximum))
        ),
        float: lambda: floats(low, flag.maximum, exclude_min=is_open),
        Path: lambda: PATHS,
        str: lambda: st.sampled_from(flag.choices) if flag.choices else TEXTS,
        LoraFile: lambda: st.builds(LoraFile, PATHS, floats()),
        NamedInput: lambda: st.builds(NamedInput, NAMES, TEXTS),
    }
    one = kinds[flag.kind]()
    if flag.many:
        return st.lists(one, max_size=3).map(tuple)
    if flag.required or flag.kind is bool:
        return one
    return st.one_of(st.just(flag.default), one)


@st.composite
def configurations(draw: st.DrawFn, kind: type[ModelChoice]) -> ModelChoice:
    named = ("model", "variant")
    every = {flag.name: flag for flag in flags(kind) if flag.name not in named}
    given = {name: draw(values(flag)) for name, flag in every.items()}
    family = {
        "tokenizer_path": draw(TEXTS),
        "area": draw(st.integers(1).map(str)),
        "bare": "True",
    }
    some = draw(st.sets(st.sampled_from(sorted(family))))
    if given["toy"]:
        some.discard("tokenizer_path")
    return kind(
        model="faky",
        variant=draw(st.sampled_from([None, "edit"])),
        family_options={name: family[name] for name in some},
        disabled_plugins=draw(st.sampled_from([(), ("plugin-left",)])),
        **given,
    )


@pytest.mark.parametrize("kind", [TrainConfig, GenerateConfig])
def test_a_written_configuration_is_read_back_as_it_was(
    kind: type[ModelChoice], fake_plugin: Install, family_source: Source
) -> None:
    modules = {"faky_record": family_source("faky", options=OPTIONS)}
    fake_plugin("plugin-faky", {"faky": "faky_record:MODEL"}, modules)
    fake_plugin("plugin-left", {"faky": "left_record:MODEL"}, {})
    found: list[ModelChoice] = []
    read = FamilyCommand("x", kind, lambda config: found.append(config))

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(configurations(kind))
    def holds(config: ModelChoice) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.json"
            write_resolved(path, config, {"torch": "2"})
            more = [] if config.disabled_plugins else ["-p", "no:plugin-left"]
            with read.make_context("x", ["--config", str(path), *more]) as context:
                read.invoke(context)
        disabled = config.disabled_plugins or ("plugin-left",)
        wanted = {**vars(config), "disabled_plugins": disabled}
        for flag in flags(kind):
            if flag.name in options_affecting("start", "origin"):
                wanted[flag.name] = flag.default
        assert found.pop() == kind(**wanted)

    holds()


def test_a_path_that_is_no_text_comes_back(here: Path, runs: list[TrainConfig]) -> None:
    config = toy_config(dataset_base_path=Path("d\udcff"))
    write_resolved(here / "a.json", config, {})
    assert main(["--config", "a.json"]) == 0
    assert runs == [config]
