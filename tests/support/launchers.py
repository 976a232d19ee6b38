"""What `accelerate launch` hands on to the processes that it starts."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from dstrain.cli.main import main

FILES: Mapping[str, Mapping[str, Any]] = {
    one["name"]: one["settings"]
    for one in json.loads(
        Path(__file__).with_name("launcher_files.json").read_text(encoding="utf-8")
    )["files"]
}
"""The files of a published system -> their settings."""
ZERO_3 = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "stage3_prefetch_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""DeepSpeed's own file, as in its documentation."""
FSDP_2 = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 2,
    "use_cpu": False,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "QwenImageTransformerBlock",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": False,
    },
}
"""A file as `accelerate config` writes it."""


def handed_on(
    settings: Mapping[str, Any] | None, folder: Path, *words: str
) -> dict[str, str]:
    """Return the variables that `accelerate launch --config_file` sets for a file with
    these settings, which is written to a folder, and for more words of its own; without
    settings, those that it sets without `--config_file`.
    """
    # A port of its own: else accelerate warns where the usual one is taken.
    arguments = ["--main_process_port", "0"]
    if settings is not None:
        path = folder / "accelerate.yaml"
        path.write_text(yaml.safe_dump(dict(settings)))
        arguments += ["--config_file", str(path)]
    parsed = launch_command_parser().parse_args([*arguments, *words, "train.py"])
    args, defaults, _ = _validate_launch_command(parsed)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(
            defaults.deepspeed_config
        )
        _, environment = prepare_deepspeed_cmd_env(args)
    elif args.use_fsdp or args.multi_gpu or args.use_megatron_lm:
        environment = prepare_multi_gpu_env(args)
    else:
        _, environment = prepare_simple_launcher_cmd_env(args)
    known = ("ACCELERATE_", "FSDP_", "PARALLELISM_", "MEGATRON_")
    return {
        name: value for name, value in environment.items() if name.startswith(known)
    }


def launched(*lines: tuple[Mapping[str, Any], list[str]]) -> Callable[[int], int]:
    """Work that runs these command lines, each as `accelerate launch` does under a
    configuration file with these settings.
    """

    def work(rank: int) -> int:
        for settings, line in lines:
            with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
                for name, value in handed_on(settings, Path(folder)).items():
                    if name.startswith(("ACCELERATE_", "FSDP_")):
                        patch.setenv(name, value)
                patch.setenv("ACCELERATE_USE_CPU", "1")
                if code := main(line):
                    return code
        return 0

    return work
