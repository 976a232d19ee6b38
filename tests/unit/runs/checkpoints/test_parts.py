"""The other processes give their rows in the order in which the main process writes:
each would wait for ever for one that is at another tensor.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from dstrain.lora import lora_state
from dstrain.runs.checkpoints import parts, state
from dstrain.runs.checkpoints.outputs import RunDirectory
from torch import Tensor

from tests.support.runs import config, project, training_run

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


@pytest.mark.parametrize(
    "flags",
    [{}, {"trainable_models": "dit"}, {"trainable_models": "dit", "ema_decay": 0.5}],
    ids=["LoRA", "in full", "average"],
)
def test_rows_are_given_in_the_order_of_writing(
    here: Path, tmp_path: Path, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = training_run(config(here, output_path=tmp_path / "out", **flags))
    directory = RunDirectory(run.setup, run.processes)
    written: list[set[str]] = []
    given: list[set[str]] = []
    write = state.write_tensors

    def noting(
        path: Path, tensors: Mapping[str, Tensor], *rest: Any, **more: Any
    ) -> None:
        written.append({*tensors})
        write(path, tensors, *rest, **more)

    def noting_lora(network: Any) -> dict[str, Tensor]:
        found = lora_state(network)
        given.append({f"dit.{name}" for name in found})
        return found

    monkeypatch.setattr(state, "write_tensors", noting)
    monkeypatch.setattr("dstrain.lora.writer.write_tensors", noting)
    for module in (parts, state):
        monkeypatch.setattr(
            module, "take_part", lambda tensors: given.append({*tensors})
        )
    monkeypatch.setattr(parts, "lora_state", noting_lora)
    directory.processes.wait()
    with directory.opened():
        directory.start(run)
        directory.save(run, "step-0")
    parts.take_part_in_save(run, {})
    if not flags:
        assert len(given[0]) == len(written[0]) > 0
        given, written = given[1:], written[1:]
    # Without an average, nothing is given of one.
    assert [one for one in given if one] == [one for one in written if one]
