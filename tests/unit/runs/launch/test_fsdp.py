"""Settings of FSDP, of both versions, say how networks are sharded, or are refused."""

import inspect
import re

import pytest
from accelerate.utils.launch import prepare_multi_gpu_env
from dstrain import UsageError
from dstrain.distributed import Sharding
from dstrain.runs.launch import fsdp
from dstrain.runs.launch.fsdp import read_fsdp, refuse_groups, sharding_of


@pytest.mark.parametrize(
    ("settings", "sharding"),
    [
        ({}, Sharding("full", True, False)),
        ({"VERSION": "2"}, Sharding("full", True, False)),
        (
            {"VERSION": "2", "RESHARD_AFTER_FORWARD": "False"},
            Sharding("full", False, False),
        ),
        ({"VERSION": "2", "OFFLOAD_PARAMS": "true"}, Sharding("full", True, True)),
        ({"SHARDING_STRATEGY": "SHARD_GRAD_OP"}, Sharding("full", False, False)),
        ({"SHARDING_STRATEGY": "2"}, Sharding("full", False, False)),
        ({"SHARDING_STRATEGY": "HYBRID_SHARD"}, Sharding("hybrid", True, False)),
        ({"SHARDING_STRATEGY": "HYBRID_SHARD_ZERO2"}, Sharding("hybrid", False, False)),
        ({"SHARDING_STRATEGY": "NO_SHARD"}, None),
        (
            {
                "SHARDING_STRATEGY": "FULL_SHARD",
                "RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP",
            },
            Sharding("full", False, False),
        ),
    ],
)
def test_settings_say_how_networks_are_divided(
    settings: dict[str, str], sharding: Sharding | None
) -> None:
    environment = {f"FSDP_{name}": value for name, value in settings.items()}
    found, said, flags = read_fsdp(environment)
    assert found == sharding
    assert said.startswith("FSDP ")
    assert flags == {}


def groups(replicate: int, shard: int) -> dict[str, str]:
    return {
        "FSDP_VERSION": "2",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(replicate),
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(shard),
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
    }


def test_groups_are_copies_on_each_machine_or_refused() -> None:
    assert read_fsdp(groups(1, 4))[0] == Sharding("full")
    assert read_fsdp(groups(2, 2))[0] == Sharding("hybrid")
    assert read_fsdp(groups(4, 1))[0] is None
    with pytest.raises(UsageError, match="but a machine has 2 processes"):
        read_fsdp(groups(1, 4) | groups(2, 4))
    with pytest.raises(UsageError, match="dp_shard_size is None"):
        read_fsdp(groups(1, 4) | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "None"})


@pytest.mark.parametrize("kind", ["TP", "CP", "SP"])
def test_other_groups_are_refused(kind: str) -> None:
    refuse_groups({f"PARALLELISM_CONFIG_{kind}_SIZE": "1"})
    with pytest.raises(UsageError, match=rf"{kind.lower()}_size is 2; \w+ parallel"):
        refuse_groups({f"PARALLELISM_CONFIG_{kind}_SIZE": "2"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"VERSION": "3"}, "fsdp_version is 3"),
        ({"SHARDING_STRATEGY": "MOST"}, "fsdp_sharding_strategy is MOST"),
        (
            {"VERSION": "2", "RESHARD_AFTER_FORWARD": "FULL_SHARD"},
            "fsdp_reshard_after_forward is FULL_SHARD",
        ),
        ({"IGNORED_MODULES": "norm.*"}, "fsdp_ignored_modules is not supported"),
        (
            {"SHARDING_STRATEGY": "NO_SHARD", "OFFLOAD_PARAMS": "true"},
            "nothing can be offloaded",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    settings: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read_fsdp({f"FSDP_{name}": value for name, value in settings.items()})


def test_checkpointing_is_said_by_a_flag() -> None:
    environment = {
        "FSDP_ACTIVATION_CHECKPOINTING": "true",
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
    }
    assert read_fsdp(environment)[2] == {"use_gradient_checkpointing": "true"}


def test_one_line_says_what_a_setting_became() -> None:
    _, said = sharding_of("ZeRO stage 2", "hybrid", False, True)
    assert said == (
        "ZeRO stage 2 of accelerate's configuration is done as FSDP 2: parameters, gradients and optimizer state "
        "are sharded among the processes of a machine; a block's parameters stay together between forward and "
        "backward; what is sharded lies in RAM"
    )


def test_every_setting_that_accelerate_hands_on_is_read_or_about_its_own_way() -> None:
    handed = set(re.findall(r'"FSDP_(\w+)"', inspect.getsource(prepare_multi_gpu_env)))
    read = set(re.findall(r'FSDP_(\w+)"', inspect.getsource(fsdp)))
    read |= {"ACTIVATION_CHECKPOINTING", "ACTIVATION_CHECKPOINTING_OFFLOAD"}
    assert read <= handed
    # What it wraps and prefetches, and how it would load and save.
    assert handed - read == {
        "AUTO_WRAP_POLICY", "BACKWARD_PREFETCH", "CPU_RAM_EFFICIENT_LOADING",
        "FORWARD_PREFETCH", "MIN_NUM_PARAMS", "STATE_DICT_TYPE", "SYNC_MODULE_STATES",
        "TRANSFORMER_CLS_TO_WRAP", "USE_ORIG_PARAMS",
    }  # fmt: skip
