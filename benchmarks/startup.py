"""How long commands take from Enter: to their end, or to the end of the first step; and
until a terminal shows the first word.

`--help` and `models` import neither torch nor a plugin; their floors are Python itself
and Python with click imported. What the options of each plugin add to `--help` is shown
below them: at most 4 ms each. The floor of stage 2 of a LoRA on a toy is a minimal
script that imports torch, diffusers' transformer and peft, builds the same network and
makes one step; that of a stage 1 with nothing to do is Python with torch imported.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from subprocess import Popen

import click
from dstrain.models import write_toy
from dstrain.registry import load_family
from PIL import Image
from report import table

DSTRAIN = str(Path(sys.executable).with_name("dstrain"))
COMMANDS = {
    "python -c pass": (sys.executable, "-c", "pass"),
    "python -c 'import click'": (sys.executable, "-c", "import click"),
    "dstrain --help": (DSTRAIN, "--help"),
    "dstrain models": (DSTRAIN, "models"),
}
SIDE = 32
FIRST_STEP = """
import json, sys
import torch
from diffusers import QwenImageTransformer2DModel
from peft import LoraConfig, inject_adapter_in_model

with open(f"{sys.argv[1]}/model/transformer/config.json") as file:
    config = {k: v for k, v in json.load(file).items() if not k.startswith("_")}
network = QwenImageTransformer2DModel(**config).requires_grad_(False)
inject_adapter_in_model(LoraConfig(target_modules=["to_q", "to_k", "to_v"]), network)
trained = [one for one in network.parameters() if one.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4)
output = network(
    hidden_states=torch.randn(1, 4, config["in_channels"]),
    encoder_hidden_states=torch.randn(1, 8, config["joint_attention_dim"]),
    encoder_hidden_states_mask=torch.ones(1, 8),
    timestep=torch.tensor([0.5]),
    img_shapes=[[(1, 2, 2)]],
).sample
output.square().mean().backward()
optimizer.step()
"""
"""The minimal script."""
OPTIONS = """
import json, time
import click
from importlib.metadata import entry_points
from dstrain.config.options import GenerateConfig, TrainConfig
from dstrain.plugin import converted, nearest, option

taken = {}
for entry in entry_points(group="dstrain.options"):
    start = time.perf_counter()
    entry.load()
    taken[entry.name] = 1000 * (time.perf_counter() - start)
print(json.dumps(taken))
"""
"""Prints the milliseconds that each record of options takes to import."""


def milliseconds_of_options(runs: int) -> dict[str, float]:
    """Return the median time that the options of each plugin take to import."""
    command = (sys.executable, "-c", OPTIONS)
    done = [
        subprocess.run(command, check=True, capture_output=True) for _ in range(runs)
    ]
    found = [json.loads(one.stdout) for one in done]
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def seconds(command: tuple[str, ...]) -> float:
    """Seconds that one run of a command takes; raises CalledProcessError if it fails."""
    start = time.perf_counter()
    quiet = subprocess.DEVNULL
    subprocess.run(command, check=True, stdout=quiet, stderr=quiet)
    return time.perf_counter() - start


def seconds_of_silence(command: tuple[str, ...]) -> float:
    """Seconds until a command shows something on a terminal; it runs to its end."""
    import pty  # Windows has none

    controller, terminal = pty.openpty()
    start = time.perf_counter()
    with Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as child:
        os.close(terminal)
        os.read(controller, 1)
        taken = time.perf_counter() - start
        with suppress(OSError):  # a terminal that nobody uses any more cannot be read
            while os.read(controller, 65536):
                pass
    os.close(controller)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return taken


def write_project(folder: Path, rows: int) -> tuple[str, ...]:
    """Write a toy model and a dataset; return the flags of a run on them."""
    data = folder / "data"
    data.mkdir()
    lines = ["image,prompt"]
    for row in range(rows):
        color = (row % 256, row // 256 % 256, 0)
        Image.new("RGB", (SIDE, SIDE), color).save(data / f"{row}.png")
        lines.append(f"{row}.png,image {row % 100}")
    (data / "metadata.csv").write_text("\n".join(lines) + "\n")
    models = write_toy(load_family("qwen_image"), "base", folder / "model")
    return (
        *("--model", "qwen_image", "--lora_base_model", "dit"),
        *("--model_paths", json.dumps([one.path for one in models])),
        *("--tokenizer_path", str(folder / "model/tokenizer")),
        *("--dataset_base_path", str(data)),
        *("--dataset_metadata_path", str(data / "metadata.csv")),
        *("--feature_cache", str(folder / "cache")),
    )


def commands_of(folder: Path, rows: int) -> dict[str, tuple[str, ...]]:
    """Fill a feature cache; return the commands that import torch, each after its
    floor.
    """
    flags = (DSTRAIN, *write_project(folder, rows))
    stage_1 = (*flags, "--task", "sft:data_process")
    train = (*flags, "--task", "sft:train", "--output_path", str(folder / "out"))
    subprocess.run(stage_1, check=True)
    return {
        "python -c 'import torch'": (sys.executable, "-c", "import torch"),
        f"stage 1 of {rows:,} rows, nothing to do": stage_1,
        "minimal script, one step": (sys.executable, "-c", FIRST_STEP, str(folder)),
        "stage 2 of a LoRA, one step": (*train, "--max_steps", "1", "--overwrite"),
        "stage 2 of a LoRA, `--dry_run`": (*train, "--dry_run", "--overwrite"),
    }


@click.command(help=__doc__)
@click.option(
    "--runs", default=10, show_default=True, help="Runs of each command, taking turns."
)
@click.option("--rows", default=10_000, show_default=True, help="Rows of the dataset.")
@click.option("--small", is_flag=True, help="One run of each, on 4 rows.")
def main(runs: int, rows: int, small: bool) -> None:
    """Print a table."""
    if small:
        runs, rows = 1, 4
    with tempfile.TemporaryDirectory() as place:
        commands = {**COMMANDS, **commands_of(Path(place), rows)}
        taken: dict[str, list[float]] = {name: [] for name in commands}
        silence: dict[str, list[float]] = {
            name: []
            for name in commands
            # One that imports torch takes too long to be looked at twice.
            if name.startswith(("dstrain",) if small else ("dstrain", "stage"))
        }
        # Files are read once before.
        for run in range(0 if small else -1, runs):
            for name, command in commands.items():
                last = seconds(command)
                if run >= 0:
                    taken[name].append(last)
            for name, part in silence.items():
                last = seconds_of_silence(commands[name])
                if run >= 0:
                    part.append(last)
    lines = []
    floor: list[float] = []
    for name, part in taken.items():
        if not name.startswith(("dstrain", "stage")):
            floor = part
        pairs = list(zip(part, floor, strict=True))
        more = statistics.median(one - other for one, other in pairs)
        ratio = statistics.median(one / other for one, other in pairs)
        middle = statistics.median(part)
        figures = (f"{middle:.3f}", f"{min(part):.3f}", f"{more:.2f}", f"{ratio:.2f}")
        word = f"{statistics.median(silence[name]):.3f}" if name in silence else ""
        lines.append((name if "`" in name else f"`{name}`", *figures, word))
    head = ("command", "median, s", "least, s", "above its floor, s", "ratio")
    print(table((*head, "first word, s"), lines))
    options = milliseconds_of_options(runs).items()
    print()
    print(table(("options of", "import, ms"), [(k, f"{v:.1f}") for k, v in options]))


if __name__ == "__main__":
    main()
