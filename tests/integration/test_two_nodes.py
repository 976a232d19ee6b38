"""Two machines, each with a torchrun of its own, fill one feature cache, and train as one
that has both processes, with copies of what is trained and with shards of it; where a
process of one machine dies, the other machine's says so and ends.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import TrainConfig
from dstrain.runs.resolve import resolve
from dstrain.testing.rows import write_rows

from tests.support.processes import commands, in_processes, words
from tests.support.runs import files, log, same

TWICE = """
import os
import signal
import sys

from dstrain.cli.main import main
from dstrain.training import updater


def die(*given):
    os.kill(os.getpid(), signal.SIGKILL)


stage_1 = ["--task", "sft:data_process", "--feature_cache", "cache"]
assert main([*sys.argv[1:], *stage_1]) == 0
assert main([*sys.argv[1:], "--output_path", "two"]) == 0
os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
assert main([*sys.argv[1:], "--output_path", "sharded"]) == 0
os.environ["ACCELERATE_USE_FSDP"] = "false"
if os.environ["RANK"] == "1":
    updater.clip_gradients = die
sys.exit(main([*sys.argv[1:], "--output_path", "dead"]))
"""
"""Fills a cache, trains, trains with shards, and trains again until the second process dies in a step."""


@pytest.mark.drawn  # four processes of a launcher, which import torch
def test_two_machines_train_as_one_until_a_process_dies(empty: Path) -> None:
    spec = resolve(TrainConfig(model="qwen_image", toy=True)).spec
    flags: dict[str, Any] = {
        "model": "qwen_image", "toy": True, "lora_rank": 2, "learning_rate": 1e-3,
        "dataset_base_path": write_rows(spec, empty / "data"), "max_steps": 2,
    }  # fmt: skip
    line = words(flags)
    codes, said = torchrun_on_two_machines(line)
    alone = [*line, "--output_path", "one"]
    stage_2 = ["--task", "sft:train", "--feature_cache", "cache"]
    split = [*line, *stage_2, "--output_path", "split"]
    ended = in_processes(2, commands(alone, split), empty)
    assert ended.codes == (0, 0), ended.said
    one, two, sharded = Path("one"), Path("two"), Path("sharded")
    assert len(log(one)) == 2, said
    # Each machine wrote what it had computed, and one of them the plan.
    assert len(list(Path("cache/shards").glob("*.safetensors"))) == 2
    assert log(Path("split")) == log(one)
    assert log(two) == log(one)
    assert same(files(two), files(one))
    said_of_it = (sharded / "logs/dstrain.log").read_text()
    assert "sharding: dit sharded over all processes, 2 processes" in said_of_it
    for a, b in zip(log(one), log(sharded), strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    for name, weights in files(one).items():
        torch.testing.assert_close(files(sharded)[name], weights, rtol=1e-4, atol=1e-5)
    assert codes == [1, 1]
    errors = [
        text.count("processes: another process of the run ended") for text in said
    ]
    assert sorted(errors) == [0, 1], said


def torchrun_on_two_machines(line: list[str]) -> tuple[list[int], list[str]]:
    """The exit codes of two launchers, started as the guide does, and what each said."""
    Path("twice.py").write_text(TWICE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--rdzv_id", "dogs",
        "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "twice.py", *line,
    ]  # fmt: skip
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    launchers = [
        subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    said = [launcher.communicate()[1] for launcher in launchers]
    return [launcher.wait() for launcher in launchers], said
