"""What a launcher says becomes sharding, or is refused by name; its flags agree with ours."""

import inspect
import json
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from dstrain import UsageError, run
from dstrain.distributed import Sharding
from dstrain.runs.launch.launchers import read_launch

from tests.support.launchers import FILES, ZERO_3, handed_on
from tests.support.runs import config

pytestmark = pytest.mark.usefixtures("tiny")
PAGE = Path("docs/guide/many-devices.md")
GUIDE = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
WHERE = "accelerate's configuration"
WANTED = MappingProxyType(
    {
        "accelerate_config_zero3.yaml": Sharding("full", True),
        "accelerate_config.yaml": Sharding("full", False),
        "accelerate_config_zero2offload.yaml": Sharding("full", False, True),
        "deepspeed_zero3_cpuoffload.yaml": Sharding("full", True, True),
    }
)


def read_zero(**settings: str) -> Any:
    """What accelerate's own settings of DeepSpeed say."""
    names = {f"ACCELERATE_DEEPSPEED_{name}": value for name, value in settings.items()}
    return read_launch({"ACCELERATE_USE_DEEPSPEED": "true", **names})


def read_zero_file(folder: Path, **changes: Any) -> Any:
    """What DeepSpeed's own file says."""
    path = folder / "zero.json"
    path.write_text(json.dumps({**ZERO_3, **changes}))
    return read_zero(CONFIG_FILE=str(path))


def read_fsdp(**settings: str) -> Any:
    names = {f"FSDP_{name}": value for name, value in settings.items()}
    return read_launch({"ACCELERATE_USE_FSDP": "true", **names})


def read_groups(replicate: int, shard: object, machine: int = 2) -> Any:
    names = ("DP_REPLICATE_SIZE", "DP_SHARD_SIZE")
    sizes = dict(zip(names, (replicate, shard), strict=True))
    groups = {f"PARALLELISM_CONFIG_{name}": str(size) for name, size in sizes.items()}
    return read_launch(
        {
            "ACCELERATE_USE_FSDP": "true",
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "FSDP_VERSION": "2",
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": str(machine),
            **groups,
        }
    )


