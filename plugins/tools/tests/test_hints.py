"""Flags of other trainers are refused with what to use instead."""

import re
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from dstrain import GenerateConfig, TrainConfig
from dstrain.cli.main import main
from dstrain.config import flags
from dstrain.plugin import Column, InferenceOnly
from dstrain.registry import load_family
from dstrain_tools.hints import INPUTS, advice, hints

from tests.support import ROOT
from tests.support.command_lines import BASE
from tests.support.runs import project_by_id

GUIDE = ROOT / "docs/guide"
FLAGS = {flag.name: flag for flag in flags(TrainConfig)}
FAMILIES = ("flux", "flux2", "qwen_image", "sdxl", "wan", "z_image")
KNOWN = {*FLAGS, "config"}
Printed = pytest.CaptureFixture[str]


def named_in(text: str) -> list[str]:
    return re.findall(r"--(\w+)", text)


def answer(capsys: Printed, flag: str, *command: str) -> tuple[list[str], str]:
    """Return the flag that is offered in place of a misspelt one, and the advice."""
    assert main([*(command or BASE), flag, "3"]) == 2
    error, *lines = capsys.readouterr().err.splitlines()
    refused, *offered = named_in(error)
    assert refused == flag.lstrip("-").replace("-", "_")
    return offered, "".join(lines)


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--network_dim", ["lora_rank"]),
        ("--network-dim", ["lora_rank"]),
        ("--rank", ["lora_rank"]),
        ("--enable_optimizer_cpu_offload", ["optimizer"]),
        ("--dmd2_guidance_lora_rank", ["task"]),
        ("--num_inference_steps", []),
        ("--resume_from", ["resume"]),
        ("--dataset_config", ["config"]),
    ],
)
@pytest.mark.usefixtures("runs")
def test_a_flag_of_another_trainer_gets_advice(
    flag: str, named: list[str], capsys: Printed
) -> None:
    offered, advised = answer(capsys, flag)
    assert not offered
    assert named_in(advised) == named


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("lora_rnak", ["lora_rank"]),
        ("blockswap", ["blocks_to_swap"]),
        ("preview_prompts", ["preview_prompt"]),
        ("output", ["output_path"]),  # `generate` has --output
        ("guidance", []),
        ("guidance_scales", []),
    ],
)
@pytest.mark.usefixtures("runs")
def test_an_option_that_is_only_half_alike_is_not_offered(
    name: str, meant: list[str], capsys: Printed
) -> None:
    assert answer(capsys, f"--{name}")[0] == meant


@pytest.mark.usefixtures("runs")
def test_advice_names_only_options_of_the_command(capsys: Printed) -> None:
    generate = ("generate", "--model", "faky", "--toy", "--prompt", "a")
    assert answer(capsys, "--network_dim", *generate) == ([], "")


def test_an_input_of_a_model_is_told_from_an_option(capsys: Printed) -> None:
    generate = ("generate", "--model", "flux2", "--toy", "--prompt", "a")
    _, advised = answer(capsys, "--edit-image", *generate)
    assert "use --input edit_image=VALUE" in advised
    given = {
        name
        for family in map(load_family, FAMILIES)
        for variant in family.variants
        for name, source in family.spec(variant).inputs.items()
        if isinstance(source, Column | InferenceOnly)
    }
    assert {*INPUTS.split()} == given - {"prompt", "negative_prompt"}


def test_no_advice_is_for_what_exists_or_names_what_does_not() -> None:
    known = KNOWN | {flag.name for flag in flags(GenerateConfig)} | {"debug"}
    others = [name for names in advice().values() for name in names]
    assert len(others) == len(set(others)) > 300
    assert known & set(others) == {"guidance_scale"}  # of `generate` alone
    commands = re.findall(r"(`?)dstrain (\w[\w ]*)", "\n".join(hints().values()))
    assert {quote for quote, _ in commands} == {"`"}
    assert not any(main([*words.split(), "--help"]) for _, words in commands)


