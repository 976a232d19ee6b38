"""`--config FILE`: the command line that it stands for; what is no flag or no such
value is named by file and key.
"""

import json
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import GenerateConfig, TrainConfig
from dstrain.cli import FamilyCommand
from dstrain.cli.main import main
from dstrain.config import Flag, LoraFile, NamedInput, as_flags, flags, write_resolved
from dstrain.config.options import ModelChoice, options_affecting
from hypothesis import HealthCheck, given, settings, strategies as st

Install = Callable[..., Path]
Source = Callable[..., str]
OPTIONS = "(Option('tokenizer_path', 'A.', 'tokenizer'), Option('bare', 'B.', 'dit', 'bare'), Option('area', 'C.'))"
TOML = """
model = "faky"
toy = true
dataset-base-path = "data"
output_path = "out"
learning_rate = 1e-5
seed = 3
preview_prompt = ["a dog", "a cat"]
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
preview_prompt: [a dog, 'a cat']
area: 64
"""
JSON = json.dumps({
    "model": "faky", "toy": True, "dataset_base_path": "data", "output_path": "out", "learning_rate": 1e-5, "seed": 3,
    "preview_prompt": ["a dog", "a cat"], "area": "64", "overwrite": False, "versions": {"torch": "2"},
})  # fmt: skip
WANTED = TrainConfig(
    model="faky",
    toy=True,
    dataset_base_path=Path("data"),
    output_path=Path("out"),
    learning_rate=1e-5,
    seed=3,
    preview_prompt=("a dog", "a cat"),
    family_options={"area": "64"},
)
BAD: tuple[tuple[str, str, str], ...] = (
    (
        "x.toml",
        "batchsize = 3",
        "x.toml:batchsize: no such option; did you mean 'batch_size'?",
    ),
    (
        "x.yaml",
        "tokeniser_path: a",
        "x.yaml:tokeniser_path: no such option; did you mean 'tokenizer_path'?",
    ),
    ("x.toml", "loss_type = 'l1'", "x.toml:loss_type: no such option"),
    (
        "x.toml",
        "hf_token = 'hf_abcdefghijklmnopqrstu'",
        "x.toml:hf_token: no such option",
    ),
    ("x.toml", "config = 'y.toml'", "x.toml:config: no such option"),
    ("x.toml", "seed = 1.5", "x.toml:seed: '1.5' is not a valid integer"),
    ("x.toml", "seed = true", "x.toml:seed: 'true' is not a valid integer"),
    ("x.yaml", "seed: three", "x.yaml:seed: 'three' is not a valid integer"),
    (
        "x.yaml",
        "learning_rate: 1e-4x",
        "x.yaml:learning_rate: '1e-4x' is not a valid float",
    ),
    (
        "x.toml",
        "learning_rate = 0",
        "x.toml:learning_rate: expected more than 0, got 0.0",
    ),
    (
        "x.json",
        '{"learning_rate": NaN}',
        "x.json:learning_rate: expected a finite number, got nan",
    ),
    (
        "x.toml",
        "variant = 2511",
        "x.toml:variant: faky has no variant '2511'; variants: base, edit",
    ),
    ("x.toml", "toy = 2", "x.toml:toy: '2' is not a valid boolean"),
    ("x.yaml", "toy: maybe", "x.yaml:toy: 'maybe' is not a valid boolean"),
    ("x.toml", "bare = 'maybe'", "x.toml:bare: 'maybe' is not a valid boolean"),
    (
        "x.toml",
        "hub = 'hugingface'",
        "x.toml:hub: expected one of modelscope, huggingface, got 'hugingface'; did you mean",
    ),
    (
        "x.toml",
        "preview_prompt = 'a'",
        "x.toml:preview_prompt: can be repeated: expected a list",
    ),
    (
        "x.toml",
        "preview_prompt = [['a']]",
        "x.toml:preview_prompt: is a table; expected one value, or a list",
    ),
    (
        "x.toml",
        "trainable_models = ['a', 'b']",
        "x.toml:trainable_models: expected one value; write it in quotes, as on the command line",
    ),
    (
        "x.toml",
        "[dataset]\nseed = 1",
        "x.toml:dataset: is a table; expected one value, or a list",
    ),
    (
        "x.yaml",
        "job: extension\nconfig:\n  name: a",
        "x.yaml:config: is a table; expected one value, or a list",
    ),
    (
        "x.toml",
        "stray = 1\n[[datasets]]\na = 1",
        "x.toml:datasets: is a table; expected one value, or a list",
    ),
    (
        "x.json",
        '{"seed": {"a": 1}}',
        "x.json:seed: is a table; expected one value, or a list",
    ),
    (
        "x.toml",
        "[seed]\na = 1",
        "x.toml:seed: is a table; expected one value, or a list",
    ),
    (
        "x.yaml",
        "seed: {a: 1}",
        "x.yaml:seed: is a table; expected one value, or a list",
    ),
    ("x.toml", "output_path = ''", "x.toml:output_path: is empty"),
    ("x.toml", "p = ['nope']", "x.toml:p: expected no:NAME, got 'nope'"),
    ("x.toml", "model = 'fakky'", "--model: no model named 'fakky'; installed: "),
    ("x.toml", "model = 3", "--model: no model named '3'; installed: "),
    (
        "x.toml",
        "seed = 1\nseed = 2",
        "x.toml: cannot be parsed: Cannot overwrite a value",
    ),
    *(
        (
            "x.toml",
            f"output_path = {path}",
            f"x.toml: cannot be parsed: {why})\n  in TOML, text stands in quotes",
        )
        for path, why in (
            ("out", "Invalid value (at line 1, column 15"),
            (r'"C:\photos"', "Unescaped '\\' in a string (at line 1, column 20"),
            (r'"C:\Users"', "Invalid hex value (at line 1, column 20"),
        )
    ),
    ("x.toml", "seed 1", "x.toml: cannot be parsed: Expected '=' after a key"),
    (
        "x.yaml",
        "a: b: c",
        "x.yaml: cannot be parsed: mapping values are not allowed here in line 1",
    ),
    ("x.yaml", "a: \x07", "x.yaml: cannot be parsed: a character that is not allowed"),
    ("x.yaml", "- seed", "x.yaml: is not a table of options"),
    ("x.yaml", "a: 1\n---\nb: 1", "x.yaml: cannot be parsed: "),
    ("x.yaml", "seed: !!int x", "x.yaml:seed: 'x' is not a valid integer"),
    (
        "x.yaml",
        "seed: !!python/object/apply:os.system [touch hacked]",
        "x.yaml:seed: expected one value; write it in quotes, as on the command line",
    ),
    ("x.toml", "toy = true\nheight = 64", "x.toml:height: is given without --width"),
    ("x.yaml", "a: " + "[" * 600 + "]" * 600, "x.yaml: cannot be parsed: "),
    ("x.json", "[1]", "x.json: is not a table of options"),
    ("x.json", "{", "x.json: cannot be parsed: Expecting property name"),
    ("x.ini", "seed = 1", "--config: x.ini is not one of .toml, .yaml, .yml, .json"),
    ("x.toml", "\udcff", "x.toml: cannot be parsed: 'utf-8' codec"),
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def runs(
    fake_plugin: Install, family_source: Source, monkeypatch: pytest.MonkeyPatch
) -> list[TrainConfig]:
    """The configurations that the runner is given; the family `faky` is installed."""
    modules = {"faky_record": family_source("faky", options=OPTIONS)}
    fake_plugin("plugin-faky", {"faky": "faky_record:MODEL"}, modules)
    asked: list[TrainConfig] = []
    runner = types.ModuleType("dstrain.runs.runner")
    runner.__dict__["start"] = asked.append
    monkeypatch.setitem(sys.modules, "dstrain.runs.runner", runner)
    return asked


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.toml", TOML), ("a.yaml", YAML), ("a.yml", YAML), ("a.json", JSON)],
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
def test_a_null_of_yaml_counts_as_absent(
    here: Path, runs: list[TrainConfig], null: str
) -> None:
    absent = f"preset_lora_path: {null}\nnum_epochs: {null}\n"
    (here / "a.yaml").write_text(YAML.replace("num_epochs: null\n", absent))
    assert main(["--config", "a.yaml"]) == 0
    assert runs == [WANTED]


@pytest.mark.parametrize("text", ["null", "~", "NULL"])
def test_a_quoted_null_is_text(here: Path, runs: list[TrainConfig], text: str) -> None:
    (here / "a.yaml").write_text(f"{YAML}preset_lora_path: '{text}'\n")
    assert main(["--config", "a.yaml"]) == 0
    assert runs[0].preset_lora_path == Path(text)


def test_a_path_may_begin_at_home(
    here: Path, runs: list[TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/you")
    text = """
        model = "faky"
        model_paths = '["~/a.safetensors", ["~/b.safetensors"]]'
        tokenizer_path = "~/tokenizer"
        output_path = "~/out"
        preset_lora_path = "./~/lora.safetensors"
        preview_prompt = ["~/a wave"]
        [[dataset]]
        dataset-base-path = "~/data"
    """
    (here / "a.toml").write_text(text)
    assert main(["--config", "a.toml"]) == 0
    (config,) = runs
    assert config.model_paths == (
        '["/home/you/a.safetensors", ["/home/you/b.safetensors"]]'
    )
    assert config.output_path == Path("/home/you/out")
    assert config.family_options == {"tokenizer_path": "/home/you/tokenizer"}
    assert config.preset_lora_path == Path("~/lora.safetensors")
    assert config.preview_prompt == ("~/a wave",)
    assert json.loads(config.dataset[0])["dataset-base-path"] == "/home/you/data"
    # A run records paths as they are.
    write_resolved(here / "b.json", replace(config, output_path=Path("~/out")), {})
    assert main(["--config", "b.json"]) == 0
    assert runs[1].output_path == Path("~/out")


def test_the_command_line_wins(here: Path, runs: list[TrainConfig]) -> None:
    (here / "a.toml").write_text(TOML + "lora_rank = 4\n")
    assert (
        main(
            [
                "--seed",
                "9",
                "--config",
                "a.toml",
                "--preview_prompt",
                "a fox",
                "--area",
                "32",
            ]
        )
        == 0
    )
    (config,) = runs
    assert (config.seed, config.preview_prompt, config.family_options) == (
        9,
        ("a fox",),
        {"area": "32"},
    )
    assert (config.lora_rank, config.learning_rate) == (4, 1e-5)


def test_the_command_lines_model_decides_which_flags_there_are(
    here: Path,
    runs: list[TrainConfig],
    fake_plugin: Install,
    family_source: Source,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_plugin(
        "plugin-othy",
        {"othy": "othy_record:MODEL"},
        {"othy_record": family_source("othy", options="()")},
    )
    (here / "a.toml").write_text(TOML)
    assert main(["--config", "a.toml", "--model", "othy"]) == 2
    assert "a.toml:area: no such option" in capsys.readouterr().err


def test_words_of_yaml_are_what_the_flag_takes_them_for(
    here: Path, runs: list[TrainConfig]
) -> None:
    (here / "a.yaml").write_text(
        YAML
        + "mixed_precision: no\nweight_decay: 1e-2\nuse_gradient_checkpointing: yes\noverwrite: off\n"
        "resume: auto\nlr_scheduler: 'constant'\nbare: on\nvariant: edit\ntask: ~\np: []\n"
    )
    assert main(["--config", "a.yaml"]) == 0
    (config,) = runs
    assert (
        config.mixed_precision,
        config.weight_decay,
        config.use_gradient_checkpointing,
    ) == ("no", 0.01, True)
    assert (config.overwrite, config.resume, config.lr_scheduler, config.task) == (
        False,
        "auto",
        "constant",
        "sft",
    )
    assert config.family_options == {"area": "64", "bare": "True"}


def test_plugins_can_be_disabled_by_a_file(
    here: Path, runs: list[TrainConfig], fake_plugin: Install, family_source: Source
) -> None:
    fake_plugin(
        "plugin-twin",
        {"faky": "twin_record:MODEL"},
        {"twin_record": family_source("faky")},
    )
    (here / "a.toml").write_text(TOML)
    assert main(["--config", "a.toml"]) == 2
    (here / "b.toml").write_text(TOML + 'p = ["no:plugin-twin"]\n')
    assert main(["--config", "b.toml"]) == 0
    assert runs[0].disabled_plugins == ("plugin-twin",)


@pytest.mark.parametrize(
    ("name", "text", "said"), BAD, ids=lambda value: ascii(value)[:40]
)
def test_what_does_not_fit_is_named_by_file_and_key(
    here: Path,
    runs: list[TrainConfig],
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str,
    said: str,
) -> None:
    (here / name).write_text(text, errors="surrogateescape")
    before = (here / name).read_bytes()
    assert (
        main(
            [
                "--config",
                name,
                *(() if text.startswith("model =") else ("--model", "faky")),
            ]
        )
        == 2
    )
    err = capsys.readouterr().err
    assert err.startswith(f"dstrain: error: {said}")
    assert len(err.splitlines()) <= 4 and "hf_abcdef" not in err
    assert not runs and [path.name for path in here.iterdir()] == [name]
    assert (here / name).read_bytes() == before


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gone.toml", "--config: gone.toml cannot be read: "),
        ("folder.toml", "folder.toml: is not a regular file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    here: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "folder.toml").mkdir()
    assert main(["--config", name]) == 2
    assert capsys.readouterr().err.startswith(f"dstrain: error: {said}")


def test_a_file_without_a_model_needs_one(
    here: Path, runs: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("", "seed = 1"):
        (here / "a.toml").write_text(text)
        assert main(["--config", "a.toml"]) == 2
        assert capsys.readouterr().err == (
            "dstrain: error: --model: is required: model family, unless --model_id tells it "
            "(`dstrain models` lists the installed ones)\n"
        )
    (here / "a.yaml").write_text("")
    assert (
        main(
            [
                "--config",
                "a.yaml",
                "--model",
                "faky",
                "--toy",
                "--dataset_base_path",
                "d",
                "--output_path",
                "o",
            ]
        )
        == 0
    )


def test_reading_a_file_imports_no_torch(here: Path) -> None:
    (here / "a.yaml").write_text("seed: x\n")
    words = ["--config", "a.yaml", "--model", "no"]
    code = f"import sys; from dstrain.cli.main import main; print(main({words}), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "2 False\n"


def test_generate_and_graph_read_a_file_too(
    here: Path, runs: list[TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[GenerateConfig] = []
    module = types.ModuleType("dstrain.generation.run")
    module.__dict__["start"] = asked.append
    monkeypatch.setitem(sys.modules, "dstrain.generation.run", module)
    (here / "a.yaml").write_text(
        "model: faky\ntoy: true\nprompt: no\noutput: x.png\nlora: ['a.s:0.5', b.s]\ninput: [edit-image=a.png]\n"
    )
    assert main(["generate", "--config", "a.yaml", "--num_inference_steps", "2"]) == 0
    loras = (LoraFile(Path("a.s"), 0.5), LoraFile(Path("b.s")))
    assert asked == [
        GenerateConfig(model="faky", toy=True, prompt="no", output=Path("x.png"), lora=loras,
                       input=(NamedInput("edit_image", "a.png"),), num_inference_steps=2)
    ]  # fmt: skip


TEXTS = st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)
PATHS = st.text("abc /.:-é猫 ", min_size=1, max_size=8).map(Path)
NAMES = st.from_regex(r"[a-z][a-z_]{0,6}[a-z]", fullmatch=True)


def values(flag: Flag) -> st.SearchStrategy[Any]:
    """Every value a flag may have."""
    low = flag.minimum if flag.minimum is not None else flag.above
    if flag.kind is float:
        numbers = st.floats(
            low,
            flag.maximum,
            allow_nan=False,
            allow_infinity=False,
            exclude_min=flag.above is not None,
        )
    kinds: dict[Any, Callable[[], st.SearchStrategy[Any]]] = {
        bool: st.booleans,
        int: lambda: st.integers(
            None if low is None else int(low),
            None if flag.maximum is None else int(flag.maximum),
        ),
        float: lambda: numbers,
        Path: lambda: PATHS,
        str: lambda: st.sampled_from(flag.choices) if flag.choices else TEXTS,
        LoraFile: lambda: st.builds(
            LoraFile, PATHS, st.floats(allow_nan=False, allow_infinity=False)
        ),
        NamedInput: lambda: st.builds(NamedInput, NAMES, TEXTS),
    }
    one = kinds[flag.kind]()
    if flag.many:
        return st.lists(one, max_size=3).map(tuple)
    return (
        one
        if flag.required or flag.kind is bool
        else st.one_of(st.just(flag.default), one)
    )


@st.composite
def configurations(draw: st.DrawFn, kind: type[ModelChoice]) -> ModelChoice:
    given = {
        flag.name: draw(values(flag))
        for flag in flags(kind)
        if flag.name not in ("model", "variant")
    }
    given["variant"] = draw(st.sampled_from([None, "edit"]))
    family = {
        "tokenizer_path": draw(TEXTS),
        "area": draw(st.integers(1).map(str)),
        "bare": "True",
    }
    some = draw(st.sets(st.sampled_from(sorted(family)))) - (
        {"tokenizer_path"} if given["toy"] else set()
    )
    disabled_plugins = draw(st.sampled_from([(), ("plugin-left",)]))
    return kind(
        model="faky",
        family_options={name: family[name] for name in some},
        disabled_plugins=disabled_plugins,
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
        one_start = {
            flag.name: flag.default
            for flag in flags(kind)
            if flag.name in options_affecting("start")
        }
        disabled_plugins = config.disabled_plugins or ("plugin-left",)
        assert found.pop() == kind(
            **{**vars(config), **one_start, "disabled_plugins": disabled_plugins}
        )

    holds()


def test_a_path_that_is_no_text_is_written_and_read_back(
    here: Path, runs: list[TrainConfig], fake_plugin: Install
) -> None:
    config = TrainConfig(
        model="faky", toy=True, dataset_base_path=Path("d\udcff"), output_path=Path("o")
    )
    write_resolved(here / "a.json", config, {})
    assert main(["--config", "a.json"]) == 0
    assert runs == [config]


def test_every_flag_is_in_a_written_configuration() -> None:
    assert set(as_flags(WANTED)) == {flag.name for flag in flags(TrainConfig)} | {
        "area",
        "p",
    }


def test_the_option_is_in_the_help_of_what_reads_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command, has in (
        ("train", True),
        ("graph", True),
        ("generate", True),
        ("models", False),
    ):
        assert main([command, "--help"]) == 0
        assert ("--config FILE" in capsys.readouterr().out) is has
