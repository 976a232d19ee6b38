"""A state comes back bit for bit, whole at every crash point, and damage is noticed."""

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import StateError, SystemFault
from dstrain.runs.checkpoints import state as checkpoint
from dstrain.runs.checkpoints.state import (
    TrainingState,
    load_state,
    newest_state,
    prune_states,
    save_full,
    save_state,
)
from dstrain.storage import CHECKSUM, read_tensors
from safetensors import safe_open
from torch import Tensor, nn

STEPS = {
    "adamw": {},
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "amsgrad": {"amsgrad": True},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.late = nn.Parameter(torch.ones(4))
        self.low = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def forward(self, x: Tensor, late: bool) -> Tensor:
        y = self.second(self.first(x).tanh()) + self.low.float()
        return (y * self.late if late else y).pow(2).mean()


class Run:
    """A small run: two groups of parameters, one parameter that has no gradient before
    step 4.
    """

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = Net()
        second = [*self.net.second.parameters(), self.net.low]
        groups = [
            {"params": [*self.net.first.parameters(), self.net.late]},
            {"params": second, "lr": 3e-3},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=1e-2, betas=(0.8, 0.95), **options
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.step = 0

    def go(self, until: int) -> "Run":
        for step in range(self.step, until):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            self.net(x, late=step >= 4).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        self.step = until
        return self

    def state(self) -> TrainingState:
        return TrainingState(
            self.step,
            dict(self.net.named_parameters()), self.optimizer.state_dict(),
            {**self.scheduler.state_dict(), "by size": {64: (1, 2)}}, "digest", {"torch": "2"},
        )  # fmt: skip

    def restore(self, state: TrainingState) -> "Run":
        with torch.no_grad():
            for name, parameter in self.net.named_parameters():
                parameter.copy_(state.trainable[name])
        self.optimizer.load_state_dict(dict(state.optimizer))
        self.scheduler.load_state_dict(dict(state.scheduler))
        self.step = state.step
        return self


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal bit for bit, types included."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return (
            isinstance(b, dict)
            and list(a) == list(b)
            and all(same(a[key], b[key]) for key in a)
        )
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def same_state(a: TrainingState, b: TrainingState) -> bool:
    ours, theirs = dict(vars(a)), dict(vars(b))
    return same(
        dict(sorted(ours.pop("trainable").items())),
        dict(sorted(theirs.pop("trainable").items())),
    ) and same(ours, theirs)


def small(step: int) -> TrainingState:
    return TrainingState(
        step, {"w": torch.full((3,), float(step))}, {"state": {}}, {}, "d", {}
    )


@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("step", [0, 3, 6])
def test_a_restored_run_resumes_bit_for_bit(
    tmp_path: Path, options: dict[str, Any], step: int
) -> None:
    whole = Run(**options).go(8)
    half = Run(**options).go(step)
    save_state(tmp_path / "s", half.state())
    other = Run(**options).restore(load_state(tmp_path / "s")).go(8)
    assert same_state(whole.state(), other.state())


def test_a_state_comes_back_as_it_was_types_included(tmp_path: Path) -> None:
    state = Run().go(3).state()
    assert sorted(state.optimizer["state"]) == [
        0,
        1,
        3,
        4,
        5,
    ]  # 2, `late`, has none yet
    save_state(tmp_path / "s", state)
    back = load_state(tmp_path / "s")
    assert same_state(state, back)
    assert back.optimizer["param_groups"][0]["betas"] == (0.8, 0.95)
    assert back.scheduler["by size"] == {64: (1, 2)}


def test_odd_numbers_survive(tmp_path: Path) -> None:
    numbers = {
        "a": 0.1 + 0.2,
        "b": float("inf"),
        "c": -0.0,
        "d": 2**70,
        "e": 5e-324,
        "f": torch.tensor(float("nan")),
    }
    save_state(tmp_path / "s", replace(small(1), optimizer=numbers))
    back = load_state(tmp_path / "s").optimizer
    assert [repr(value) for value in back.values()] == [
        repr(value) for value in numbers.values()
    ]


def test_equal_states_give_equal_bytes(tmp_path: Path) -> None:
    for name in "ab":
        save_state(tmp_path / name, Run().go(3).state())
    for name in (*checkpoint.FILES, checkpoint.RECORD):
        assert (tmp_path / "a" / name).read_bytes() == (
            tmp_path / "b" / name
        ).read_bytes()


@pytest.mark.parametrize("value", [{1, 2}, object(), {(1, 2): 3}, {None: 1}])
def test_what_cannot_be_kept_is_refused_by_place(tmp_path: Path, value: Any) -> None:
    with pytest.raises(StateError, match="optimizer/deep"):
        save_state(tmp_path / "s", replace(small(1), optimizer={"deep": value}))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_pickled(tmp_path: Path) -> None:
    save_state(tmp_path / "s", Run().go(3).state())
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == sorted(
        [*checkpoint.FILES, checkpoint.RECORD]
    )


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    save_state(tmp_path / "s", small(1))
    assert checkpoint.damage(tmp_path / "s") == ""
    places = [
        (path, byte)
        for path in sorted((tmp_path / "s").iterdir())
        for byte in range(path.stat().st_size)
    ]
    for path, byte in [
        p for p in places if p[0].name == checkpoint.RECORD
    ] + random.Random(1).sample(places, 200):
        good = path.read_bytes()
        bad = bytearray(good)
        bad[byte] ^= 1 << byte % 8
        path.write_bytes(bad)
        assert checkpoint.damage(tmp_path / "s"), (path.name, byte)
        path.write_bytes(good)
    assert checkpoint.damage(tmp_path / "s") == ""


@pytest.mark.parametrize("name", [*checkpoint.FILES, checkpoint.RECORD])
@pytest.mark.parametrize(
    "how", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])]
)
def test_a_missing_or_short_file_is_a_state_error_naming_it(
    tmp_path: Path, name: str, how: Callable[[Path], Any]
) -> None:
    save_state(tmp_path / "s", small(1))
    record = tmp_path / "s" / name
    how(record)
    if name == checkpoint.RECORD and record.exists():
        record.write_bytes(
            record.read_bytes()[:-1]
        )  # the first byte cut was the newline
    with pytest.raises(StateError, match=name):
        load_state(tmp_path / "s")


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    save_state(tmp_path / "s", small(1))
    record = json.loads((tmp_path / "s" / checkpoint.RECORD).read_text())
    (tmp_path / "s" / checkpoint.RECORD).write_text(json.dumps(record | {"version": 2}))
    with pytest.raises(StateError, match="'version': 2"):
        load_state(tmp_path / "s")


