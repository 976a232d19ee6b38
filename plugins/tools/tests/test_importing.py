"""`dstrain import`: each example of each tool becomes a file that `--config` takes, and every
key of it is accounted for.
"""

import json
import re
import shutil
import tomllib
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
import yaml
from dstrain import TrainConfig, UsageError
from dstrain.cli.main import main
from dstrain.config import dataset_flags, flags_by_name
from dstrain.plugin import Column, ModelFamily
from dstrain.registry import load_family
from dstrain_tools.importing.command import drop_what_is_refused
from dstrain_tools.importing.context import Model
from dstrain_tools.importing.conversions.datasets.frames import VIDEO_FAMILIES
from dstrain_tools.importing.conversions.datasets.pairs import CONTROLS
from dstrain_tools.importing.entries import Outcome, Result, Source
from dstrain_tools.importing.models import model_of
from dstrain_tools.importing.output import as_toml, report
from dstrain_tools.importing.reading.source import read_source
from dstrain_tools.importing.tables import TOOLS, table_of
from dstrain_tools.importing.translation import (
    Setting,
    Translation,
    conversions,
    translate,
)

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
    "diffsynth_qwen_image.sh": "qwen_image base",
    "diffsynth_flux.sh": "flux dev",
    "diffsynth_wan.sh": "wan t2v-a14b",
}
"""Example -> the family and the variant that it trains."""
TRAINED = (
    "musubi_qwen_image.sh",
    "ai_toolkit_flux.yaml",
    "kohya_flux.sh",
    "diffsynth_qwen_image.sh",
)
EVERYDAY = (
    "musubi_wan.toml",
    "ai_toolkit_flux.yaml",
    "kohya_flux.toml",
    "diffsynth_flux.sh",
)
"""One of each tool for the ordinary suite: a dry run builds the networks of a model."""
NOT_OF_TOYS = frozenset(
    {
        *("report_to", "wandb_project", "optimizer_args", "preview_prompt"),
        *("preview_steps", "lr_warmup_steps", "quant_options", "batch_size"),
        *("bucket_step", "bucket_min_side", "bucket_max_side"),
        *("model_id_with_origin_paths", "dataset_num_workers"),
    }
)
"""Options that one step of a toy on this machine cannot have."""
SECRETS = ("0123456789abcdef", "hf_abcdef")
SMALL = ("--toy", "--max_steps", "1", "--output_path", "run", "--overwrite")


def words(example: str) -> list[str]:
    """The command that imports an example; of two commands in a script the first."""
    number = ["--command", "1"] if example == "diffsynth_wan.sh" else []
    return ["import", example, *number]


def translated(example: str, output: Path | None = Path("run.toml")) -> Translation:
    """What an example is here."""
    number = 1 if example == "diffsynth_wan.sh" else None
    source = read_source(Path(example), None, None, number)
    table = table_of(source.tool)
    return translate(source, table, model_of(source, table, None), output)


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
    groups = {"config", "process", "network", "save", "datasets", "train", "model"}
    groups |= {
        "sample",
        "logging",
        "meta",
        "optimizer_params",
        "ema_config",
        "model_kwargs",
    }
    return Counter(name for name, value in found if value or name not in groups)