def test_a_variable_without_effect_is_said(
    runs: list[TrainConfig], monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    name = "DIFFSYNTH_ATTENTION_IMPLEMENTATION"
    for value, is_said in (("", False), ("sage_attention", True)):
        monkeypatch.setenv(name, value)
        assert main(BASE) == 0
        assert (name in capsys.readouterr().err) == is_said


FLAGS_OF_DIFFSYNTH = [
    "align_to_opensource_format", "audio_processor_path", "cpu_offload_split_threshold", "customized_optimizer",
    "data_file_keys", "dataset_base_path", "dataset_metadata_path", "dataset_num_workers", "dataset_repeat",
    "dmd2_teacher_cfg_scale", "enable_csv_log", "enable_lora_hot_loading", "enable_model_cpu_offload",
    "enable_optimizer_cpu_offload", "enable_swanlab_log", "enable_tensorboard_log", "enable_wandb_log",
    "extra_inputs", "find_unused_parameters", "fp8_models", "framewise_decoding", "gradient_accumulation_steps",
    "height", "initialize_model_on_cpu", "learning_rate", "lora_base_model", "lora_checkpoint", "lora_rank",
    "lora_target_modules", "max_pixels", "max_timestep_boundary", "min_timestep_boundary",
    "model_id_with_origin_paths", "model_paths", "num_epochs", "num_frames", "offload_models", "output_path",
    "preset_lora_model", "preset_lora_path", "processor_path", "quant_options", "remove_prefix_in_ckpt",
    "resume_from_checkpoint", "save_steps", "swanlab_project", "task", "template_model_id_or_path",
    "tokenizer_1_path", "tokenizer_2_path", "tokenizer_path", "trainable_models", "use_gradient_checkpointing",
    "use_gradient_checkpointing_offload", "wandb_project", "weight_decay", "width", "zero_cond_t",
]  # fmt: skip
"""Those of its training scripts for the three families; one stands for all of `dmd2_`."""


@pytest.mark.parametrize("name", FLAGS_OF_DIFFSYNTH)
@pytest.mark.usefixtures("runs")
def test_every_flag_of_diffsynth_studio_acts_here_or_has_advice(
    name: str, capsys: Printed
) -> None:
    families = [load_family(one) for one in ("qwen_image", "flux", "wan")]
    options = {option.name for family in families for option in family.options}
    is_refused = name not in KNOWN | options
    if is_refused:
        offered, advised = answer(capsys, f"--{name}")
        assert not offered
        assert advised
    shown = name if not name.startswith("dmd2_") else "dmd2_*"
    guide = (GUIDE / "from-diffsynth-studio.md").read_text()
    rows = [line for line in guide.splitlines() if f"`--{shown}`" in line]
    assert is_refused == ("refused" in rows[0])


OTHERWISE = frozenset(
    {
        *("caption_ext", "caption_extension", "network_module", "save_every_n_epochs"),
        *("center_crop", "offload"),
    }
)
"""Names in that page that are answered with what else they may mean."""


@pytest.mark.usefixtures("runs")
def test_the_names_of_other_trainers_are_answered_as_their_page_says(
    capsys: Printed,
) -> None:
    answered = 0
    patterns = [name for names in advice().values() for name in names]
    for row in (GUIDE / "other-trainers.md").read_text().splitlines():
        cells = row.split("|")
        here = named_in(cells[2]) if len(cells) == 4 else []
        for there in re.findall(r"`(\w+)`", cells[1]) if here else []:
            is_advised = any(fnmatchcase(there, one) for one in patterns)
            if is_advised and there not in KNOWN | OTHERWISE:
                assert set(named_in(answer(capsys, f"--{there}")[1])) & set(here), there
                answered += 1
    assert answered > 80


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sd3", "no family here trains it"),
        ("STABLE_DIFFUSION_XL_10_BASE", "use --model sdxl"),
        ("ponyDiffusionV6XL", "--model_paths FILE"),
        ("zimage:turbo", "use --model z_image"),
        ("z-image", "use --model z_image"),
        ("FLUX_2", "use --model flux2"),
        ("flux2_klein_4b", "use --model flux2"),
        ("fluxx", ""),
    ],
)
@pytest.mark.usefixtures("runs")
def test_a_model_by_another_trainers_name_is_said_to_be_a_familys_or_nones(
    name: str, said: str, capsys: Printed
) -> None:
    assert main(["--model", name, "--dataset_base_path", "x"]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert bool(said) == bool("use --model" in shown or "no family here" in shown)


@pytest.mark.usefixtures("runs")
def test_a_plugin_that_is_left_out_gives_no_advice(capsys: Printed) -> None:
    assert answer(capsys, "--network_dim", *BASE, "-p", "no:tools") == ([], "")


TYPED = tomllib.loads(Path(__file__).with_name("typed.toml").read_text("utf-8"))
KINDS = {bool: True, int: "16", float: "0.1"}
OPTION = re.compile(r"--(?!config_file)(\w+)(?: ('.+?'|[^\s(]\S*))?")


def example(name: str, value: str) -> str | bool:
    """Return what a user types for an option where advice has this value."""
    if value in TYPED["prose"] or re.fullmatch("[A-Z]+", value):
        if name in TYPED["values"]:
            return str(TYPED["values"][name])
        return KINDS.get(FLAGS[name].kind, ("text_encoder", *FLAGS[name].choices)[-1])
    for part, one in TYPED["parts"].items():
        value = value.replace(part, one)
    return value


@pytest.mark.promise("R17", "every advice works when typed")
@pytest.mark.parametrize("line", [line for line in advice() if "--" in line])
@pytest.mark.usefixtures("tiny")
def test_each_way_that_advice_names_works_when_typed(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Printed
) -> None:
    project_by_id(tmp_path, monkeypatch)
    Path("data/metadata.json").rename("table.json")
    Path("table.toml").write_text("[[dataset]]\ndataset_base_path = 'data'\n")
    for part in filter(OPTION.search, re.split(r"; |,? or ", line)):
        options = OPTION.findall(part)
        way = {name: example(name, value.strip("',:")) for name, value in options}
        given = dict(TYPED["run"])
        for pattern, beside in TYPED["beside"].items():
            if any(re.search(pattern, f"{name} {way[name]}") for name in way):
                given |= beside
        words = [f"--{name}={value}" for name, value in (given | way).items() if value]
        words = [word.removesuffix("=True") for word in words]
        assert main([*words, "-p", "no:planner"]) == 0, capfd.readouterr().err
