"""What a feature cache costs by its rows: repeat of stage 1, start of stage 2, `--dry_run` of
both, and samples read in the order of training, at 1 k, 10 k, 100 k and 1 M rows.

Samples of 5 kB with two values, one of them shared by ten rows; small images. The values
and the plan are written as stage 1 writes them, without encoding. Each figure is of a
process of its own: seconds, and the peak of its RAM above that of the same imports. The
floor is the least number of rows: what does not grow is flat.
"""

import csv
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import empty_family
from accelerate import Accelerator
from dstrain import TrainConfig
from dstrain.cache import FeatureCache, ShardWriter, stored_plans
from dstrain.cache.backend.plan_files import write_plan
from dstrain.distributed import ProcessGroup
from dstrain.plugin import Column
from dstrain.runs import data_process, open_training_data
from dstrain.runs.dry_run.summary import plan_run
from dstrain.runs.resolve import resolve
from dstrain.storage import file_mark, sha256
from dstrain.storage.file_memory import SETTLED
from dstrain.training import Order
from PIL import Image
from report import curves, table

ROWS = (1_000, 10_000, 100_000, 1_000_000)
SHARED = 10
"""Rows that have one prompt."""
ENCODED = 8
"""Rows whose values are encoded: the others have copies of these."""
IN_FOLDER = 1_000
STEPS = 500
LIMIT_MB = 700
"""The most RAM above imports that is promised."""
HEAD = ("rows", "what", "seconds", "peak RAM above imports, MB")


def encode_picture(image: Image.Image) -> empty_family.Latents:
    """Numbers that depend on the size of the image."""
    return empty_family.encode_image(str(image.size))


PIPELINES = {
    "base": replace(
        empty_family.PIPELINES["base"],
        units=(empty_family.encode_prompt, encode_picture),
        inputs={
            "prompt": Column("prompt"),
            "image": Column("image", "image", multiple=8),
        },
    )
}
RECORD = replace(empty_family.RECORD, name="rows", pipelines="cache_rows:PIPELINES")


def config_of(folder: Path, stage: str) -> TrainConfig:
    """Return the run of a stage."""
    return TrainConfig(
        model="rows",
        task=f"sft:{stage}",
        model_paths=json.dumps([str(folder / "dit/model.safetensors")]),
        dataset_base_path=folder / "data",
        feature_cache=folder / "features",
        output_path=folder / "out",
        trainable_models="dit",
    )


def install(folder: Path) -> None:
    """Offer the family as an installed plugin would be, and write its denoiser."""
    empty_family.install(folder)
    (folder / "plugin_empty-0.dist-info/entry_points.txt").write_text(
        "[dstrain.models]\nrows = cache_rows:RECORD\n"
    )


def alone() -> ProcessGroup:
    """Return the only process."""
    return ProcessGroup(Accelerator(mixed_precision="no", cpu=True))


def write_data(folder: Path, rows: int) -> None:
    """Write the images, and the metadata of the first of them."""
    data = folder / "data"
    data.mkdir()
    Image.effect_noise((16, 16), 30).convert("RGB").save(data / "one.png")
    content = (data / "one.png").read_bytes()
    for row in range(rows):
        path = data / name_of(row)
        if row % IN_FOLDER == 0:
            path.parent.mkdir()
        path.write_bytes(content)
    write_metadata(data, min(rows, ENCODED))
    # What was written just now might change again without another time.
    time.sleep(SETTLED / 1e9 + 0.1)