@pytest.mark.parametrize("example", CASES)
def test_every_key_of_an_example_is_accounted_for(example: str, project: Path) -> None:
    found = translated(example)
    said = Counter(re.split(r"[.\s]|--", one.entry.place)[-1] for one in found.outcomes)
    files = [Path(example)]
    named = re.search(r"(\w+_dataset\.toml)", Path(example).read_text())
    files += [Path(named[1])] if named else []
    wanted: Counter[str] = Counter()
    for file in files:
        wanted += keys_of(file.read_text(), file.suffix)
    missing = wanted - said
    assert not missing
    for one in found.outcomes:
        result = one.result
        assert result.options or result.note or result.lost, one.entry.place
        assert "not known to the importer" not in result.lost, one.entry.place


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(one, marks=() if one in EVERYDAY else pytest.mark.drawn)
        for one in CASES
    ],
)
def test_the_written_file_is_taken_by_a_dry_run(
    example: str,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("is not counted")

    # Counting memory takes most of a dry run's time.
    monkeypatch.setattr("dstrain.runs.memory.facts.count_activations", refuse)
    assert main([*words(example), "--output", "run.toml"]) == 0
    capsys.readouterr()
    assert main(["--config", "run.toml", "--dry_run"]) == 0
    assert capsys.readouterr().out.startswith(f"{CASES[example]}, task sft")


@pytest.mark.parametrize("example", ("musubi_qwen_image.sh", "musubi_wan.toml"))
def test_secrets_are_neither_printed_nor_written(
    example: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(example).read_text()
    assert any(secret in text for secret in SECRETS)
    note = "hf_abcdefghijklmnopqrstuvwxyz"
    if example.endswith(".sh"):
        text = text.replace(
            "--save_state", f"--training_comment {note} --output_name x-{note}"
        )
    Path(example).write_text(text)
    assert main([*words(example), "--output", "run.toml"]) == 0
    assert main(words(example)) == 0
    said = capsys.readouterr()
    shown = said.out + said.err + Path("run.toml").read_text()
    assert not any(secret in shown for secret in SECRETS)
    assert "is a secret" in shown


@pytest.mark.slow
@pytest.mark.parametrize("example", TRAINED)
def test_an_imported_run_trains_to_the_end(example: str, project: Path) -> None:
    assert main([*words(example), "--output", "run.toml"]) == 0
    lines = []
    family = CASES[example].partition(" ")[0]
    for line in Path("run.toml").read_text().splitlines():
        # A toy has no files; its blocks are fewer, and so are the pixels it is trained on.
        name = line.partition(" = ")[0]
        if name == "model_id":
            line = f'model = "{family}"'
        if name in NOT_OF_TOYS:
            continue
        line = re.sub(r'^resolution = "[\d,]+"', 'resolution = "64"', line)
        line = re.sub(r"^max_pixels = \d+", "max_pixels = 4096", line)
        line = re.sub(r"^blocks_to_swap = \d+", "blocks_to_swap = 1", line)
        line = re.sub(r'^optimizer = "\w+"', 'optimizer = "adamw"', line)
        lines.append(line)
    Path("toy.toml").write_text("\n".join(lines))
    assert main(["--config", "toy.toml", *SMALL]) == 0
    assert list(Path("run").glob("*.safetensors"))


def test_values_are_those_of_the_tool(project: Path) -> None:
    found = translated("kohya_flux.sh")
    run = {name: setting.value for name, setting in found.run.items()}
    assert run["lora_rank"] == "16" and run["lora_alpha"] == "8"
    assert run["timestep_sampling"] == "shifted" and run["loss_weighting"] == "none"
    assert run["output_path"] == "output/dog" and run["num_epochs"] == "10"
    dog, animal = found.datasets
    assert dog["dataset_base_path"].value == "train/10_dog"
    assert dog["repeats"].value == 10 and dog["keep_tags"].value == "1"
    assert animal["loss_weight"].value == 0.5
    assert animal["default_caption"].value == "animal"


WAN = "python wan_train_network.py --task t2v-1.3B --network_module networks.lora_wan"
VALUES = {
    "--optimizer_type bitsandbytes.optim.AdamW8bit": {"optimizer": "adamw8bit"},
    "--optimizer_type torch.optim.RMSprop": {"optimizer": "torch.optim.RMSprop"},
    "--optimizer_type DAdaptation": {"optimizer": None},
    "--optimizer_args weight_decay=0.1 eps=1e-6": {
        "weight_decay": "0.1",
        "optimizer_args": ["eps=1e-6"],
    },
    "--lr_scheduler constant --lr_warmup_steps 100": {"lr_warmup_steps": None},
    "--lr_scheduler cosine --lr_warmup_steps 100": {"lr_warmup_steps": 100},
    "--lr_scheduler linear --lr_warmup_steps 0.1 --max_train_steps 500": {
        "lr_warmup_steps": 50
    },
    "--lr_scheduler inverse_sqrt": {"lr_scheduler": None},
    "--lr_scheduler REX": {"lr_scheduler": "rex"},
    "--lr_scheduler cosine_with_min_lr --lr_warmup_steps 9": {
        "lr_scheduler": "cosine",
        "lr_warmup_steps": 9,
    },
    "--lr_scheduler constant_with_warmup": {"lr_scheduler": "constant"},
    "--network_module lycoris.kohya --network_args algo=lokr full_matrix=True "
    "--network_dim 8 --fp8_base": {
        "lora_type": "lokr",
        "lora_rank": 10000,
        "lora_alpha": 10000,
        "fp8_models": None,
    },
    "--task t2v-A14B --dit wan2.2_t2v_LOW_noise.safetensors --fp8_base": {
        "lora_base_model": "dit2",
        "fp8_models": "dit2",
    },
    "--task t2v-A14B --dit low.safetensors --dit_high_noise high.safetensors": {
        "lora_base_model": "dit"
    },
    "--task t2v-A14B --dit any.safetensors --max_timestep 875 --fp8_base": {
        "lora_base_model": "dit2",
        "fp8_models": "dit2",
    },
    "--lr_scheduler_num_cycles 4": {"lr_scheduler_num_cycles": None},
    "--max_train_steps 9 --max_train_epochs 3": {"max_steps": None, "num_epochs": "3"},
    "--mixed_precision fp16": {"mixed_precision": "bf16"},
    "--timestep_sampling sigma --weighting_scheme logit_normal": {
        "timestep_sampling": "logit_normal",
        "loss_weighting": "none",
    },
    "--timestep_sampling sigma --discrete_flow_shift 3": {
        "timestep_sampling": "shifted"
    },
    "--timestep_sampling logsnr": {"timestep_sampling": "shifted"},
    "--network_args loraplus_lr_ratio=4": {"loraplus_lr_ratio": "4"},
    "--log_with all --log_tracker_name dogs": {
        "report_to": "tensorboard,wandb",
        "wandb_project": "dogs",
    },
    "--log_tracker_name dogs": {"wandb_project": None},
    "--sample_every_n_steps 100": {"preview_steps": None},
    "--blocks_to_swap 0": {"blocks_to_swap": None},
    "--vae_tiling": {"tiled": True},
    "--output_name dogs": {"output_path": "dogs"},
    "--output_dir out --output_name dogs": {"output_path": "out/dogs"},
}
"""Flags of a command -> our options; None for one that is not written."""


@pytest.mark.parametrize("given", VALUES)
def test_a_flag_becomes_the_option_that_means_the_same(
    given: str, project: Path
) -> None:
    Path("one.sh").write_text(f"{WAN} {given}")
    run = translated("one.sh").run
    for option, value in VALUES[given].items():
        assert (run[option].value if option in run else None) == value


def job(**changes: dict[str, object]) -> dict[str, object]:
    """The options of a job of ai-toolkit whose process has these changes, without
    datasets; those of `dataset` are of its only one.
    """
    source = yaml.safe_load(Path("ai_toolkit_flux.yaml").read_text())
    (process,) = source["config"]["process"]
    process["datasets"] = [changes.pop("dataset", {"folder_path": "photos"})]
    for name, change in changes.items():
        process[name] = {**process.get(name, {}), **change}
    Path("job.yaml").write_text(yaml.safe_dump(source))
    run = translated("job.yaml").run
    return {name: setting.value for name, setting in run.items()}


def test_a_whole_lokr_has_a_rank_that_makes_it_one_and_stays_as_it_is_loaded(
    project: Path,
) -> None:
    network = {"type": "lokr", "lokr_full_rank": True, "linear": 16}
    run = job(network=network, model={"quantize": True})
    assert run["lora_rank"] == run["lora_alpha"] == 10000
    assert "quant_options" not in run
    run = job(network={"lokr_full_rank": True, "linear": 16})
    assert run["lora_rank"] == 16


def test_schnell_is_told_by_the_name_of_its_file(project: Path) -> None:
    Path("a.sh").write_text(
        "python flux_train_network.py --network_module networks.lora_flux "
        "--pretrained_model_name_or_path flux1-schnell.safetensors"
    )
    run = translated("a.sh").run
    assert run["model_id"].value == "black-forest-labs/FLUX.1-schnell"


def test_the_rate_of_the_denoiser_wins(project: Path) -> None:
    assert job(train={"lr": 1e-3, "unet_lr": 1e-4})["learning_rate"] == 1e-4
    Path("a.sh").write_text(
        "python flux_train_network.py --learning_rate 1e-3 --unet_lr 2e-4 "
        "--text_encoder_lr 1e-5 --network_train_unet_only --max_timestep 1000 "
        "--network_module networks.lora_flux --clip_skip 1"
    )
    found = translated("a.sh")
    assert found.run["learning_rate"].value == "2e-4"
    kinds = {one.entry.key: one.result.kind for one in found.outcomes}
    needless = ("learning_rate", "text_encoder_lr", "max_timestep", "clip_skip")
    assert {kinds[key] for key in needless} == {"needless"}


def test_a_warm_up_of_ai_toolkit_has_its_steps(project: Path) -> None:
    run = job(train={"lr_scheduler": "constant_with_warmup"})
    assert run["lr_warmup_steps"] == 1000


def test_folders_of_several_images_to_edit_are_one_table(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = {
        "folder_path": "photos",
        "control_path_1": "before",
        "control_path_2": "more",
        "control_path_3": None,
        "default_caption": "make it rain",
        "resolution": 512,
    }
    model = {
        "name_or_path": "Qwen/Qwen-Image-Edit-2509",
        "arch": "qwen_image_edit_plus",
    }
    Path("photos/0.txt").unlink()
    run = job(dataset=dataset, model=model)
    assert "default_caption" not in run
    assert main(["import", "job.yaml", "--output", "run.toml"]) == 0
    row = json.loads(Path("run-dataset-1.jsonl").read_text().splitlines()[0])
    assert row["edit_image"] == [
        str(project / f"{one}/0.png") for one in ("before", "more")
    ]
    assert row["prompt"] == "make it rain"
    said = " ".join(capsys.readouterr().out.split())
    assert "control_path_2 is read with control_path_1" in said


def test_a_setting_of_what_is_off_is_not_needed(project: Path) -> None:
    job(
        train={
            "diff_output_preservation": False,
            "diff_output_preservation_class": "dog",
        }
    )
    kinds = {one.entry.key: one.result.kind for one in translated("job.yaml").outcomes}
    assert kinds["train.diff_output_preservation_class"] == "needless"
    job(
        train={
            "diff_output_preservation": True,
            "diff_output_preservation_class": "dog",
        }
    )
    kinds = {one.entry.key: one.result.kind for one in translated("job.yaml").outcomes}
    assert kinds["train.diff_output_preservation_class"] == "missing"


def test_settings_of_previews_are_not_carried_over_where_there_are_previews(
    project: Path,
) -> None:
    source = yaml.safe_load(Path("ai_toolkit_flux.yaml").read_text())
    (process,) = source["config"]["process"]
    process["trigger_word"] = "sks"
    process["sample"] = {
        "prompts": ["a [trigger] --ctrl_img a.png", "a cat"],
        "sample_every": 250,
        "sampler": "flowmatch",
        "seed": 42,
        "walk_seed": False,
    }
    Path("a.yaml").write_text(yaml.safe_dump(source))
    found = translated("a.yaml")
    assert found.run["preview_prompt"].value == ["a sks", "a cat"]
    kinds = {one.entry.key: one.result.kind for one in found.outcomes}
    assert (kinds["sample.prompts"], kinds["sample.seed"]) == ("partial", "missing")
    assert "carried over in part (1):\n" in report(found)
    toml = as_toml(found, Source("", ()))
    partial, _, missing = toml.partition("# Not carried over:")
    assert "# Carried over in part:\n# a.yaml: sample.prompts:" in partial.replace(
        "config.process[1].", ""
    )
    assert "sample.prompts" not in missing
    assert kinds["sample.sampler"] == kinds["sample.walk_seed"] == "needless"
    process["sample"]["prompts"] = []
    Path("a.yaml").write_text(yaml.safe_dump(source))
    kinds = {one.entry.key: one.result.kind for one in translated("a.yaml").outcomes}
    assert kinds["sample.seed"] == kinds["sample.sample_every"] == "needless"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.txt", "# of dogs\na dog --w 512 --s 20\n\na cat\n"),
        ("p.json", '[{"prompt": "a dog", "seed": 1}, {"prompt": "a cat"}]'),
        (
            "p.toml",
            '[prompt]\nwidth = 512\n[[prompt.subset]]\nprompt = "a dog"\n'
            '[[prompt.subset]]\nprompt = "a cat"\n',
        ),
    ],
)
def test_prompts_of_a_file_are_carried_over_and_their_settings_are_not(
    name: str, text: str, project: Path
) -> None:
    Path(name).write_text(text)
    Path("a.sh").write_text(
        f"{WAN} --sample_prompts {name} --sample_every_n_steps 9 --sample_at_first"
    )
    found = translated("a.sh")
    assert found.run["preview_prompt"].value == ["a dog", "a cat"]
    assert found.run["preview_steps"].value == "9"
    kinds = {one.entry.key: one.result.kind for one in found.outcomes}
    assert kinds["sample_prompts"] == "partial"
    assert kinds["sample_at_first"] == "missing"


def test_a_table_of_images_to_edit_is_written_with_our_columns(project: Path) -> None:
    rows = [
        {
            "image_path": f"photos/{i}.png",
            "control_path": f"before/{i}.png",
            "caption": "a",
        }
        for i in range(2)
    ]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("musubi_kontext_dataset.toml").write_text(
        '[[datasets]]\nimage_jsonl_file = "rows.jsonl"\nresolution = [512, 512]\n'
    )
    assert main(["import", "musubi_kontext.sh", "--output", "run.toml"]) == 0
    written = Path("run-dataset-1.jsonl").read_text().splitlines()
    assert json.loads(written[1]) == {
        "image": str(project / "photos/1.png"),
        "prompt": "a",
        "kontext_images": [str(project / "before/1.png")],
    }
    assert main(["graph", "--config", "run.toml"]) == 0


def test_the_first_frame_is_an_input_where_it_is_none_by_itself(project: Path) -> None:
    text = Path("ai_toolkit_wan22.yaml").read_text().replace("wan22_14b", "wan22_5b")
    text = text.replace("num_frames: 1\n          res", "do_i2v: true\n          res")
    Path("ti2v.yaml").write_text(text)
    assert translated("ti2v.yaml").run["extra_inputs"].value == "input_image"


def test_what_a_family_has_on_by_default_is_switched_off(project: Path) -> None:
    text = Path("ai_toolkit_wan22.yaml").read_text()
    source = yaml.safe_load(text)
    source["config"]["process"][0]["train"]["gradient_checkpointing"] = False
    Path("off.yaml").write_text(yaml.safe_dump(source))
    assert main(["import", "off.yaml", "--output", "off.toml"]) == 0
    found = tomllib.loads(Path("off.toml").read_text())
    assert found["use_gradient_checkpointing"] is False


def test_defaults_that_change_numbers_are_written(project: Path) -> None:
    Path("short.sh").write_text(
        "python wan_train_network.py --task t2v-1.3B --network_module networks.lora_wan\n"
    )
    run = translated("short.sh").run
    values = {name: setting.value for name, setting in run.items()}
    assert values["lora_rank"] == 4 and values["lora_alpha"] == 1
    assert values["learning_rate"] == 2e-6 and values["max_steps"] == 1600
    assert values["timestep_sampling"] == "uniform"


@pytest.mark.parametrize(("shift", "drawn"), [("", "shifted"), ("1", "uniform")])
def test_sd_scripts_shifts_flux_unless_told_otherwise(
    shift: str, drawn: str, project: Path
) -> None:
    given = f"--discrete_flow_shift {shift}" if shift else ""
    Path("one.sh").write_text(
        f"python flux_train_network.py --network_module networks.lora_flux {given}\n"
    )
    assert translated("one.sh").run["timestep_sampling"].value == drawn


def test_pairs_of_images_become_a_table(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("before/0.png").rename("before/0.gif")
    source = yaml.safe_load(Path("ai_toolkit_qwen_edit.yaml").read_text())
    (dataset,) = source["config"]["process"][0]["datasets"]
    shutil.copy("photos/0.png", Path(dataset["folder_path"], "alone.png"))
    assert main(["import", "ai_toolkit_qwen_edit.yaml", "--output", "run.toml"]) == 0
    first, second = Path("run-dataset-1.jsonl").read_text().splitlines()
    row = yaml.safe_load(first)
    assert Path(row["edit_image"]) == project / "before/0.gif"
    said = " ".join(capsys.readouterr().out.split())
    assert "without 1 file of photos that has no pair" in said
    assert row["prompt"] == "a dog, sitting" and "1.png" in second


def test_nothing_is_overwritten_without_being_told(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["import", "ai_toolkit_qwen_edit.yaml", "--output", "run.toml"]
    Path("run-dataset-1.jsonl").write_text("mine")
    assert main(command) == 2
    assert "add --overwrite to replace it" in capsys.readouterr().err
    assert Path("run-dataset-1.jsonl").read_text() == "mine"
    assert not Path("run.toml").exists()
    assert main([*command, "--overwrite"]) == 0
    assert tomllib.loads(Path("run.toml").read_text())["lora_type"] == "lokr"


def test_without_an_output_the_file_is_printed(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", "diffsynth_qwen_image.sh"]) == 0
    said = capsys.readouterr()
    assert tomllib.loads(said.out)["lora_rank"] == 32
    assert "carried over (" in said.err
    assert said.err.endswith("\n\nno file was written: add --output FILE.toml\n")
    assert main(["import", "diffsynth_qwen_image.sh", "-o", "run.toml"]) == 0
    assert Path("run.toml").read_text() == said.out
    assert "no file was written" not in capsys.readouterr().out


REFUSED = {
    "sdxl.sh": (
        "accelerate launch sdxl_train_network.py --pretrained_model_name_or_path a.safetensors",
        "SDXL is not supported by an installed family: flux, qwen_image, wan",
    ),
    "sd.toml": (
        'pretrained_model_name_or_path = "v1-5.ckpt"\nnetwork_module = "networks.lora"',
        "Stable Diffusion is not supported by an installed family",
    ),
    "dreambooth.sh": (
        "accelerate launch train_db.py --max_train_steps 9",
        "Stable Diffusion is not supported by an installed family",
    ),
    "chroma.yaml": (
        "config:\n  process:\n    - type: sd_trainer\n      model: {arch: chroma}\n",
        "chroma is not supported by an installed family",
    ),
    "zimage.sh": (
        "python zimage_train_network.py --dit a.safetensors",
        "Z-Image is not supported by an installed family",
    ),
    "canny.sh": (
        "python examples/flux/model_training/train.py --model_id_with_origin_paths "
        "black-forest-labs/FLUX.1-Canny-dev:a.safetensors",
        "FLUX.1-Canny-dev is not supported by an installed family: flux",
    ),
    "diffusers.sh": (
        "accelerate launch train_dreambooth_lora_flux.py --rank 4",
        "a script of diffusers, which is not imported",
    ),
    "unknown.sh": ("python train.py --config a.toml", "no script of a known tool"),
    "nothing.sh": ("echo hello", "has no training command"),
    "two.sh": (
        "python wan_train_network.py --task t2v-14B\n" * 2,
        "choose one with --command 1 to --command 2",
    ),
    "other.toml": ("a = 1", "has no keys of a known tool"),
    "broken.toml": ("a = ", "broken.toml: cannot be parsed"),
    "data.toml": (
        '[[datasets]]\nimage_directory = "photos"',
        "does not say which model it trains",
    ),
    "list.yaml": ("config:\n  process: {}\n", "process"),
    "numbers.toml": (
        "datasets = [1]\n[general]\nimage_dir = 1",
        "datasets is not a list of tables",
    ),
    "lacks.sh": (
        "python wan_train_network.py --dataset_config no.toml",
        "names no.toml, which is not here",
    ),
    "quote.sh": ("python 'train.py", "cannot be read as a shell script"),
    "task.sh": (
        "python wan_train_network.py --task t2v-99B",
        "--task t2v-99B is a model that family wan does not train",
    ),
}
"""File -> its content, and a part of the error."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_imported_is_refused_in_a_sentence(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    content, part = REFUSED[name]
    Path(name).write_text(content)
    assert main(["import", name]) == 2
    said = capsys.readouterr().err
    assert part in said
    assert "bug in dstrain" not in said


def test_a_file_of_datasets_alone_needs_the_model(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["import", "musubi_wan_dataset.toml", "--model", "Wan-AI/Wan2.1-T2V-1.3B"]
    assert main(command) == 0
    found = tomllib.loads(capsys.readouterr().out)
    assert found["model_id"] == "Wan-AI/Wan2.1-T2V-1.3B"
    assert found["dataset_base_path"] == "videos" and "learning_rate" not in found


def test_a_value_that_training_refuses_is_left_out_with_the_reason(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path("musubi_kontext.sh").read_text()
    Path("bad.sh").write_text(text.replace("--network_dim 8", "--network_dim -3"))
    assert main(["import", "bad.sh", "--output", "run.toml"]) == 0
    assert "lora_rank" not in tomllib.loads(Path("run.toml").read_text())
    assert "--network_dim" in capsys.readouterr().out.partition("not needed")[0]


def test_however_many_values_are_refused_each_is_left_out_and_said(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"x{number}" for number in range(50)]

    def refused(found: Translation) -> UsageError | None:
        left = [name for name in (*names, "lora_alpha") if name in found.run]
        return UsageError(f"--{left[0]}", "no such option") if left else None

    monkeypatch.setattr("dstrain_tools.importing.command.refusal", refused)
    Path("short.sh").write_text(WAN)
    found = translated("short.sh")
    for name in names:
        found.run[name] = Setting(1, "a key")
        found.outcomes.append(Outcome.at(f"a.sh: --{name}", Result({name: 1})))
    drop_what_is_refused(found)
    missing = [one for one in found.outcomes if one.result.kind == "missing"]
    assert {f"--{name}" for name in names} < {one.entry.key for one in missing}
    # So is a default of the tool.
    assert "network_alpha, a default of musubi-tuner" in {
        one.entry.place for one in missing
    }
    assert "network_alpha" not in found.defaults


def test_what_is_written_is_toml_whatever_the_values_are(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path("musubi_kontext.sh").read_text()
    text = text.replace("--network_dim 8", "--network_dim 08 --lr_scheduler 'a\x07b'")
    Path("odd.sh").write_text(text)
    assert main(["import", "odd.sh", "--output", "run.toml"]) == 0
    found = tomllib.loads(Path("run.toml").read_text())
    assert found["lora_rank"] == "08" and "lr_scheduler" not in found
    text = Path("kohya_flux.toml").read_text()
    text = text.replace('lr_scheduler = "constant"', 'lr_scheduler = "a\\nb"')
    Path("odd.toml").write_text(text)
    assert main(["import", "odd.toml", "--output", "my run.toml"]) == 0
    assert "lr_scheduler" not in tomllib.loads(Path("my run.toml").read_text())
    assert "dstrain --config 'my run.toml' --dry_run" in capsys.readouterr().out


def test_a_plugin_that_is_switched_off_is_not_looked_at(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", "kohya_flux.sh", "-p", "no:flux"]) == 2
    assert "family flux, which is not installed" in capsys.readouterr().err


def test_files_that_are_here_are_named(project: Path) -> None:
    text = Path("musubi_kontext.sh").read_text().replace("/models/", "")
    Path("here.sh").write_text(text)
    for name in ("flux1-kontext-dev", "ae"):
        Path(f"{name}.safetensors").touch()
    run = translated("here.sh").run
    assert (
        run["model_paths"].value
        == '["flux1-kontext-dev.safetensors", "ae.safetensors"]'
    )


def test_parts_of_weights_are_found_whatever_their_names_are(project: Path) -> None:
    names = [f"dit[bf16]-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        Path(name).touch()
    Path("one.sh").write_text(f"{WAN} --dit '{names[0]}'")
    assert json.loads(translated("one.sh").run["model_paths"].value) == [names]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("wan", "a.safetensors is not here: give it with --model_paths"),
        ("Wan-AI/Wan2.1-T2V-1.3B", "the published file is used"),
    ],
)
def test_a_published_file_is_used_only_where_the_model_is_known(
    model: str, said: str, project: Path
) -> None:
    Path("one.toml").write_text('dit = "a.safetensors"\ntask = "t2v-1.3B"\n')
    source = read_source(Path("one.toml"), None, None, None)
    table = table_of(source.tool)
    found = translate(source, table, model_of(source, table, model), None)
    lost = {one.entry.key: one.result.lost for one in found.outcomes}
    assert said in lost["dit"]
    assert ("published" in lost["dit"]) == ("/" in model)


UNREADABLE = {
    "--sample_prompts p.json": "p.json cannot be read: a list of tables",
    "--lr_warmup_steps many": "many cannot be read: a number is expected",
    "--lr_warmup_steps inf": "inf cannot be read: a finite number is expected",
    "--blocks_to_swap few": "few cannot be read: a whole number is expected",
    "--min_timestep late": "late cannot be read: a number is expected",
}
"""Flag -> the reason why it is not carried over."""


@pytest.mark.parametrize("given", UNREADABLE)
def test_a_value_that_cannot_be_read_is_said_in_words(
    given: str, project: Path
) -> None:
    Path("p.json").write_text('["a dog"]')
    flags = WAN.replace("t2v-1.3B", "t2v-A14B")
    # One trains a LoRA, the other full weights.
    for command in (flags, flags.partition("--network_module")[0]):
        Path("one.sh").write_text(f"{command} {given}")
        found = translated("one.sh")
        lost = {one.entry.key: one.result.lost for one in found.outcomes}
        name = given.partition(" ")[0].removeprefix("--")
        assert UNREADABLE[given] in lost[name]


def test_the_folder_of_a_table_gives_way_to_one_that_a_key_names(project: Path) -> None:
    Path("musubi_kontext_dataset.toml").write_text(
        '[[datasets]]\nimage_directory = "photos/"\ncontrol_directory = "before"\n'
    )
    found = translated("musubi_kontext.sh")
    assert found.run["dataset_base_path"].value == "photos/"
    kinds = {one.entry.key: one.result.kind for one in found.outcomes}
    assert kinds["control_directory"] == "changed"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"image_path": "0.png"}\n{', "line 2 is not JSON"),
        ('\n{"caption": "a"}', "line 2 has no image_path"),
        ('["0.png"]', "line 1 is not a table of keys"),
        ('{"image_path": "0.png", "control_path": 1}', "line 1: control_path is not"),
    ],
)
def test_what_is_no_row_is_said_with_its_line(
    text: str, said: str, project: Path
) -> None:
    Path("rows.jsonl").write_text(text)
    Path("musubi_kontext_dataset.toml").write_text(
        '[[datasets]]\nimage_jsonl_file = "rows.jsonl"\n'
    )
    found = translated("musubi_kontext.sh")
    lost = {one.entry.key: one.result.lost for one in found.outcomes}
    assert f"rows.jsonl cannot be read: {said}" in lost["image_jsonl_file"]


@pytest.mark.parametrize("family", ("flux", "qwen_image", "wan"))
def test_what_is_known_of_a_family_is_what_its_specs_say(family: str) -> None:
    record = load_family(family)
    specs = [record.spec(variant) for variant in record.variants]
    assert {one.reads_videos for one in specs} == {family in VIDEO_FAMILIES}
    columns = [one for spec in specs for one in spec.inputs.values()]
    named = [one.name for one in columns if isinstance(one, Column)]
    assert CONTROLS[family] in named
    for model_id in record.model_files:
        model = Model(record, model_id, "")
        variants = record.variants_of(model_id)
        if variants:
            assert model.has_experts == (record.spec(variants[0]).experts is not None)


def test_what_a_family_of_others_does_not_have_is_said_in_words(project: Path) -> None:
    source = read_source(Path("musubi_kontext.sh"), None, None, None)
    table = table_of(source.tool)
    other = ModelFamily("zeta", "", "", "", ("base",), "dit", {}, {})
    model = Model(other, "", "--model")
    found = translate(source, table, model, None)
    lost = {one.entry.key: one.result.lost for one in found.outcomes}
    assert lost["control_directory"] == "family zeta has no column for pairs"
    assert lost["fp8_t5"] == "family zeta has no text encoder"
    # A table without pairs needs no such column.
    Path("rows.jsonl").write_text('{"image_path": "photos/0.png", "caption": "a"}')
    Path("musubi_kontext_dataset.toml").write_text(
        '[[datasets]]\nimage_jsonl_file = "rows.jsonl"\n'
    )
    source = read_source(Path("musubi_kontext.sh"), None, None, None)
    rows = translate(source, table, model, Path("run.toml")).tables
    assert json.loads(rows[Path("run-dataset-1.jsonl")])["prompt"] == "a"


def test_a_fault_of_a_conversion_is_no_fault_of_the_value(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Result:
        raise KeyError("a bug")

    known = {**conversions(), "warmup": broken}
    monkeypatch.setattr(
        "dstrain_tools.importing.translation.conversions", lambda: known
    )
    Path("one.sh").write_text(f"{WAN} --lr_warmup_steps 9")
    with pytest.raises(KeyError, match="a bug"):
        translated("one.sh")


@pytest.mark.parametrize("tool", TOOLS)
def test_a_table_names_options_and_conversions_that_exist(tool: str) -> None:
    table = table_of(tool)
    options = {*flags_by_name(TrainConfig), "repeats", "loss_weight"}
    for part in (table.run, table.dataset):
        for key, rule in part.carried.items():
            assert rule.option in options, key
            assert rule.conversion in conversions(), key
            assert key not in part.missing or key in table.run.carried
        texts = " ".join([*part.needless.values(), *part.missing.values()])
        known = {*options, "edit_pixels", "kontext_pixels", "lora_checkpoint", "config"}
        assert set(re.findall(r"--(\w+)", texts)) <= known
    assert set(table.defaults["run"]) <= set(table.run.carried)
    assert set(table.defaults["dataset"]) <= set(table.dataset.carried)
    assert set(table.always) <= options
    parts = (table.run.carried, table.run.needless, table.run.missing)
    assert set(table.switches) | set(table.switches.values()) <= {*chain(*parts)}
    assert dataset_flags()


def test_conversions_are_those_that_tables_name() -> None:
    """Functions that help them are none, and a table cannot name them."""
    rules = [
        rule
        for tool in TOOLS
        for part in (table_of(tool).run, table_of(tool).dataset)
        for rule in part.carried.values()
    ]
    by_code = {"same_name"}  # keys that are options of ours
    assert set(conversions()) == {rule.conversion for rule in rules} | by_code


PUBLISHED = json.loads(Path(__file__).with_name("published_keys.json").read_text())
"""Tool -> run or dataset -> the keys that its scripts read, several in a line."""


@pytest.mark.parametrize("tool", PUBLISHED)
@pytest.mark.parametrize("part", ("run", "dataset"))
def test_every_published_key_of_a_tool_is_known(tool: str, part: str) -> None:
    table = table_of(tool)
    parts = (
        (table.run, table.dataset) if tool != "ai-toolkit" else (getattr(table, part),)
    )
    unknown = []
    for key in " ".join(PUBLISHED[tool][part]).split():
        reasons = [one.reason(key).lost for one in parts if one.rule(key) is None]
        if len(reasons) == len(parts) and all("not known" in one for one in reasons):
            unknown.append(key)
    assert unknown == []
