"""What a launcher says is translated, or refused in words; its flags agree with ours."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from dstrain import TrainConfig, UsageError
from dstrain.distributed import Sharding
from dstrain.runs.launch.settings import Launch, check_launch, in_stage, read_launch

from tests.support.launchers import FILES, FSDP_2, ZERO_3, handed_on

PAGE = Path("docs/guide/many-devices.md")
GUIDE = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
WANTED = MappingProxyType(
    {
        "accelerate_config_zero3.yaml": Sharding("full", True),
        "accelerate_config.yaml": Sharding("full", False),
        "accelerate_config_zero2offload.yaml": Sharding("full", False, True),
        "deepspeed_zero3_cpuoffload.yaml": Sharding("full", True, True),
    }
)


def check(launch: Launch, processes: int = 1, **flags: Any) -> None:
    check_launch(TrainConfig(model="tiny", **flags), launch, processes)


@pytest.mark.parametrize("name", WANTED)
def test_published_files_are_translated(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = FILES[name]
    file = settings["deepspeed_config"].get("deepspeed_config_file")
    if file is not None:
        Path(file).parent.mkdir(parents=True)
        Path(file).write_text(json.dumps(ZERO_3))
    launch = read_launch(handed_on(settings, tmp_path))
    assert launch.sharding == WANTED[name]
    assert launch.said.startswith(
        f"ZeRO stage {2 + WANTED[name].reshard_after_forward}"
    )
    processes = settings["num_processes"]
    check(launch, processes)
    if processes > 1:
        assert in_stage(launch, "train", processes) is launch
        return
    with pytest.raises(UsageError, match="one process shards nothing, so that"):
        in_stage(launch, "train", processes)


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
    assert launch.said.startswith("FSDP 2 of accelerate's configuration")


def test_every_published_file_has_a_translation() -> None:
    assert FILES.keys() == WANTED.keys()


def test_files_of_fsdp_are_translated(tmp_path: Path) -> None:
    launch = read_launch(handed_on(FSDP_2, tmp_path))
    assert launch.sharding == Sharding("full", True)
    assert launch.flags == {"mixed_precision": "bf16"}
    older = {"fsdp_version": 1, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"}
    settings = {**FSDP_2, "fsdp_config": {**FSDP_2["fsdp_config"], **older}}
    launch = read_launch(handed_on(settings, tmp_path))
    assert launch.sharding == Sharding("full", False)


DEFAULT = """
import json, sys
from pathlib import Path
from accelerate import Accelerator
from tests.support.launchers import FILES, FSDP_2, handed_on

here = Path(sys.argv[1])
other = {**FSDP_2, "mixed_precision": "no"}
found = handed_on(None, here), handed_on(other, here), handed_on(None, here, "--multi_gpu")
plain = Accelerator()
print(json.dumps([*found, [str(plain.distributed_type), plain.mixed_precision]]))
"""


def test_the_file_in_the_users_folder_holds_without_another_and_for_accelerate_launch(
    tmp_path: Path,
) -> None:
    (tmp_path / "accelerate").mkdir()
    default = tmp_path / "accelerate/default_config.yaml"
    default.write_text(json.dumps(FILES["accelerate_config_zero2offload.yaml"]))
    ended = subprocess.run(
        [sys.executable, "-c", DEFAULT, str(tmp_path)],
        env={**os.environ, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    *found, plain = json.loads(ended.stdout)
    by_default, by_file, by_words = map(read_launch, found)
    assert by_default.sharding == Sharding("full", False, True)
    assert by_default.flags == {"mixed_precision": "bf16"}
    assert by_file.sharding == Sharding("full", True)
    assert by_file.flags == {}
    assert by_words.sharding is None
    assert plain == ["DistributedType.NO", "no"]


def test_one_process_and_stage_1_divide_nothing(tmp_path: Path) -> None:
    launch = read_launch(handed_on(FSDP_2, tmp_path))
    alone = in_stage(launch, "", 1)
    assert alone.sharding is None
    assert alone.said.endswith("nothing is sharded")
    assert in_stage(launch, "", 2) is launch
    kept = Launch(Sharding(offload=True), "words", launch.flags)
    assert in_stage(kept, "data_process", 1) == Launch(flags=launch.flags)
    assert in_stage(Launch(), "", 1) == Launch()


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU", "MULTI_GPU"])
def test_files_without_sharding_say_nothing(kind: str, tmp_path: Path) -> None:
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 2,
        "use_cpu": kind == "MULTI_CPU",
    }
    assert read_launch(handed_on(settings, tmp_path)) == Launch()


def test_without_a_launcher_nothing_is_said() -> None:
    assert read_launch({}) == Launch()
    check(Launch())


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed precision fp16"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "mixed precision fp8"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM is not supported"),
        ({"ACCELERATE_USE_SAGEMAKER": "true"}, "SageMaker"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend INDUCTOR"),
        (
            {
                "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
                "PARALLELISM_CONFIG_TP_SIZE": "2",
            },
            "tensor parallel",
        ),
    ],
)
def test_what_dstrain_does_not_have_is_refused(
    variables: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read_launch(variables)
    assert caught.value.where == "accelerate's configuration"


@pytest.mark.parametrize(
    ("flags", "given", "clashes"),
    [
        ({"mixed_precision": "bf16"}, {"mixed_precision": "no"}, True),
        ({"mixed_precision": "bf16"}, {"mixed_precision": "bf16"}, False),
        ({"mixed_precision": "bf16"}, {}, False),
        ({"max_grad_norm": "0.5"}, {}, True),
        ({"max_grad_norm": "1"}, {}, False),
        ({"batch_size": "2"}, {"batch_size": 2}, False),
        ({"use_gradient_checkpointing": "true"}, {}, True),
        (
            {"use_gradient_checkpointing": "true"},
            {"use_gradient_checkpointing": True},
            False,
        ),
    ],
)
def test_flags_agree_with_the_launcher(
    flags: dict[str, str], given: dict[str, Any], clashes: bool
) -> None:
    if not clashes:
        check(Launch(flags=flags), **given)
        return
    with pytest.raises(
        UsageError, match=r"--.*: is .*, but accelerate's configuration says .*; change"
    ):
        check(Launch(flags=flags), **given)


@pytest.mark.parametrize("steps", ["1", "auto"])
def test_a_default_of_the_launcher_says_nothing(steps: str) -> None:
    launch = read_launch({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": steps})
    check(launch, gradient_accumulation_steps=4)


def test_the_samples_of_a_step_are_those_that_the_launcher_states() -> None:
    check(Launch(total_batch_size=12), 3, batch_size=2, gradient_accumulation_steps=2)
    with pytest.raises(UsageError, match="a step has 2 samples, but train_batch_size"):
        check(Launch(total_batch_size=12), 1, batch_size=2)
