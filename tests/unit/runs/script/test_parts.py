"""A script gives a run tasks and callbacks of its own, and gets a result from it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import (
    RunResult,
    StepNumbers,
    Task,
    TrainConfig,
    TrainingModule,
    UsageError,
    run,
)
from safetensors.torch import load_file
from torch import Tensor

from tests.support.runs import config, log

pytestmark = pytest.mark.usefixtures("tiny")


def test_a_run_returns_folder_weights_and_losses(here: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(config(here, output_path=str(out), max_steps=3, save_steps=2))
    assert (result.folder, result.step) == (out, 3)
    assert result.weights == (out / "step-3.safetensors",)
    assert "losses" not in repr(result)  # a notebook shows it; there may be thousands
    assert list(result.losses) == pytest.approx([row["loss"] for row in log(out)])
    more = run(config(here, output_path=out, max_steps=5, resume="auto"))
    assert (more.step, len(more.losses)) == (5, 2)
    nothing = run(config(here, output_path=out, max_steps=5, resume="auto"))
    assert (nothing.losses, nothing.weights) == ((), more.weights)


def test_stage_1_returns_the_cache_and_a_run_in_two_stages_that_of_the_second(
    here: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    stage_1 = run(config(here, task="sft:data_process", output_path=str(cache)))
    assert (stage_1.folder, stage_1.weights, stage_1.losses) == (cache, (), ())
    both = run(
        config(here, feature_cache=str(cache), output_path=tmp_path / "o", max_steps=1)
    )
    assert (both.folder, len(both.losses)) == (tmp_path / "o", 1)


def zero(
    predict: Any, input_latents: Tensor, *, timestep_sampler: Any, rng: Any
) -> Any:
    """A loss whose gradient is that of the prediction's mean."""
    sigma = timestep_sampler.draw(rng)
    return predict(input_latents, sigma * 1000).flatten(1).mean(1)


def test_a_task_of_ones_own_is_trained_by_its_name(here: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"max_steps": 2}
    own = run(
        config(here, output_path=tmp_path / "a", task="zero", **given),
        tasks=[Task.of("zero", zero)],
    )
    plain = run(config(here, output_path=tmp_path / "b", **given))
    assert own.losses != plain.losses
    trained = load_file(own.weights[0])
    assert any(torch.any(one != 0) for name, one in trained.items() if "lora_B" in name)


@pytest.mark.parametrize(
    ("task", "names", "named"),
    [
        ("sft", ["sft"], "'sft'"),
        ("a", ["a", "a"], "'a'"),
        ("sft", ["mine"], "these: mine"),
    ],
)
def test_an_unclear_task_is_refused(task: str, names: list[str], named: str) -> None:
    tasks = [Task.of(name, zero) for name in names]
    with pytest.raises(UsageError, match=named) as caught:
        run(TrainConfig(model="tiny", dry_run=True, task=task), tasks=tasks)
    assert caught.value.where == "tasks"


@pytest.mark.parametrize(
    ("where", "part"),
    [
        ("callbacks", [3]),
        ("tasks", [zero]),
        ("module_class", TrainConfig),
        ("config", {"model": "tiny"}),
    ],
)
def test_what_is_not_of_its_type_is_refused_before_an_older_run_is_replaced(
    where: str, part: Any, here: Path, tmp_path: Path
) -> None:
    (tmp_path / "epoch-0.safetensors").write_text("older")
    own = config(here, output_path=tmp_path, max_steps=1, overwrite=True)
    given: dict[str, Any] = {"config": own, where: part}
    with pytest.raises(UsageError) as caught:
        run(**given)
    assert caught.value.where == ("run()" if where == "config" else where)
    assert (tmp_path / "epoch-0.safetensors").read_text() == "older"


def test_callbacks_see_steps_and_may_end_the_run(here: Path, tmp_path: Path) -> None:
    seen: list[StepNumbers] = []

    def stop_after_two(numbers: StepNumbers) -> bool:
        return numbers.step == 2

    result = run(
        config(here, output_path=tmp_path / "out", max_steps=9),
        callbacks=[seen.append, stop_after_two],
    )
    assert [one.step for one in seen] == [1, 2]
    assert [one.loss for one in seen] == list(result.losses)
    assert {one.total_steps for one in seen} == {9}
    assert result.weights == (tmp_path / "out/step-2.safetensors",)
    again = run(
        config(here, output_path=tmp_path / "out", max_steps=9, resume="auto"),
        callbacks=[lambda numbers: numbers],  # only True ends a run
    )
    assert (again.step, len(again.losses)) == (9, 7)


def test_a_run_in_two_stages_has_the_same_parts(here: Path, tmp_path: Path) -> None:
    seen: list[StepNumbers] = []

    class Halved(TrainingModule):
        def losses(self, *given: Any) -> Tensor:
            return super().losses(*given) / 2

    def trained(out: str, **parts: Any) -> RunResult:
        cache = {"feature_cache": tmp_path / "cache"}
        return run(
            config(here, output_path=tmp_path / out, max_steps=1, **cache), **parts
        )

    plain = trained("plain")
    own = trained("own", module_class=Halved, callbacks=[seen.append])
    assert own.losses == (plain.losses[0] / 2,)
    assert len(seen) == 1
