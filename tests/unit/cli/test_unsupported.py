"""Flags of other trainers are refused with what to use instead."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from dstrain.cli.main import main
from dstrain.cli.unsupported import advice, no_such, unused_variables
from dstrain.config.fields import flags
from dstrain.config.options.generate import GenerateConfig
from dstrain.config.options.train import TrainConfig
from dstrain.registry.discovery import load_family

from tests.support.command_lines import BASE

Install = Callable[..., Path]
Source = Callable[..., str]


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--network_dim", "use --lora_rank"),
        ("--max_train_steps", "use --max_steps"),
        (
            "--enable_optimizer_cpu_offload",
            "use --optimizer paged_adamw8bit: its state is a quarter, and moves to RAM where the GPU is full",
        ),
        (
            "--dmd2_guidance_lora_rank",
            "this distillation is not supported; use --task direct_distill",
        ),
        ("--resume_from", "use --resume PATH, which resumes where a run stopped"),
        (
            "--dataset_config",
            "use --config FILE: a table [[dataset]] for each (docs/guide/captions-and-buckets.md#several-datasets)",
        ),
    ],
)
@pytest.mark.usefixtures("runs")
def test_a_flag_of_another_trainer_gets_advice(
    flag: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BASE, flag, "3"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"dstrain: error: {flag}: no such option",
        f"  {line}",
    ]


def test_no_advice_is_for_a_flag_that_exists_or_names_one_that_does_not() -> None:
    known = {
        flag.name for config in (TrainConfig, GenerateConfig) for flag in flags(config)
    } | {"config", "debug"}
    others = [name for names in advice().values() for name in names]
    assert len(others) == len(set(others)) and not known & set(others)
    text = " ".join(advice())
    assert set(re.findall(r"--(\w+)", text)) <= known | {"config_file"}


def test_advice_is_for_the_flag_itself_however_it_is_written() -> None:
    for written in ("rank", "network_dim", "--network-dim"):
        advice = ("no such option", "use --lora_rank")
        assert no_such(written, ["--lora_rank"]) == advice
        # `dstrain generate` has no such option.
        assert no_such(written, ["--lora"]) == ("no such option",)
    assert no_such("ran", []) == ("no such option",)
    assert no_such("--lora_rnak", ["--lora_rank"]) == (
        "no such option; did you mean '--lora_rank'?",
    )


def test_a_variable_without_effect_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unused_variables() == []
    monkeypatch.setenv("DIFFSYNTH_ATTENTION_IMPLEMENTATION", "sage_attention")
    (line,) = unused_variables()
    assert line.startswith("variable DIFFSYNTH_ATTENTION_IMPLEMENTATION has no effect")


GUIDE = Path("docs/guide/from-diffsynth-studio.md")
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
def test_every_flag_of_diffsynth_studio_acts_here_or_has_advice(name: str) -> None:
    families = [load_family(one) for one in ("qwen_image", "flux", "wan")]
    known = {flag.name for flag in flags(TrainConfig)}
    known |= {option.name for family in families for option in family.options}
    refused = name not in known
    if refused:
        said = no_such(f"--{name}", [f"--{one}" for one in known])
        assert len(said) == 2 and "did you mean" not in said[0], said
    if GUIDE.exists():
        shown = name if not name.startswith("dmd2_") else "dmd2_*"
        rows = [
            line for line in GUIDE.read_text().splitlines() if f"`--{shown}`" in line
        ]
        assert rows
        assert refused == ("refused" in rows[0])
