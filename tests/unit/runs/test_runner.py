"""A run from plain data: what it resolves to, toy models, the launcher's settings, and
where messages go.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from dstrain import SFT, DstrainError, TrainConfig, UsageError, run
from dstrain.data import Resolution
from dstrain.distributed import ProcessGroup
from dstrain.runs import plan_of
from dstrain.runs.loop import steps
from dstrain.runs.resolve import resolve
from dstrain.runs.runner import toy_models

from tests.support.launchers import FILES, ZERO_3, handed_on
from tests.support.runs import config, files, project, same, train, training_run

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


def test_a_dry_run_prints_the_plan_and_touches_nothing(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        config(
            here,
            dry_run=True,
            output_path=tmp_path / "out",
            model_paths='["nothing.safetensors"]',
        )
    )
    printed = capsys.readouterr().out
    assert "encode_prompt" in printed
    assert "input_latents" in printed
    assert not (tmp_path / "out").exists()
    run(TrainConfig(model="tiny", dry_run=True))
    assert (
        capsys.readouterr().out.partition("this run")[0]
        == printed.partition("this run")[0]
    )


def test_the_plan_of_a_command_line_is_that_of_its_columns(
    here: Path, tmp_path: Path
) -> None:
    plan, kept = plan_of(config(here, dry_run=True))
    assert kept == {}
    assert plan.inputs == {"prompt", "input_image", "height", "width"}
    assert (plan.spec.variant, plan.task.name) == ("base", "sft")
    assert plan.trainables == ("dit",)
    (tmp_path / "metadata.json").write_text(json.dumps([{"prompt": "dog"}]))
    with pytest.raises(UsageError, match="no column 'image'"):
        plan_of(config(here, dry_run=True, dataset_base_path=tmp_path))


def test_a_blank_cell_that_the_run_needs_is_named_by_row_and_column(
    here: Path, tmp_path: Path
) -> None:
    shutil.copytree(here / "data", tmp_path / "data")
    (tmp_path / "data/metadata.json").unlink()
    (tmp_path / "data/metadata.csv").write_text(
        "image,prompt\n0.png,a dog\n,a cat\n1.png,\n,\n"
    )
    with pytest.raises(UsageError) as refused:
        run(
            config(
                here, dataset_base_path=tmp_path / "data", output_path=tmp_path / "out"
            )
        )
    assert refused.value.what == "2 bad values"
    assert refused.value.help_lines == (
        "metadata.csv:3:image: is blank",
        "metadata.csv:5:image: is blank",
    )


def test_a_dataset_without_its_columns_gets_all_of_them_listed(
    here: Path, tmp_path: Path
) -> None:
    (tmp_path / "metadata.csv").write_text("picture,words\n0.png,a dog\n")
    with pytest.raises(
        UsageError, match=r"no column 'image' .* and no column 'prompt'"
    ):
        run(
            config(
                here,
                variant="base",
                dataset_base_path=tmp_path,
                output_path=tmp_path / "out",
            )
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "tinny"}, "no model named 'tinny'.*did you mean 'tiny'"),
        ({"variant": "othr"}, "no variant 'othr'.*did you mean 'other'"),
        (
            {"task": "stf"},
            "no task named 'stf'; tasks: sft, direct_distill, trajectory_imitation; did you mean 'sft'",
        ),
        (
            {"task": "sft:trian"},
            "is not a task or one of its stages.*did you mean 'sft:train'",
        ),
        (
            {"trainable_models": "dit", "lora_base_model": "dit"},
            "trained either in full or with LoRA",
        ),
        ({"dataset_base_path": None}, "--dataset_base_path"),
        ({"output_path": None}, "--output_path"),
    ],
)
def test_what_is_unknown_or_missing_is_named(
    changes: dict[str, Any], message: str, here: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        run(config(here, **changes))


def test_a_command_line_resolves_to_what_it_says(here: Path) -> None:
    setup = resolve(
        config(
            here,
            task="sft:train",
            max_pixels=99,
            extra_inputs="a,b",
            data_file_keys="image",
            variant="base",
        )
    )
    assert (setup.stage, setup.task.name, setup.spec.variant) == (
        "train",
        "sft",
        "base",
    )
    (lora_config,) = setup.trainables.lora
    assert (
        lora_config.component,
        lora_config.targets,
        lora_config.rank,
        lora_config.alpha,
    ) == (
        "dit",
        ("to_q", "to_out"),
        2,
        2.0,
    )
    assert setup.data_config.resolution == Resolution(None, None, 99)
    assert (setup.data_config.extra_inputs, setup.data_config.file_keys) == (
        ("a", "b"),
        ("image",),
    )
    assert set(setup.versions) >= {"core", "torch", "device"}
    lora = resolve(
        config(here, lora_target_modules="to_q", lora_alpha=7.0)
    ).trainables.lora[0]
    assert (lora.targets, lora.alpha) == (("to_q",), 7.0)
    full = resolve(config(here, trainable_models="dit.time,text_encoder")).trainables
    assert (full.full, full.lora, full.components) == (
        ("dit.time", "text_encoder"),
        (),
        ("dit", "text_encoder"),
    )


def test_flags_that_contradict_the_launcher_are_refused_naming_both(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(
        UsageError,
        match="--gradient_accumulation_steps: is 2, but accelerate's configuration says 4",
    ):
        run(config(here, gradient_accumulation_steps=2))


def test_settings_of_the_launcher_are_said_and_not_left_to_accelerate(
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "NO_SHARD")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    train(here, output_path=tmp_path / "out", max_steps=1)
    said = "FSDP 1 with NO_SHARD of accelerate's configuration: every process has a copy of the networks"
    assert said in capsys.readouterr().err
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"


def test_where_a_model_is_initialized_is_said_once_and_changes_nothing(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = files(train(here, output_path=tmp_path / "a", max_steps=1))
    assert "--initialize_model_on_cpu" not in capsys.readouterr().err
    flag = {"initialize_model_on_cpu": True}
    given = files(train(here, output_path=tmp_path / "b", max_steps=1, **flag))
    said = "--initialize_model_on_cpu changes nothing: each weight goes to its device"
    assert capsys.readouterr().err.count(said) == 1
    assert same(plain, given)


def test_losses_are_finite_in_bf16_and_near_those_in_fp32(here: Path) -> None:
    exact, rounded = (
        [
            numbers["loss"]
            for numbers in steps(
                training_run(config(here, mixed_precision=precision, max_steps=4))
            )
        ]
        for precision in ("no", "bf16")
    )
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.05)


def test_a_toy_run_needs_no_files_and_its_model_is_always_the_same(
    here: Path, tmp_path: Path
) -> None:
    made = [
        files(train(here, output_path=tmp_path / name, toy=True, max_steps=2))
        for name in ("a", "b")
    ]
    assert same(*made)
    assert same(
        made[0], files(train(here, output_path=tmp_path / "c", max_steps=2))
    )  # the same model, from files


def test_a_toy_model_is_in_a_folder_that_is_gone_afterwards(
    here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    setup = resolve(config(here, toy=True))
    with toy_models(setup) as ready:
        paths = [Path(name) for model in ready.models for name in model.path or ()]
        assert len(paths) == 4
        assert all(path.is_file() for path in paths)
    assert not any(tmp_path.iterdir())
    plain = resolve(config(here))
    with toy_models(plain) as ready:
        assert ready is plain


def test_one_process_alone_is_its_own_group() -> None:
    processes = ProcessGroup(Accelerator(cpu=True))
    processes.wait()
    assert (processes.rank, processes.size, processes.is_main) == (0, 1, True)
    value = torch.ones(2)
    assert processes.total(value) is value


class Other:
    """What another process sees of its accelerator."""

    process_index, num_processes = 1, 2
    waited = 0

    def wait_for_everyone(self) -> None:
        self.waited += 1

    def reduce(self, value: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        return value * 2


def test_another_process_sums_and_waits_with_the_others() -> None:
    accelerator = Other()
    processes = ProcessGroup(accelerator)
    processes.wait()
    assert (processes.is_main, accelerator.waited) == (False, 1)
    assert processes.total(torch.ones(1)).item() == 2.0


def test_errors_of_a_run_are_for_its_user(here: Path) -> None:
    with pytest.raises(DstrainError) as caught:
        run(config(here, trainable_models="dot"))
    assert str(caught.value).startswith("dstrain: error: ")


TASKS = """
from dstrain.registry.hooks import hookimpl
from dstrain.graph.task import Task
@hookimpl
def dstrain_tasks():
    return [Task.of(name, lambda predict: predict) for name in ("sft", "shared", "{own}")]