@pytest.mark.parametrize("name", FILES)
def test_published_files_are_translated_and_leave_accelerate_nothing_to_do(
    name: str, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = FILES[name]
    file = settings["deepspeed_config"].get("deepspeed_config_file")
    if file is not None:
        Path(file).parent.mkdir(parents=True)
        Path(file).write_text(json.dumps(ZERO_3))
    variables = handed_on(settings, tmp_path)
    launch = read_launch(variables)
    assert launch.sharding == WANTED[name]
    stage = 2 + WANTED[name].reshard_after_forward
    assert launch.said.startswith(f"ZeRO stage {stage} of {WHERE}")
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    wanted: dict[str, Any] = {"max_steps": 1, "output_path": tmp_path / "out"}
    if not WANTED[name].offload:
        # One process shards nothing.
        run(config(here, **wanted))
        return
    with pytest.raises(UsageError, match="shards nothing") as caught:
        run(config(here, **wanted))
    assert caught.value.where == WHERE
    # Stage 1 trains nothing that could be offloaded.
    run(config(here, task="sft:data_process", **wanted))


@pytest.mark.parametrize("name", WANTED)
def test_published_files_are_launched_without_deepspeed_as_the_guide_says(
    name: str, tmp_path: Path
) -> None:
    wanted = WANTED[name]
    words = "--use_fsdp --fsdp_version 2"
    if not wanted.reshard_after_forward:
        words += " --fsdp_reshard_after_forward false"
    if wanted.offload:
        words += " --fsdp_offload_params true"
    assert f"| `{words}` |" in GUIDE
    variables = handed_on(FILES[name], tmp_path, *words.split())
    assert "ACCELERATE_USE_DEEPSPEED" not in variables
    launch = read_launch(variables)
    assert launch.sharding == wanted
    assert launch.said.startswith(f"FSDP 2 of {WHERE}")


@pytest.mark.parametrize(
    ("settings", "sharding"),
    [
        ({}, Sharding("full", False)),
        ({"ZERO_STAGE": "0"}, None),
        ({"ZERO_STAGE": "1"}, Sharding("full", False)),
        ({"ZERO_STAGE": "2"}, Sharding("full", False)),
        ({"ZERO_STAGE": "3"}, Sharding("full", True)),
        (
            {"ZERO_STAGE": "3", "OFFLOAD_OPTIMIZER_DEVICE": "cpu"},
            Sharding(offload=True),
        ),
        ({"ZERO_STAGE": "3", "OFFLOAD_PARAM_DEVICE": "cpu"}, Sharding(offload=True)),
    ],
)
def test_stages_of_deepspeed_become_sharding(
    settings: dict[str, str], sharding: Sharding | None
) -> None:
    found = read_zero(**settings)
    assert found.sharding == sharding
    assert f"stage {settings.get('ZERO_STAGE', '2')} of {WHERE}" in found.said


def test_deepspeeds_own_file_is_read(tmp_path: Path) -> None:
    found = read_zero_file(tmp_path)
    assert found.sharding == Sharding("full", True, True)
    assert (found.flags, found.total_batch_size) == ({}, None)
    assert read_zero_file(tmp_path, zero_optimization=None).sharding is None
    found = read_zero_file(
        tmp_path,
        bf16={"enabled": True},
        gradient_accumulation_steps=4,
        gradient_clipping=0.5,
        train_micro_batch_size_per_gpu=2,
        train_batch_size=16,
        zero_optimization={"stage": 2, "cpu_offload": True},
    )
    assert found.sharding == Sharding("full", False, True)
    assert found.flags == {
        "gradient_accumulation_steps": "4",
        "max_grad_norm": "0.5",
        "batch_size": "2",
        "mixed_precision": "bf16",
    }
    assert found.total_batch_size == 16


def test_what_has_no_effect_is_named_unless_it_is_off(tmp_path: Path) -> None:
    def unused(launch: Any) -> list[str]:
        return launch.said.partition(" here: ")[2].split(", ")

    assert {"steps_per_print", "overlap_comm"} <= {*unused(read_zero_file(tmp_path))}
    zero = {"stage": 2, "zero_hpz_partition_size": 1, "reduce_scatter": False}
    found = unused(read_zero_file(tmp_path, zero_optimization=zero))
    assert found == ["steps_per_print", "zero_hpz_partition_size"]
    profiled = read_zero_file(tmp_path, flops_profiler={"enabled": False})
    assert profiled == read_zero_file(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"zero_optimization": 3}, "zero_optimization"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer "),
        ({"train_batch_size": "many"}, "train_batch_size is 'many'"),
        ({"communication_data_type": "bf16"}, "communication_data_type"),
    ],
)
def test_what_deepspeeds_file_has_besides_is_refused_by_name(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        read_zero_file(tmp_path, **changes)
    assert caught.value.where == str(tmp_path / "zero.json")


@pytest.mark.parametrize("content", [None, '{"zero', "[]"])
def test_a_file_that_cannot_be_read_is_named(
    content: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "zero.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError) as caught:
        read_zero(CONFIG_FILE=str(path))
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    ("settings", "sharding"),
    [
        ({}, Sharding()),
        ({"VERSION": "2"}, Sharding()),
        ({"VERSION": "2", "RESHARD_AFTER_FORWARD": "False"}, Sharding("full", False)),
        ({"VERSION": "2", "OFFLOAD_PARAMS": "true"}, Sharding(offload=True)),
        ({"SHARDING_STRATEGY": "SHARD_GRAD_OP"}, Sharding("full", False)),
        ({"SHARDING_STRATEGY": "1"}, Sharding()),
        ({"SHARDING_STRATEGY": "hybrid_shard"}, Sharding("hybrid")),
        ({"SHARDING_STRATEGY": "5"}, Sharding("hybrid", False)),
        ({"SHARDING_STRATEGY": "NO_SHARD"}, None),
        ({"RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP"}, Sharding("full", False)),
    ],
)
def test_settings_of_fsdp_say_how_networks_are_divided(
    settings: dict[str, str], sharding: Sharding | None
) -> None:
    found = read_fsdp(**settings)
    assert (found.sharding, found.flags) == (sharding, {})
    assert found.said.startswith(f"FSDP {settings.get('VERSION', '1')} ")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"VERSION": "3"}, "fsdp_version is 3"),
        ({"SHARDING_STRATEGY": "MOST"}, "fsdp_sharding_strategy is MOST"),
        (
            {"VERSION": "2", "RESHARD_AFTER_FORWARD": "FULL_SHARD"},
            "fsdp_reshard_after_forward is full_shard",
        ),
        ({"IGNORED_MODULES": "norm.*"}, "fsdp_ignored_modules"),
        (
            {"SHARDING_STRATEGY": "NO_SHARD", "OFFLOAD_PARAMS": "true"},
            "nothing can be offloaded",
        ),
    ],
)
def test_what_fsdp_has_besides_is_named(settings: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        read_fsdp(**settings)
    assert caught.value.where == WHERE


def test_groups_of_other_kinds_are_refused() -> None:
    with pytest.raises(UsageError, match=r"is 4, .* 2 processes"):
        read_groups(2, 4)
    for size in ("None", 0):
        with pytest.raises(UsageError, match=f"dp_shard_size is {size}"):
            read_groups(1, size)
    used = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
    for kind in ("TP", "CP", "SP"):
        name = f"PARALLELISM_CONFIG_{kind}_SIZE"
        read_launch({**used, name: "1"})
        for size in ("2", "0", "None"):
            with pytest.raises(UsageError, match=f"{kind.lower()}_size is {size}"):
                read_launch({**used, name: size})


OWN_WAY = {
    "AUTO_WRAP_POLICY", "BACKWARD_PREFETCH", "CPU_RAM_EFFICIENT_LOADING",
    "FORWARD_PREFETCH", "MIN_NUM_PARAMS", "STATE_DICT_TYPE", "SYNC_MODULE_STATES",
    "TRANSFORMER_CLS_TO_WRAP", "USE_ORIG_PARAMS",
}  # fmt: skip
"""What accelerate's FSDP wraps and prefetches, and how it would load and save."""


def test_every_setting_that_accelerate_hands_on_is_read_or_about_its_own_way() -> None:
    def is_read(read: Any, name: str) -> bool:
        try:
            return any(read(**{name: value}) != read() for value in ("true", "odd"))
        except UsageError:
            return True

    source = inspect.getsource(prepare_deepspeed_cmd_env)
    names = set(re.findall(r"ACCELERATE_DEEPSPEED_(\w+)", source))
    assert len(names) > 5
    speed = {"ZERO3_INIT", "ZERO3_SAVE_16BIT_MODEL", "MOE_LAYER_CLS_NAMES"}
    assert {name for name in names if not is_read(read_zero, name)} == speed
    names = set(re.findall(r'"FSDP_(\w+)"', inspect.getsource(prepare_multi_gpu_env)))
    assert {name for name in names if not is_read(read_fsdp, name)} == OWN_WAY


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "NO_SHARD"}
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}
CHECKPOINTS = {**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "1"}
OFFLOADS = {**FSDP, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "yes"}