def test_the_newest_whole_state_is_found_and_those_passed_over_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (9, 10, 100):
        save_state(tmp_path / f"states/step-{step}", small(step))
    assert newest_state(tmp_path) == tmp_path / "states/step-100"
    assert capsys.readouterr().err == ""
    (tmp_path / "states/step-100" / "state.json").write_text("{}")
    (tmp_path / "states/step-2000").mkdir()
    (tmp_path / "states/step-2000/record.json").touch()
    (tmp_path / "states/of-mind").mkdir()
    assert newest_state(tmp_path) == tmp_path / "states/step-10"
    said = capsys.readouterr().err
    assert [line.split(": ")[:4] for line in said.splitlines()] == [
        ["dstrain", "warning", "skipped", str(tmp_path / f"states/step-{step}")]
        for step in (2000, 100)
    ]
    assert "state.json" in said


def test_no_whole_state_is_an_error_never_a_new_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StateError, match="contains no intact state"):
        newest_state(tmp_path)
    save_state(tmp_path / "states/step-1", small(1))
    (tmp_path / "states/step-1" / "record.json").unlink()
    with pytest.raises(StateError, match="contains no intact state"):
        newest_state(tmp_path)
    assert "step-1: is incomplete: record.json is missing" in capsys.readouterr().err


def test_a_state_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save_state(tmp_path / "states/step-1", small(1))
    save_state(tmp_path / "states/step-1", replace(small(1), config_digest="other"))
    assert load_state(tmp_path / "states/step-1").config_digest == "other"
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["step-1"]


def listed(output: Path) -> list[str]:
    """The files of the states in an output folder, as run.json lists them."""
    return [str(path.relative_to(output)) for path in output.glob("states/*/*.*")]


def test_a_state_that_no_run_wrote_and_a_folder_that_is_a_link_are_not_pruned(
    tmp_path: Path,
) -> None:
    for step in range(1, 6):
        save_state(tmp_path / f"out/states/step-{step}", small(step))
    ours = [name for name in listed(tmp_path / "out") if "step-1/" not in name]
    linked = tmp_path / "out/states/step-2"
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    prune_states(tmp_path / "out", 1, 5, ours)
    left = sorted(path.name for path in (tmp_path / "out/states").iterdir())
    assert left == ["step-1", "step-2", "step-5"]
    assert load_state(linked).step == 2


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [4, 5, 6]), (2, [3, 4, 5, 6]), (9, [1, 2, 3, 4, 5, 6])]
)
def test_pruning_counts_from_the_step_of_the_run(
    keep: int, left: list[int], tmp_path: Path
) -> None:
    for step in range(1, 7):
        save_state(tmp_path / f"states/step-{step}", small(step))
    for step in (5, 6):  # a run that resumes at 4 could not load these
        (tmp_path / f"states/step-{step}/record.json").unlink()
    (tmp_path / "states/notes").mkdir()
    prune_states(tmp_path, keep, 4, listed(tmp_path))
    assert sorted(path.name for path in (tmp_path / "states").iterdir()) == [
        "notes",
        *(f"step-{step}" for step in left),
    ]


