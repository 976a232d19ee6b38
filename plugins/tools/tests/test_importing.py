"""`dstrain import`: each example of each tool becomes a file that `--config` takes, and every
key of it is accounted for.
"""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from dstrain import TrainConfig
from dstrain.cli.main import main
from dstrain.config import flags_by_name
from dstrain.plugin import Column
from dstrain.registry import load_family
from dstrain_tools.hooks import dstrain_commands
from dstrain_tools.importing.context import Model
from dstrain_tools.importing.conversions.datasets.frames import VIDEO_FAMILIES
from dstrain_tools.importing.conversions.datasets.pairs import CONTROLS

Import = Callable[..., Any]
CASES = {
    "musubi_qwen_image.sh": "qwen_image base",
    "musubi_wan.toml": "wan t2v",
    "musubi_kontext.sh": "flux kontext",
    "ai_toolkit_flux.yaml": "flux dev",
    "ai_toolkit_qwen_edit.yaml": "qwen_image edit",
    "ai_toolkit_wan22.yaml": "wan t2v-a14b",
    "kohya_flux.sh": "flux dev",
    "kohya_flux.toml": "flux dev",
    "kohya_flux_full.sh": "flux dev",
    "kohya_sdxl.sh": "sdxl base",
    "kohya_sdxl.toml": "sdxl base",
    "musubi_z_image.sh": "z_image turbo",
    "musubi_flux2.sh": "flux2 klein-base",
    "ai_toolkit_sdxl.yaml": "sdxl base",
    "ai_toolkit_z_image.yaml": "z_image turbo",
    "ai_toolkit_flux2.yaml": "flux2 klein-base",
    "diffsynth_qwen_image.sh": "qwen_image base",
    "diffsynth_flux.sh": "flux dev",
    "diffsynth_wan.sh": "wan t2v-a14b",
}
"""Example -> the family and the variant that it trains."""
OPTIONS = json.loads(Path(__file__).with_name("imported.json").read_text())
"""Example -> what is written; paths are relative to the project."""
FIRST = {"diffsynth_wan.sh": ("--command", "1")}
"""Of two commands in a script the first."""
TRAINED = (
    "musubi_qwen_image.sh",
    "ai_toolkit_flux.yaml",
    "kohya_flux.sh",
    "kohya_sdxl.sh",
    "ai_toolkit_sdxl.yaml",
    "musubi_z_image.sh",
    "ai_toolkit_flux2.yaml",
    "diffsynth_qwen_image.sh",
)
NOT_OF_TOYS = re.compile(
    r"(report_to|wandb_project|optimizer_args|preview_\w+|quant_options"
    r"|lr_warmup_steps|batch_size|bucket_\w+|model_id_with_origin_paths"
    r"|dataset_num_workers)$"
)
"""Options that one step of a toy on this machine cannot have."""
GROUPS = re.compile(
    r"(config|process|network|save|datasets|train|model|sample|logging|meta"
    r"|optimizer_params|ema_config|model_kwargs)$"
)
"""Keys of ai-toolkit that have no value of their own."""
SECRETS = ("0123456789abcdef", "hf_abcdef")
PUBLISHED = json.loads(Path(__file__).with_name("published_keys.json").read_text())
"""Tool -> run or dataset -> the keys that its scripts read, several in a line."""


def keys_of(text: str, suffix: str) -> "Counter[str]":
    """Count the keys that have a value in a file, read line by line."""
    lines = [line for line in text.splitlines() if not line.strip().startswith("#")]
    if suffix == ".sh":
        # The first command of DiffSynth-Studio's two, and all of the others'.
        first = "\n".join(lines).split("\n\naccelerate launch examples/wanvideo")[0]
        return Counter(set(re.findall(r"(?<=\s)--(\w+)", first)))
    if suffix == ".toml":
        return Counter(re.findall(r"^\s*(\w+) = ", "\n".join(lines), re.MULTILINE))
    found = re.findall(r"^\s*(?:- )?(\w+):[ ]*(\S?)", "\n".join(lines), re.MULTILINE)
    return Counter(name for name, value in found if value or not GROUPS.match(name))


@pytest.mark.parametrize("example", CASES)
def test_every_key_of_an_example_is_accounted_for(
    example: str, project: Path, imported: Import
) -> None:
    found = imported(example, *FIRST.get(example, ()))
    keys = [key for kind, key in found.kinds if not kind.startswith("defaults")]
    said = Counter(re.split(r"[.\s]|--", key)[-1] for key in keys)
    text = Path(example).read_text()
    wanted = keys_of(text, Path(example).suffix)
    if named := re.search(r"(\w+_dataset\.toml)", text):
        wanted += keys_of(Path(named[1]).read_text(), ".toml")
    assert not wanted - said
    assert not any("dstrain train --help" in one for one in found.reasons.values())


