"""One dataset in each of the forms in which people have datasets."""

import csv
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from dstrain.cache import FeatureCache

from tests.support.family import write_data
from tests.support.runs import outcome, project, train

FORMS = ("captions", "imagefolder csv", "imagefolder jsonl")
"""Those that core reads."""
OTHERS = ("parquet", "saved")
"""Those of the plugin datasets."""
Rows = Sequence[tuple[str, str]]
"""Names of images in a folder, and captions."""


def rows_in(folder: Path) -> Rows:
    """The rows of a dataset that `family.write_data` wrote."""
    rows = json.loads((folder / "metadata.json").read_text())
    return [(row["image"], row["prompt"]) for row in rows]


def write_form(form: str, source: Path, rows: Rows, folder: Path) -> None:
    """Write rows whose images are in a folder as a dataset of a form in another one."""
    folder.mkdir(parents=True)
    if form in ("parquet", "saved"):
        write = write_parquet if form == "parquet" else write_saved
        write(folder, embedded(source, rows))
        return
    for name, _ in rows:
        shutil.copy(source / name, folder / name)
    if form == "captions":
        for name, caption in rows:
            (folder / name).with_suffix(".txt").write_text(caption + "\n")
    elif form == "imagefolder csv":
        with (folder / "metadata.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("file_name", "text"), *rows])
    else:
        lines = [
            # As it is: an escape might spell a secret, for which rows are read.
            json.dumps({"file_name": name, "text": text}, ensure_ascii=False)
            for name, text in rows
        ]
        (folder / "metadata.jsonl").write_text("\n".join(lines))


def embedded(source: Path, rows: Rows) -> Any:
    """The rows as a table with the bytes of their images, as `datasets` has them."""
    images = [{"bytes": (source / name).read_bytes(), "path": name} for name, _ in rows]
    return pa.table({"image": images, "text": [caption for _, caption in rows]})


def write_parquet(folder: Path, table: Any) -> None:
    """Write a table as hubs have it: in parts below `data`."""
    (folder / "data").mkdir()
    part = folder / "data/train-0000{}-of-00002.parquet"
    pq.write_table(table.slice(0, 2), str(part).format(0))
    pq.write_table(table.slice(2), str(part).format(1))


def write_saved(folder: Path, table: Any) -> None:
    """Write a table as `save_to_disk` of `datasets` does."""
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table.slice(0, 3), table.slice(3)), strict=True):
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


CAPTIONS = ("dog", "two dogs\non a bridge", "cat", "a, b", "ünï 猫")
STEPS = {"max_steps": 6, "seed": 3}


def project_of_forms(folder: Path, forms: Sequence[str]) -> Path:
    """A project with the same dataset in each of these forms, and in `data`."""
    project(folder)
    shutil.rmtree(folder / "data")
    write_data(folder / "data", CAPTIONS, ((16, 16), (16, 24)))
    for form in forms:
        write_form(form, folder / "data", rows_in(folder / "data"), folder / form)
    return folder


def unsplit_and_split(here: Path, data: Path) -> dict[str, Any]:
    """Train on a dataset unsplit and split; return what both leave, and the plan."""
    base = here / f"{data.name} runs"
    whole = train(here, dataset_base_path=data, output_path=base / "whole", **STEPS)
    stages = {"dataset_base_path": data, "feature_cache": base / "cache", **STEPS}
    train(here, task="sft:data_process", **stages)
    split = train(here, task="sft:train", output_path=base / "split", **stages)
    ((_, plan),) = FeatureCache.open(base / "cache").plans()
    cache = FeatureCache.open(base / "cache")
    rows = [
        {name: row[name] for name in ("row", "chunk", "values", "group")}
        for (path, _) in cache.plans()
        for row in cache.plan_rows(path)
    ]
    return {
        "whole": outcome(whole),
        "split": outcome(split),
        "rows": rows,
        "identity": plan["identity"],
    }
