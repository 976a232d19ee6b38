"""One dataset in each of the forms in which people have datasets."""

import csv
import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dstrain.cache import stored_plans

from tests.support.family import write_data
from tests.support.runs import outcome, project, same, train

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


@cache
def unsplit_and_split(here: Path, form: str) -> dict[str, Any]:
    """Train on a dataset unsplit and split; return what both leave, and the plan."""
    data, base = here / form, here / f"{form} runs"
    whole = train(here, dataset_base_path=data, output_path=base / "whole", **STEPS)
    stages = {"dataset_base_path": data, "feature_cache": base / "cache", **STEPS}
    train(here, task="sft:data_process", **stages)
    split = train(here, task="sft:train", output_path=base / "split", **stages)
    (plan,) = stored_plans(base / "cache")
    rows = [
        {name: row[name] for name in ("row", "chunk", "values", "group")}
        for row in plan.samples()
    ]
    return {
        "whole": outcome(whole),
        "split": outcome(split),
        "rows": rows,
        "identity": plan.identity,
    }


class FormsInRuns:
    """What holds for a dataset in each form that a subclass names, in the project `here`."""

    forms: tuple[str, ...]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give tests that ask for a form each of them."""
        if "form" in metafunc.fixturenames:
            metafunc.parametrize("form", self.forms)

    def test_every_form_gives_the_values_and_the_training_of_metadata_json(
        self, here: Path, form: str
    ) -> None:
        wanted, found = unsplit_and_split(here, "data"), unsplit_and_split(here, form)
        assert found["rows"] == wanted["rows"]
        assert found["identity"] == wanted["identity"]
        assert same(found["whole"], wanted["whole"])
        assert same(found["split"], wanted["split"])

    def test_stage_1_computes_nothing_for_another_form_of_a_cached_dataset(
        self, here: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cache = {"feature_cache": here / "shared", "task": "sft:data_process"}
        train(here, dataset_base_path=here / "data", **cache)
        for form in self.forms:
            capsys.readouterr()
            train(here, dataset_base_path=here / form, **cache)
            assert "precomputing 0 of 5" in capsys.readouterr().err

    def test_stage_1_with_nothing_to_do_reads_no_row(
        self,
        here: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        form: str,
    ) -> None:
        # As if all had been written long ago.
        monkeypatch.setattr("dstrain.storage.file_memory.SETTLED", -(10**18))
        monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "user"))
        given = {"dataset_base_path": here / form, "feature_cache": tmp_path / "cache"}
        train(here, task="sft:data_process", **given)
        capsys.readouterr()

        def refuse(*_: Any) -> None:
            raise AssertionError("rows are read")

        monkeypatch.setattr("dstrain.runs.setup.open_dataset", refuse)
        for secret in (False, True):
            if secret:
                monkeypatch.setenv("SOME_TOKEN", "hf_abcdefghijklmnopqrst")
            train(here, task="sft:data_process", **given)
            again = capsys.readouterr().err.splitlines()
            assert any("precomputing 0 of 5" in line for line in again)

    def test_a_second_dataset_may_have_another_form(
        self, here: Path, tmp_path: Path
    ) -> None:
        losses = []
        for form in ("data", self.forms[0]):
            out = train(
                here,
                output_path=tmp_path / form,
                max_steps=2,
                validation_steps=1,
                validation_dataset_base_path=here / form,
            )
            losses.append((out / "logs/validation.csv").read_text())
        assert losses[0] == losses[1]