"""


def test_tasks_of_one_name_are_left_out_with_the_reason(
    fake_plugin: Callable[..., Path],
) -> None:
    for name in ("one", "two"):
        source = TASKS.format(own=name)
        fake_plugin(
            f"extra-{name}",
            {name: f"tasks_{name}"},
            {f"tasks_{name}": source},
            group="dstrain",
        )
    for name in ("one", "two"):
        setup = resolve(TrainConfig(model="tiny", dry_run=True, task=name))
        assert setup.task.name == name
    assert resolve(TrainConfig(model="tiny", dry_run=True)).task is SFT
    with pytest.raises(
        UsageError,
        match="no task named 'shared'; tasks: sft, direct_distill, trajectory_imitation, one, two",
    ):
        resolve(TrainConfig(model="tiny", dry_run=True, task="shared"))
    ours = "its task 'sft' has the same name as one of dstrain's own, and is ignored"
    both = "plugin extra-two 1.0: its task 'shared' is also provided by plugin extra-one 1.0; both are ignored"
    assert setup.extensions.broken == [
        f"plugin extra-one 1.0: {ours}",
        f"plugin extra-two 1.0: {ours}",
        both,
    ]


def test_a_dry_run_opens_no_weight(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dstrain.models.weight_files._reader", None)
    run(config(here, dry_run=True, output_path=tmp_path / "out"))


@pytest.mark.parametrize("name", FILES)
def test_no_published_launcher_file_reaches_accelerates_own_way(
    name: str, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = FILES[name]
    file = settings["deepspeed_config"].get("deepspeed_config_file")
    if file is not None:
        Path(file).parent.mkdir(parents=True)
        Path(file).write_text(json.dumps(ZERO_3))
    for variable, value in handed_on(settings, tmp_path).items():
        monkeypatch.setenv(variable, value)
    wanted = config(here, output_path=tmp_path / "out", max_steps=1)
    if "offload" not in name:
        run(wanted)  # one process: nothing is sharded
        return
    with pytest.raises(UsageError, match="one process shards nothing"):
        run(wanted)