def write_metadata(data: Path, rows: int) -> None:
    """Write the metadata of the first rows."""
    with (data / "metadata.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("image", "prompt"))
        writer.writerows((name_of(row), prompt_of(row)) for row in range(rows))


def name_of(row: int) -> str:
    """Return the name of a row's image."""
    return f"{row // IN_FOLDER}/{row}.png"


def prompt_of(row: int) -> str:
    """Return the prompt of a row."""
    return f"a caption of some length, and its number: {row // SHARED}"


def fill(folder: Path, rows: int) -> None:
    """Fill the cache with the values of the first rows, then with copies of these."""
    data_process(resolve(config_of(folder, "data_process")), alone())
    (plan,) = stored_plans(folder / "features")
    record = plan.record
    first = plan.samples()[0]
    cache = FeatureCache.open(folder / "features")
    values = {
        name: cache.read(form["at"])
        for name, form in first["values"].items()
        if "at" in form
    }
    writer = ShardWriter(cache, record["about"]["versions"])
    for row in range(rows):
        for name, value in values.items():
            writer.add(address(name, row), value)
    writer.flush()
    cache.write_index()
    data = folder / "data"
    write_metadata(data, rows)
    dataset = {
        **record["about"]["dataset"],
        "rows": rows,
        "sha256": sha256(data / "metadata.csv"),
    }
    about = {**record["about"], "dataset": dataset}
    digest = sha256(data / name_of(0))

    def lines() -> Iterator[Mapping[str, Any]]:
        for row in range(rows):
            place = name_of(row)
            yield {
                **first,
                "row": row,
                "line": row + 2,
                "values": {
                    name: {"at": address(name, row)} if "at" in form else form
                    for name, form in first["values"].items()
                },
                "files": [(place, [*file_mark(data / place), digest])],
                "frame folders": (),
            }

    write_plan(cache.folder, record["identity"], about, lines())


def address(name: str, row: int) -> str:
    """Return an address: that of a prompt is shared."""
    number = row // SHARED if "prompt" in name else row
    return hashlib.blake2b(f"{name} {number}".encode(), digest_size=20).hexdigest()


def repeat(folder: Path) -> float:
    """Run stage 1 again."""
    processes = alone()
    since = time.perf_counter()
    data_process(resolve(config_of(folder, "data_process")), processes)
    return time.perf_counter() - since


def dry_run(folder: Path) -> float:
    """Say what stage 1 would do."""
    since = time.perf_counter()
    plan_run(resolve(config_of(folder, "data_process"))).page()
    return time.perf_counter() - since


def start(folder: Path) -> float:
    """Open the samples of stage 2."""
    since = time.perf_counter()
    open_training_data(resolve(config_of(folder, "train")))
    return time.perf_counter() - since


def dry_run_of_training(folder: Path) -> float:
    """Say what stage 2 would do."""
    since = time.perf_counter()
    plan_run(resolve(config_of(folder, "train"))).page()
    return time.perf_counter() - since


def first_samples(folder: Path) -> float:
    """Read the first samples in the order of training, and verify the shards."""
    first, _ = sample_times(folder)
    return first


def sample(folder: Path) -> float:
    """Read the samples after these; the time of one."""
    _, others = sample_times(folder)
    return others / STEPS


def sample_times(folder: Path) -> tuple[float, float]:
    """Return the seconds of STEPS samples, in the order of training, and of as many
    after them.
    """
    data = open_training_data(resolve(config_of(folder, "train")))
    order = Order(data.groups, 2 * STEPS, 1, 0, data.sample_ids)
    keys = [key for (key,) in islice(order.global_batches(0), 2 * STEPS)]
    seconds = []
    for part in (keys[:STEPS], keys[STEPS:]):
        since = time.perf_counter()
        for key in part:
            data.source.sample(key.row, key.chunk)
        seconds.append(time.perf_counter() - since)
    return seconds[0], seconds[1]


MEASURED: Mapping[str, Callable[[Path], float]] = MappingProxyType(
    {
        "repeat of stage 1": repeat,
        "`--dry_run` of stage 1": dry_run,
        "start of stage 2": start,
        "`--dry_run` of stage 2": dry_run_of_training,
        f"first {STEPS} samples": first_samples,
        "a sample after these": sample,
    }
)


def peak() -> float:
    """Return the most RAM that this process had, MB."""
    status = Path("/proc/self/status").read_text()
    return float(status.partition("VmHWM:")[2].split()[0]) / 1e3


def measured(what: str, folder: Path) -> tuple[float, float]:
    """Measure one thing in a process of its own; return seconds and MB."""
    command = [sys.executable, __file__, "--measure", what, "--folder", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, megabytes = json.loads(done.stdout.splitlines()[-1])
    return seconds, megabytes


def show(rows: int) -> Iterator[tuple[str, ...]]:
    """Yield a line of the table for each thing that is measured."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        install(folder)
        write_data(folder, rows)
        fill(folder, rows)
        for what in MEASURED:
            seconds, megabytes = measured(what, folder)
            yield f"{rows:,}", what, f"{seconds:.3g}", f"{megabytes:.0f}"
        sys.path.remove(name)


@click.command(help=__doc__)
@click.option("--rows", multiple=True, type=int, help="In place of these numbers.")
@click.option("--small", is_flag=True, help="20 rows.")
@click.option("--curve", type=Path, help="Write an SVG image of RAM over rows there.")
@click.option("--measure", type=click.Choice(list(MEASURED)), hidden=True)
@click.option("--folder", type=Path, hidden=True)
def main(
    rows: tuple[int, ...],
    small: bool,
    curve: Path | None,
    measure: str | None,
    folder: Path | None,
) -> None:
    """Print a table."""
    if measure is not None and folder is not None:
        sys.path.append(str(folder))
        before = peak()
        seconds = MEASURED[measure](folder)
        print(json.dumps([seconds, peak() - before]))
        return
    lines = []
    for count in (20,) if small else rows or ROWS:
        lines += show(count)
    print(table(HEAD, lines))
    if curve is not None:
        write_curve(curve, lines)


def write_curve(path: Path, lines: Sequence[tuple[str, ...]]) -> None:
    """Draw the last column of the table over its first one."""
    points: dict[str, list[tuple[float, float]]] = {}
    for count, what, _, megabytes in lines:
        of_what = points.setdefault(what.replace("`", ""), [])
        of_what.append((float(count.replace(",", "")), float(megabytes)))
    title = "peak RAM above imports, MB, by rows of the feature cache"
    path.write_text(curves(title, points, LIMIT_MB))


if __name__ == "__main__":
    main()