@pytest.mark.parametrize("example", CASES)
def test_the_written_file_lacks_the_models_files_alone(
    example: str, project: Path, imported: Import, capsys: pytest.CaptureFixture[str]
) -> None:
    options = imported(example, *FIRST.get(example, ())).options
    assert (
        json.loads(json.dumps(options).replace(f"{project}/", "")) == OPTIONS[example]
    )
    assert main(["graph", "--config", "run.toml"]) == 0
    assert capsys.readouterr().out.startswith(f"{CASES[example]}, task sft")
    assert main(["--config", "run.toml"]) == 3


@pytest.mark.parametrize("example", ("musubi_qwen_image.sh", "musubi_wan.toml"))
def test_secrets_are_neither_printed_nor_written(
    example: str, project: Path, imported: Import, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(example).read_text()
    assert any(secret in text for secret in SECRETS)
    note = "hf_abcdefghijklmnopqrstuvwxyz"
    comment = f"--training_comment {note} --output_name x-{note}"
    Path(example).write_text(text.replace("--save_state", comment))
    found = imported(example)
    assert main(["import", example]) == 0
    said = capsys.readouterr()
    shown = found.said + found.toml + said.out + said.err
    assert not any(secret in shown for secret in SECRETS)
    assert any("secret" in reason for reason in found.reasons.values())


@pytest.mark.parametrize("example", TRAINED)
def test_an_imported_run_trains_to_the_end(
    example: str, project: Path, imported: Import
) -> None:
    imported(example)
    lines = []
    family = CASES[example].partition(" ")[0]
    for line in Path("run.toml").read_text().splitlines():
        # A toy has no files; its blocks are fewer, and so are the pixels it is trained on.
        name = line.partition(" = ")[0]
        if name == "model_id":
            line = f'model = "{family}"'
        if NOT_OF_TOYS.match(name):
            continue
        line = re.sub(r'^resolution = "[\d,]+"', 'resolution = "64"', line)
        line = re.sub(r"^max_pixels = \d+", "max_pixels = 4096", line)
        line = re.sub(r"^blocks_to_swap = \d+", "blocks_to_swap = 1", line)
        line = re.sub(r'^optimizer = "\w+"', 'optimizer = "adamw"', line)
        lines.append(line)
    Path("toy.toml").write_text("\n".join(lines))
    words = "--config toy.toml --toy --max_steps 1 --output_path run --overwrite"
    assert main(words.split()) == 0
    assert list(Path("run").glob("*.safetensors"))


@pytest.mark.parametrize("tool", PUBLISHED)
def test_every_published_key_of_a_tool_is_known_and_means_an_option_that_exists(
    tool: str, project: Path, imported: Import
) -> None:
    run, dataset = (
        " ".join(PUBLISHED[tool][part]).split() for part in ("run", "dataset")
    )
    if tool == "ai-toolkit":
        source = yaml.safe_load(Path("ai_toolkit_flux.yaml").read_text())
        (process,) = source["config"]["process"]
        for key in run:
            place = process
            *outer, last = key.split(".")
            for name in outer:
                place = place.setdefault(name, {})
            place.setdefault(last, 1)
        process["datasets"] = [{"folder_path": "photos", **dict.fromkeys(dataset, 1)}]
        name = "all.yaml"
        Path(name).write_text(yaml.safe_dump(source))
    else:
        name = "all.sh"
        # Files of their own, and what names the model.
        apart = re.compile(r"config_file|\w+_config|task")
        keys = [key for key in run if not apart.fullmatch(key)]
        start = {
            "musubi": "wan_train_network.py --task t2v-1.3B",
            "kohya": "flux_train_network.py",
        }
        flags = " ".join(f"--{key} 1" for key in [*keys, *dataset])
        Path(name).write_text(f"python {start[tool]} {flags}")
    found = imported(name)
    unknown = ("dstrain train --help", "no such option")
    for key, reason in found.reasons.items():
        assert not any(words in reason for words in unknown), key
    options = {*flags_by_name(TrainConfig), "dataset", "repeats", "loss_weight"}
    assert {*found.options, *found.options.get("dataset", [{}])[0]} <= options


def test_advice_names_options_that_exist() -> None:
    known = {*flags_by_name(TrainConfig), "repeats", "loss_weight", "config"}
    known |= {"edit_pixels", "kontext_pixels", "lora_checkpoint"}
    for place in (files("dstrain_tools.importing") / "tables").iterdir():
        table = json.loads(place.read_text())
        for part in ("run", "dataset"):
            text = " ".join([*table[part]["needless"], *table[part]["missing"]])
            assert set(re.findall(r"--(\w+)", text)) <= known, place.name


@pytest.mark.parametrize("family", ("flux", "flux2", "qwen_image", "wan"))
def test_what_is_known_of_a_family_is_what_its_specs_say(family: str) -> None:
    record = load_family(family)
    specs = [record.spec(variant) for variant in record.variants]
    assert {one.reads_videos for one in specs} == {family in VIDEO_FAMILIES}
    columns = [one for spec in specs for one in spec.inputs.values()]
    named = [one.name for one in columns if isinstance(one, Column)]
    assert CONTROLS[family] in named
    for model_id in record.model_files:
        variants = record.variants_of(model_id)
        if variants:
            has_experts = record.spec(variants[0]).experts is not None
            assert Model(record, model_id, "").has_experts == has_experts


def test_nothing_is_overwritten_without_being_told(
    project: Path, imported: Import, capsys: pytest.CaptureFixture[str]
) -> None:
    example = "ai_toolkit_qwen_edit.yaml"
    Path("run-dataset-1.jsonl").write_text("mine")
    assert main(["import", example, "--output", "run.toml"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert Path("run-dataset-1.jsonl").read_text() == "mine"
    assert not Path("run.toml").exists()
    assert imported(example).options["lora_type"] == "lokr"


REFUSED = sorted(Path(__file__).with_name("refused").iterdir())
"""Files that cannot be imported; the first line of each is what the error names."""


@pytest.mark.parametrize("file", REFUSED, ids=lambda file: file.name)
def test_what_cannot_be_imported_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = file.read_text().partition("\n")[0].removeprefix("# ")
    assert main(["import", str(file)]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert "bug in dstrain" not in said


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("a.sh --dataset d.toml", "python model_training/train.py --lora_rank 4"),
        ("a.toml --dataset d.toml", "[general]\nimage_dir = 'photos'"),
        ("a.toml --command 1", "ae = 'ae.safetensors'"),
        ("a.sh --command 0", "python flux_train.py"),
        ("a.sh --overwrite", "python flux_train.py"),
        ("a.sh --output a.yaml", "python flux_train.py"),
    ],
)
def test_an_option_is_refused_where_it_has_no_effect(
    words: str, text: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, option, *_ = words.split()
    Path(name).write_text(text)
    assert main(["import", *words.split()]) == 2
    assert f" {option}: " in capsys.readouterr().err


def test_values_that_training_refuses_are_left_out_with_the_reason(
    project: Path, imported: Import
) -> None:
    text = Path("musubi_kontext.sh").read_text()
    for old, new in (
        ("--network_dim 8", "--network_dim -3"),
        ("--network_alpha 4", "--network_alpha -1"),
        ("--max_train_steps 1000", "--max_train_steps -5"),
        ("--save_every_n_steps 250", "--save_every_n_steps -2"),
    ):
        assert old in text
        text = text.replace(old, new)
    Path("bad.sh").write_text(text)
    found = imported("bad.sh")
    left = {"lora_rank", "lora_alpha", "max_steps", "save_steps"}
    assert not left & found.options.keys()
    keys = ("--network_dim", "--network_alpha", "--max_train_steps")
    for key in (*keys, "--save_every_n_steps"):
        assert found.kind(key) == "not carried over"


def test_what_is_written_is_toml_whatever_the_values_are(
    project: Path, imported: Import, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path("musubi_kontext.sh").read_text()
    text = text.replace("--network_dim 8", "--network_dim 08 --lr_scheduler 'a\x07b'")
    text = text.replace("--output_name edits", "--output_name 'a\x7fb'")
    Path("odd.sh").write_text(text)
    options = imported("odd.sh").options
    assert (options["lora_rank"], options["output_path"]) == ("08", "output/a\x7fb")
    assert "lr_scheduler" not in options
    text = Path("kohya_flux.toml").read_text()
    text = text.replace('lr_scheduler = "constant"', 'lr_scheduler = "a\\nb"')
    Path("odd.toml").write_text(text)
    assert main(["import", "odd.toml", "--output", "my run.toml"]) == 0
    assert "lr_scheduler" not in tomllib.loads(Path("my run.toml").read_text())
    assert "dstrain --config 'my run.toml' --dry_run" in capsys.readouterr().out


def test_the_family_of_another_plugin_has_what_its_record_says(
    project: Path,
    imported: Import,
    fake_plugin: Callable[..., Path],
    family_source: Callable[..., str],
) -> None:
    source = family_source("zeta")
    fake_plugin("plugin-zeta", {"zeta": "zeta_record:MODEL"}, {"zeta_record": source})
    found = imported("musubi_kontext.sh", "--model", "zeta")
    assert "zeta" in found.reason("control_directory")
    assert "zeta" in found.reason("--fp8_t5")
    # A table without pairs needs no column for them.
    Path("rows.jsonl").write_text('{"image_path": "photos/0.png", "caption": "a"}')
    table = '[[datasets]]\nimage_jsonl_file = "rows.jsonl"\n'
    Path("musubi_kontext_dataset.toml").write_text(table)
    imported("musubi_kontext.sh", "--model", "zeta")
    rows = Path("run-dataset-1.jsonl").read_text()
    assert json.loads(rows)["prompt"] == "a"


def test_the_metadata_names_the_commands_that_its_hooks_add() -> None:
    """Help lists them by it."""
    points = entry_points(group="dstrain.commands").select(value="dstrain_tools.hooks")
    added = {command.name for command in dstrain_commands()}
    assert {point.name for point in points} == added
