"""What the keys of other tools mean here."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dstrain.cli.main import main

Import = Callable[..., Any]
WAN = "python wan_train_network.py --task t2v-1.3B --network_module networks.lora_wan"
FLUX = "python flux_train_network.py --network_module networks.lora_flux"
QWEN = "python qwen_image_train_network.py --network_module networks.lora_qwen_image"
SDXL = "python sdxl_train_network.py --network_module networks.lora"
SCRIPTS = {
    "wan": WAN,
    "flux": FLUX,
    "qwen": QWEN,
    "sdxl": SDXL,
    "full": "python flux_train.py",
    "sdxl_full": "python sdxl_train.py",
}
VALUES = json.loads(Path(__file__).with_name("values.json").read_text())
"""Script -> flags of a command -> our options; null for one that is not written. Without a
flag there are defaults that change numbers. Below "dataset" are tables of musubi-tuner, below
"jobs" those of ai-toolkit.
"""
GIVEN = [(script, flags) for script in SCRIPTS for flags in VALUES[script]]
JOBS: list[tuple[dict[str, Any], dict[str, Any]]] = VALUES["jobs"]
"""Changes to the process of a job of ai-toolkit -> our options."""


@pytest.fixture
def command(project: Path, imported: Import) -> Import:
    def run(text: str) -> Any:
        Path("one.sh").write_text(text)
        return imported("one.sh")

    return run


@pytest.fixture
def job(project: Path, imported: Import) -> Import:
    """Import a job of ai-toolkit whose process has these changes; `dataset` is the only
    one.
    """

    def run(**changes: dict[str, object]) -> Any:
        source = yaml.safe_load(Path("ai_toolkit_flux.yaml").read_text())
        (process,) = source["config"]["process"]
        process["datasets"] = [changes.pop("dataset", {"folder_path": "photos"})]
        for name, change in changes.items():
            own = process.get(name, {})
            is_group = isinstance(change, dict)
            process[name] = {**own, **change} if is_group else change
        Path("job.yaml").write_text(yaml.safe_dump(source))
        return imported("job.yaml")

    return run


@pytest.mark.parametrize(("script", "flags"), GIVEN)
def test_a_flag_becomes_the_option_that_means_the_same(
    script: str, flags: str, command: Import
) -> None:
    options = command(f"{SCRIPTS[script]} {flags}").options
    wanted = VALUES[script][flags]
    assert {name: options.get(name) for name in wanted} == wanted


@pytest.mark.parametrize(("script", "flags", "kind"), VALUES["kinds"])
def test_it_is_said_what_became_of_the_last_flag(
    script: str, flags: str, kind: str, command: Import
) -> None:
    Path("p.txt").write_text("a dog\n")
    *_, flag = (word for word in flags.split() if word.startswith("--"))
    assert command(f"{SCRIPTS[script]} {flags}").kind(flag) == kind


def test_the_command_that_is_named_is_read_and_its_flags_win_over_a_file_of_flags(
    project: Path, imported: Import, command: Import
) -> None:
    found = imported("diffsynth_wan.sh", "--command", "2").options
    assert found["output_path"] == "./models/train/low"
    assert main(["import", "diffsynth_wan.sh", "--command", "3"]) == 2
    Path("a.toml").write_text("seed = 1\nnetwork_dim = 3")
    found = command(f"{WAN} --seed 3 --seed 2 --config_file a").options
    assert (found["seed"], found["lora_rank"]) == (2, 3)


@pytest.mark.parametrize("table", VALUES["dataset"])
def test_a_key_of_a_dataset_becomes_the_option_that_means_the_same(
    table: str, command: Import
) -> None:
    Path("d.toml").write_text(f"[[datasets]]\n{table}\n")
    options = command(f"{WAN} --dataset_config d.toml").options
    wanted = VALUES["dataset"][table]
    assert {name: options.get(name) for name in wanted} == wanted


def test_a_secret_in_a_section_or_of_the_shell_is_written_nowhere(
    job: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUB_TOKEN", "other-words")
    project = {"project_name": "x-other-words"}
    found = job(hub={"token": "plain-words"}, logging=project)
    for words in ("plain-words", "other-words"):
        assert words not in found.said + found.toml
    secrets = {key for key, reason in found.reasons.items() if "secret" in reason}
    assert secrets == {"hub.token", "logging.project_name"}


@pytest.mark.parametrize(("changes", "wanted"), JOBS)
def test_a_key_of_a_job_becomes_the_option_that_means_the_same(
    changes: dict[str, Any], wanted: dict[str, Any], job: Import
) -> None:
    options = job(**changes).options
    assert {name: options.get(name) for name in wanted} == wanted


@pytest.mark.parametrize(("is_on", "kind"), [(False, "needed"), (True, "carried over")])
def test_a_setting_of_what_is_off_is_not_needed(
    is_on: bool, kind: str, job: Import
) -> None:
    name = "diff_output_preservation"
    found = job(train={name: is_on, f"{name}_class": "dog"})
    assert found.kind(f"train.{name}_class") == f"not {kind}"


def test_settings_of_previews_follow_each_prompt_where_there_are_previews(
    job: Import,
) -> None:
    sample: dict[str, object] = {
        "prompts": ["a [trigger] --AR 16:9 --ctrl_img a.png", "a cat --d 7"],
        "sample_every": 250,
        "sampler": "flowmatch",
        "seed": 42,
        "walk_seed": False,
        "width": 1000,
        "neg": "blurry, dark",
    }
    found = job(trigger_word="sks", sample=sample)
    rest = "--s 20 --n blurry, dark --w 992 --h 1024"
    assert found.options["preview_prompt"] == [
        f"a sks --d 42 {rest}",
        f"a cat --d 7 {rest}",
    ]
    assert found.kind("sample.prompts").endswith("in part")
    assert found.kind("sample.guidance_scale") == "not carried over"
    assert found.reason("sample.prompts") == found.reason("sample.guidance_scale")
    assert (
        found.kind("sample.sampler") == found.kind("sample.walk_seed") == "not needed"
    )
    found = job(sample={**sample, "prompts": []})
    assert (
        found.kind("sample.seed") == found.kind("sample.sample_every") == "not needed"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "p.txt",
            "# of dogs\na dog --w 512 --s 20 --g 3 --ss k_dpm_2\n\na cat --l 0.5 --ss euler\n",
        ),
        (
            "p.json",
            '[{"prompt": "a dog", "sample_steps": 20, "seed": -1}, '
            '{"prompt": "a cat", "scale": 0.5, "sample_sampler": "euler"}]',
        ),
        (
            "p.toml",
            '[prompt]\nwidth = 512\n[[prompt.subset]]\nprompt = "a dog"\nsample_steps = 20\n'
            '[[prompt.subset]]\nprompt = "a cat"\nscale = 0.5\nsample_sampler = "euler"\n',
        ),
    ],
)
def test_prompts_of_a_file_are_carried_over_with_the_settings_that_are_known(
    name: str, text: str, command: Import
) -> None:
    Path(name).write_text(text)
    flags = f"--sample_prompts {name} --sample_every_n_steps 9 --sample_at_first"
    found = command(f"{WAN} {flags}")
    assert found.options["preview_prompt"] == [
        "a dog --s 20",
        "a cat --l 0.5 --ss euler",
    ]
    assert found.options["preview_steps"] == 9
    assert found.kind("--sample_prompts").endswith("in part")
    assert found.options["preview_at_start"] is True


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--sample_prompts p.json", "p.json"),
        ("--lr_warmup_steps many", "many"),
        ("--lr_warmup_steps inf", "inf"),
        ("--blocks_to_swap few", "few"),
        ("--min_timestep late", "late"),
    ],
)
def test_a_value_that_cannot_be_read_is_not_carried_over(
    given: str, named: str, command: Import
) -> None:
    Path("p.json").write_text('["a dog"]')
    flags = WAN.replace("t2v-1.3B", "t2v-A14B")
    # One trains a LoRA, the other full weights.
    for text in (flags, flags.partition("--network_module")[0]):
        found = command(f"{text} {given}")
        assert named in found.reason(given.partition(" ")[0])


@pytest.mark.parametrize("model", ["wan", "Wan-AI/Wan2.1-T2V-1.3B"])
def test_a_published_file_is_used_only_where_the_model_is_known(
    model: str, project: Path, imported: Import
) -> None:
    Path("one.toml").write_text('dit = "a.safetensors"\ntask = "t2v-1.3B"\n')
    found = imported("one.toml", "--model", model)
    assert "a.safetensors" in found.reason("dit")
    assert "--model_paths" in found.reason("dit")
    assert ("published" in found.reason("dit")) == ("/" in model)


@pytest.mark.parametrize(
    ("ending", "kind"), (("txt", "needed"), ("cap", "carried over"))
)
def test_captions_in_files_that_are_not_found_are_not_carried_over(
    ending: str, kind: str, job: Import, command: Import
) -> None:
    found = job(dataset={"folder_path": "photos", "caption_ext": ending})
    assert found.kind("caption_ext") == f"not {kind}"
    table = f"image_directory = 'photos'\ncaption_extension = '.{ending}'\n"
    Path("d.toml").write_text(f"[[datasets]]\n{table}")
    found = command(f"{WAN} --dataset_config d.toml")
    assert found.kind("caption_extension") == f"not {kind}"


def rows() -> list[dict[str, Any]]:
    """Return the rows of the table that was written beside run.toml."""
    lines = Path("run-dataset-1.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_pairs_of_images_become_a_table(project: Path, imported: Import) -> None:
    Path("before/0.png").rename("before/0.gif")
    source = yaml.safe_load(Path("ai_toolkit_qwen_edit.yaml").read_text())
    (dataset,) = source["config"]["process"][0]["datasets"]
    shutil.copy("photos/0.png", Path(dataset["folder_path"], "alone.png"))
    found = imported("ai_toolkit_qwen_edit.yaml")
    first, second = rows()
    assert Path(first["edit_image"]) == project / "before/0.gif"
    assert first["prompt"] == "a dog, sitting"
    assert Path(second["image"]).name == "1.png"
    assert "1 file of photos" in " ".join(found.said.split())


def test_folders_of_several_images_to_edit_are_one_table(
    project: Path, job: Import
) -> None:
    Path("photos/0.txt").unlink()
    dataset = {
        "folder_path": "photos",
        "control_path_1": "before",
        "control_path_2": "more",
        "control_path_3": None,
        "default_caption": "make it rain",
        "resolution": 512,
    }
    arch = "qwen_image_edit_plus"
    model = {"name_or_path": "Qwen/Qwen-Image-Edit-2509", "arch": arch}
    found = job(dataset=dataset, model=model)
    assert "default_caption" not in found.options
    row = rows()[0]
    assert row["edit_image"] == [
        str(project / f"{one}/0.png") for one in ("before", "more")
    ]
    assert row["prompt"] == "make it rain"
    assert found.kind("control_path_2") == "not needed"


def test_a_table_of_images_to_edit_is_written_with_our_columns(
    project: Path, imported: Import
) -> None:
    given = [
        {"image_path": f"photos/{i}.png", "control_path": f"before/{i}.png"}
        for i in range(2)
    ]
    lines = (json.dumps({**row, "caption": "a"}) for row in given)
    Path("rows.jsonl").write_text("\n".join(lines))
    table = 'image_jsonl_file = "rows.jsonl"\nresolution = [512, 512]\n'
    Path("musubi_kontext_dataset.toml").write_text(f"[[datasets]]\n{table}")
    imported("musubi_kontext.sh")
    assert rows()[1] == {
        "image": str(project / "photos/1.png"),
        "prompt": "a",
        "kontext_images": [str(project / "before/1.png")],
    }
    assert main(["graph", "--config", "run.toml"]) == 0


@pytest.mark.parametrize(
    ("text", "line", "named"),
    [
        ('{"image_path": "0.png"}\n{', 2, "JSON"),
        ('\n{"caption": "a"}', 2, "image_path"),
        ('["0.png"]', 1, ""),
        ('{"image_path": "0.png", "control_path": 1}', 1, "control_path"),
    ],
)
def test_what_is_no_row_is_said_with_its_line(
    text: str, line: int, named: str, project: Path, imported: Import
) -> None:
    Path("rows.jsonl").write_text(text)
    table = '[[datasets]]\nimage_jsonl_file = "rows.jsonl"\n'
    Path("musubi_kontext_dataset.toml").write_text(table)
    reason = imported("musubi_kontext.sh").reason("image_jsonl_file")
    assert "rows.jsonl" in reason
    assert f"line {line}" in reason
    assert named in reason