def test_a_file_that_is_not_a_states_stays_when_the_state_is_pruned(
    tmp_path: Path,
) -> None:
    for step in (1, 2):
        save_state(tmp_path / f"states/step-{step}", small(step))
    (tmp_path / "states/step-1/notes.txt").write_text("mine")
    prune_states(tmp_path, 1, 2, listed(tmp_path))
    (left,) = (tmp_path / "states/step-1").iterdir()
    assert left.read_text() == "mine"
    assert newest_state(tmp_path) == tmp_path / "states/step-2"


def test_files_that_a_user_put_into_a_state_stay_when_it_is_replaced(
    tmp_path: Path,
) -> None:
    save_state(tmp_path / "states/step-1", small(1))
    (tmp_path / "states/step-1/notes.txt").write_text("mine")
    save_state(tmp_path / "states/step-1", small(1))
    assert (tmp_path / "states/step-1/notes.txt").read_text() == "mine"
    assert not checkpoint.damage(tmp_path / "states/step-1")
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["step-1"]


def test_a_full_disk_leaves_the_earlier_state_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_state(tmp_path / "states/step-1", small(1))
    for failing in range(1, 40):
        left = [failing]
        sync = os.fsync

        def full(
            fd: int, left: list[int] = left, sync: Callable[[int], None] = sync
        ) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(28, "No space left on device")
            sync(fd)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            try:
                save_state(tmp_path / "states/step-2", small(2))
            except SystemFault as error:
                assert "No space left" in str(error)
            else:
                break
        newest = newest_state(tmp_path)
        assert same_state(
            load_state(newest), small(int(newest.name.removeprefix("step-")))
        )
        assert not list(tmp_path.glob(".tmp-*"))
        shutil.rmtree(tmp_path / "states/step-2", ignore_errors=True)
    assert failing > 8


def test_a_whole_component_is_saved_with_its_own_names_and_configuration(
    tmp_path: Path,
) -> None:
    net = Net()
    net.register_buffer("table", torch.arange(3))
    net.register_parameter("tied", net.late)
    save_full(
        tmp_path / "net.safetensors", net, {"width": 4}, {"step": "12", "family": "fam"}
    )
    with safe_open(tmp_path / "net.safetensors", "pt") as file:
        metadata = dict(file.metadata())
        assert set(file.keys()) == set(net.state_dict())
    assert len(metadata.pop(CHECKSUM)) == 64
    assert metadata == {
        "format": "pt",
        "config": '{"width": 4}',
        "step": "12",
        "family": "fam",
    }
    other = Net()
    other.register_buffer("table", torch.zeros(3, dtype=torch.int64))
    other.register_parameter("tied", other.late)
    other.load_state_dict(read_tensors(tmp_path / "net.safetensors")[0])
    assert same(dict(net.state_dict()), dict(other.state_dict()))


def test_a_transformers_component_has_the_names_its_own_saving_gives(
    tmp_path: Path,
) -> None:
    from transformers import T5Config, T5EncoderModel

    model = T5EncoderModel(
        T5Config(d_model=8, d_kv=4, d_ff=9, num_layers=1, num_heads=2, vocab_size=20)
    )
    model.save_pretrained(tmp_path / "theirs")
    save_full(tmp_path / "ours.safetensors", model, model.config.to_dict(), {})
    ours, _ = read_tensors(tmp_path / "ours.safetensors")
    theirs, _ = read_tensors(tmp_path / "theirs" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_average_is_a_file_of_its_own_that_older_states_lack(tmp_path: Path) -> None:
    state = replace(
        small(1),
        average={"w": torch.arange(3.0)},
        average_facts={"decay": "0.9", "steps": "1"},
    )
    save_state(tmp_path / "with", state)
    save_state(tmp_path / "without", small(1))
    back = load_state(tmp_path / "with")
    assert torch.equal(back.average["w"], torch.arange(3.0))
    assert back.average_facts == state.average_facts
    assert not load_state(tmp_path / "without").average_facts
    left = {path.name for path in (tmp_path / "without").iterdir()}
    assert left == {*checkpoint.FILES, checkpoint.RECORD}
    average = tmp_path / "with" / checkpoint.EMA
    average.write_bytes(average.read_bytes()[:-1])
    assert "sha256 of ema.safetensors" in checkpoint.damage(tmp_path / "with")
    average.unlink()
    assert "ema.safetensors is missing" in checkpoint.damage(tmp_path / "with")


def test_pruning_removes_averages_too(tmp_path: Path) -> None:
    facts = {"decay": "0.9", "steps": "1"}
    for step in (1, 2):
        state = replace(small(step), average={}, average_facts=facts)
        save_state(tmp_path / f"states/step-{step}", state)
    (tmp_path / "states/step-1/mine.txt").write_text("mine")
    listed = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")]
    prune_states(tmp_path, 1, 2, listed)
    assert [path.name for path in (tmp_path / "states/step-1").iterdir()] == [
        "mine.txt"
    ]
