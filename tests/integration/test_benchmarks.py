"""The benchmarks run at the least sizes, so that they are not found broken when a figure
is wanted.
"""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace

import pytest
from click.testing import CliRunner

from tests.support import everyday
from tests.support.forks import run_python

FOLDER = Path(__file__).parents[2] / "benchmarks"
ARGUMENTS = MappingProxyType(
    {
        "startup": ("--small",),
        "empty_step": ("--pairs", "1", "--block", "1"),
        "batches": ("--small", "--threads", "1"),
        "stage_1": ("--small",),
        "cache_reads": ("--small",),
        "cache_rows": ("--small",),
        "loading": ("--small",),
        "resume": ("--small",),
        "train_step": ("--pairs", "1", "--threads", "1"),
        "qwen_blocks": ("--tiny", "--layers", "3", "--swap", "2", "--side", "32"),
        "quantized_gate": (
            *("--full_steps", "1", "--lora_steps", "1"),
            *("--seeds", "1", "--each", "1", "--images", "8"),
        ),
        "masks": (
            *("--full_steps", "1", "--lora_steps", "1"),
            *("--seeds", "1", "--images", "8"),
        ),
        "prior": (
            *("--full_steps", "1", "--lora_steps", "1"),
            *("--seeds", "1", "--each", "1", "--images", "8"),
        ),
        "families": (
            *("z_image", "--full_steps", "1", "--lora_steps", "1"),
            *("--vae_steps", "2", "--seeds", "1", "--each", "1", "--images", "8"),
        ),
        "guidance": (
            *("--steps", "1", "--seeds", "1", "--each", "1", "--images", "8"),
        ),
    }
)
SMALLER = MappingProxyType(
    {
        "masks": {"CASES": {"masked": {"dataset": "spoiled", "mask_column": "kept"}}},
        "train_step": {"ROWS": 8},
        "quantized_gate": {"METHODS": {"nf4": "dit:bitsandbytes_nf4"}},
        "on_digits": {"INFERENCE_STEPS": 1},
        "prior": {"CASES": {"with images of the old one": 0.5}},
        "guidance": {"SCALES": (1.0, 2.0), "DROPOUTS": {"dropout": 0.5}},
    }
)
"""Constants of a script that no flag changes."""
LONG = frozenset(
    {
        "batches",
        "families",
        "guidance",
        "masks",
        "prior",
        "quantized_gate",
        "train_step",
    }
)
"""Scripts that train for seconds even so; they are left to `make everything`."""
STARTS_PROCESSES = ("cache_rows", "loading", "startup")
"""Scripts whose figures are of processes of their own. Here the figures do not count, so
the processes are forks, which need not import torch again.
"""
WITHOUT = frozenset(
    {"distill", "empty_family", "on_digits", "report", "small_vae", "workload"}
)
"""`distill` needs what `make demo` trains; the others are parts."""


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let scripts import each other, as when they are run."""
    before = {*sys.modules}
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in {*sys.modules} - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent in (
            FOLDER,
            FOLDER.parent / "demo",
        ):
            del sys.modules[name]


def imported(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.parametrize(
    "name", everyday.cases(sorted(ARGUMENTS), lambda name: name not in LONG)
)
def test_a_benchmark_prints_its_table(
    name: str, scripts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = imported(name)
    for module in {name, *WITHOUT} & {*sys.modules}:
        for constant, value in SMALLER.get(module, {}).items():
            monkeypatch.setattr(sys.modules[module], constant, value)
    if name in STARTS_PROCESSES:
        forks = SimpleNamespace(run=run_python, DEVNULL=subprocess.DEVNULL)
        monkeypatch.setattr(script, "subprocess", forks)
    done = CliRunner().invoke(script.main, ARGUMENTS[name], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    table = [line for line in done.output.splitlines() if line.startswith("| ")]
    tables = sum(line.startswith("| ---") for line in table)
    assert len(table) >= 3 and len({line.count("|") for line in table}) <= tables


def test_every_benchmark_is_run_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*ARGUMENTS} | WITHOUT