@pytest.mark.parametrize(
    ("variables", "flags", "refused"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"mixed_precision": "no"}, "mixed_precision"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"mixed_precision": "bf16"}, ""),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {}, ""),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, {"gradient_accumulation_steps": 2},
         "gradient_accumulation_steps"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}, {"gradient_accumulation_steps": 2}, ""),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto"}, {"gradient_accumulation_steps": 2}, ""),
        ({**ZERO, "ACCELERATE_GRADIENT_CLIPPING": "0.5"}, {}, "max_grad_norm"),
        ({**ZERO, "ACCELERATE_GRADIENT_CLIPPING": "1"}, {}, ""),
        (CHECKPOINTS, {}, "use_gradient_checkpointing"),
        (CHECKPOINTS, {"use_gradient_checkpointing": True}, ""),
        (OFFLOADS, {}, "use_gradient_checkpointing_offload"),
        (OFFLOADS, {"use_gradient_checkpointing_offload": True}, ""),
        ({**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "false"}, {}, ""),
    ],
)  # fmt: skip
def test_flags_agree_with_the_launcher(
    variables: dict[str, str],
    flags: dict[str, Any],
    refused: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if not refused:
        run(config(here, dry_run=True, **flags))
        return
    with pytest.raises(UsageError, match="accelerate") as caught:
        run(config(here, dry_run=True, **flags))
    assert caught.value.where == f"--{refused}"


@pytest.mark.parametrize(
    "variable",
    ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"],
)
def test_the_samples_of_a_step_are_those_of_all_processes_as_the_launcher_states(
    variable: str,
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "zero.json").write_text('{"train_batch_size": 12}')
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "zero.json"))
    flags = {"batch_size": 2, "gradient_accumulation_steps": 2, "dry_run": True}
    for size, samples in (("3", 12), ("x", 4)):
        monkeypatch.setenv(variable, size)
        if samples == 12:
            run(config(here, **flags))
            assert " 12\n" in capsys.readouterr().out
            continue
        with pytest.raises(UsageError, match=r"4 samples.* 12") as caught:
            run(config(here, **flags))
        assert caught.value.where == "--batch_size"
