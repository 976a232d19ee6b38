"""Make the files of this folder: what runs of a revision leave that later ones must read.

`python make.py DSTRAIN`, where DSTRAIN is the command of that revision, makes data/ and a
folder for each family, with what these commands leave:

    dstrain --config FAMILY/run.toml --output_path whole
    dstrain --config FAMILY/run.toml --output_path stopped     # SIGTERM after a step
    dstrain --config FAMILY/full.toml --output_path full

`whole` is kept as its last LoRA file and its logs/config.json, `full` as its weights.
Those here are of revision 95fad56d, version 0.1.0. For the next set, copy this file and
the toml files to a new folder.
"""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import av
import numpy as np
from PIL import Image

HERE = Path(__file__).parent
FAMILIES = ("flux", "qwen_image", "wan")
STEPS = 8


def write_data(folder: Path) -> None:
    """Write three rows, each with an image and a video."""
    folder.mkdir()
    rows = ["image,video,prompt"]
    for number in range(3):
        colors = np.random.default_rng(number).integers(0, 256, (5, 2, 3, 3), np.uint8)
        frames = colors.repeat(16, axis=1).repeat(16, axis=2)
        Image.fromarray(frames[0]).save(folder / f"{number}.png")
        with av.open(str(folder / f"{number}.mp4"), "w") as file:
            stream = file.add_stream("libx264", rate=16)
            stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
            for frame in frames:
                file.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
            file.mux(stream.encode())
        rows.append(f"{number}.png,{number}.mp4,dog {number}")
    (folder / "metadata.csv").write_text("\n".join(rows) + "\n")


def stopped(command: list[str]) -> bool:
    """Run a command, ask it to end once it has taken a step, and return whether it was
    stopped in the middle.
    """
    table = HERE / "stopped/logs/loss.csv"
    running = subprocess.Popen(command, cwd=HERE)
    while running.poll() is None:
        if table.exists() and len(table.read_text().splitlines()) > 1:
            running.send_signal(signal.SIGTERM)
            break
        time.sleep(0.001)
    running.wait()
    return len(table.read_text().splitlines()) <= STEPS


def main() -> None:
    shutil.rmtree(HERE / "data", ignore_errors=True)
    write_data(HERE / "data")
    for family in FAMILIES:
        place = HERE / family
        shutil.rmtree(place / "stopped", ignore_errors=True)
        run, full = (
            [sys.argv[1], "--config", f"{family}/{name}.toml", "--output_path"]
            for name in ("run", "full")
        )
        subprocess.run([*run, "whole"], cwd=HERE, check=True)
        subprocess.run([*full, "full"], cwd=HERE, check=True)
        while not stopped([*run, "stopped"]):
            shutil.rmtree(HERE / "stopped")
        last = f"step-{STEPS}.safetensors"
        (HERE / "whole" / last).rename(place / "lora.safetensors")
        (HERE / "whole/logs/config.json").rename(place / "config.json")
        (HERE / "full" / last).rename(place / "weights.safetensors")
        (HERE / "stopped").rename(place / "stopped")
        shutil.rmtree(HERE / "whole")
        shutil.rmtree(HERE / "full")


if __name__ == "__main__":
    main()
