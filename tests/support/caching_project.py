"""What tests of the feature cache do with the family `stored`: datasets, both stages,
several processes, values.
"""

import csv
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dstrain import SFT, Frames, ModelConfig, Task, Trainables, TrainConfig
from dstrain.cache import FeatureCache
from dstrain.distributed import ProcessGroup
from dstrain.registry import load_extensions
from dstrain.runs import Setup, data_process
from dstrain.runs.feature_plan import open_plan
from dstrain.storage import hash_json
from dstrain.training import CachedSamples
from PIL import Image
from torch import Tensor

from tests.support import caching_family
from tests.support.caching_family import MODEL, build, runs, write_model


def address(name: str) -> str:
    """The address of a value that a test names."""
    return hash_json("test", name)


def noise_image(seed: int, mode: str = "RGB", branch: int = 32) -> Image.Image:
    shape = (branch, branch, len(mode)) if len(mode) > 1 else (branch, branch)
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    )


def write_rows(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write metadata.csv; lists are written as JSON."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / "metadata.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(
            {k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()}
            for row in rows
        )


@dataclass
class Place:
    """A dataset, a model and a feature cache in one folder."""

    folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def shards(self) -> list[Path]:
        return sorted((self.cache / "shards").iterdir())

    @property
    def plans(self) -> list[Path]:
        return sorted((self.cache / "plans").glob("*.json"))

    @property
    def columns(self) -> list[Path]:
        return sorted((self.cache / "plans").glob("*.arrow"))

    def setup(
        self,
        stage: str = "data_process",
        task: Task = SFT,
        variant: str = "base",
        **config: Any,
    ) -> Setup:
        given = {"dataset_base_path": self.data, "feature_cache": self.cache, **config}
        settings = TrainConfig(model="stored", task=f"{task.name}:{stage}", **given)
        files = [
            self.folder / f"model/{name}/model.safetensors"
            for name in ("text_encoder", "vae")
        ]
        models = (
            *(ModelConfig(path=str(path)) for path in files),
            ModelConfig(path=str(self.folder / "model/tokenizer")),
            ModelConfig(
                model_id="Stored/Stored", origin_file_pattern="dit/*.safetensors"
            ),  # not there
        )
        return Setup(
            settings,
            MODEL,
            build(variant),
            task,
            stage,
            Trainables(("dit",)),
            torch.device("cpu"),
            models,
            load_extensions(),
        )

    def fill(
        self, task: Task = SFT, variant: str = "base", **config: Any
    ) -> Counter[str]:
        """Run stage 1; returns how often each unit ran."""
        data_process(self.setup("data_process", task, variant, **config), alone())
        return runs()

    def stored(
        self, task: Task = SFT, variant: str = "base", **config: Any
    ) -> CachedSamples:
        """Open the cache as stage 2 does."""
        setup = self.setup("train", task, variant, **config)
        store = FeatureCache.open(setup.cache_path)
        return open_plan(setup, store)[0]

    def values(
        self, task: Task = SFT, variant: str = "base", **config: Any
    ) -> list[dict[str, Any]]:
        """The values of every row as stage 2 reads them, in a form that can be
        compared.
        """
        rows = self.stored(task, variant, **config)
        return [plain(rows.sample(row).values) for row in range(len(rows.rows))]


def write_place(folder: Path, rows: int = 4) -> Place:
    """Write a model and a dataset of `rows` rows, of which the last two have one
    prompt.
    """
    place = Place(folder)
    place.data.mkdir(parents=True)
    write_model(folder / "model")
    for i in range(rows):
        noise_image(i).save(place.data / f"{i}.png")
        place.rows.append({"image": f"{i}.png", "prompt": f"word {min(i, rows - 2)}"})
    write_rows(place.data, place.rows)
    return place


def log_units(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Note the runs of units in a log of this folder; models are nowhere else."""
    patch.setattr(caching_family, "LOG", folder / "log")
    patch.setenv("DSTRAIN_MODEL_BASE_PATH", str(folder / "nothing"))
    caching_family.LOG.touch()


@contextmanager
def filled_place(folder: Path) -> Iterator[Place]:
    """Yield a place whose rows have every kind of value, cached."""
    with pytest.MonkeyPatch.context() as patch:
        log_units(patch, folder)
        place = write_place(folder / "place")
        for row in place.rows:
            row |= {
                "reference": "0.png",
                "references": ["1.png", "2.png"],
                "label": "x",
            }
        write_rows(place.data, place.rows)
        place.fill()
        yield place


def change_keeping_times(path: Path, change: Callable[[], Any]) -> None:
    """Change a file, and give it back its time of modification."""
    before = path.stat()
    change()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def change_weights(name: str, place: Place) -> None:
    """Change every weight of a component a little."""
    path = place.folder / f"model/{name}/model.safetensors"
    content = bytearray(path.read_bytes())
    for i in range(8 + int.from_bytes(content[:8], "little"), len(content), 4):
        content[i] ^= 1
    change_keeping_times(path, lambda: path.write_bytes(content))


def plain(value: Any) -> Any:
    """A value as something that == compares exactly: type, dtype, shape and bytes."""
    if isinstance(value, Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, Image.Image):
        return (value.mode, value.size, value.tobytes())
    if isinstance(value, Frames):
        return ("frames", value.fps, plain(value.pixels))
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return (type(value).__name__, value)


def processes(
    rank: int,
    size: int,
    wait: Callable[[], Any],
    reduce: Callable[..., Any] | None = None,
) -> ProcessGroup:
    """A process of several, which meet at `wait`."""
    return ProcessGroup(
        SimpleNamespace(
            process_index=rank,
            num_processes=size,
            wait_for_everyone=wait,
            reduce=reduce,
            device="cpu",
        )
    )


def alone() -> ProcessGroup:
    return processes(0, 1, lambda: None)


def together(
    size: int,
    work: Callable[[ProcessGroup], None],
    late: Callable[[int], None] = lambda rank: None,
) -> None:
    """Do the work of several processes in threads; `late` is called with its rank when
    one leaves a barrier.
    """
    barrier = threading.Barrier(size)
    errors: list[BaseException] = []
    parts: dict[int, Tensor] = {}

    def one(rank: int) -> None:
        def reduce(value: Tensor, reduction: str) -> Tensor:
            parts[rank] = value
            barrier.wait()
            total = torch.stack(list(parts.values())).sum(dim=0)
            barrier.wait()
            return total

        def wait() -> None:
            barrier.wait()
            late(rank)

        try:
            work(processes(rank, size, wait, reduce))
        except BaseException as error:  # shown by the test's own thread
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
