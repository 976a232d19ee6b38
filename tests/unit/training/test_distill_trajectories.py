"""Trajectory imitation: each of the student's steps is compared with the teacher's way
between the same two sigmas.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dstrain import (
    TRAJECTORY_IMITATION,
    SampleKey,
    TrainConfig,
    UsageError,
    run,
)
from dstrain.pipeline import inference_sigmas
from dstrain.plugin import FlowMatchSchedule, LatentConstraint
from dstrain.runs.resolve import resolve
from dstrain.training import LATENTS, SIGMAS
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.distilling import distillable
from tests.support.runs import (
    config,
    files,
    log,
    project,
    same,
    training_run,
)

pytestmark = pytest.mark.usefixtures("tiny")

SCHEDULE = FlowMatchSchedule(shift=3.0, latents_per_token=1)
GENERATOR = torch.Generator().manual_seed(9)
PATH = torch.randn(2, 4, 4, 2, 2, generator=GENERATOR)
"""Two samples, three steps."""
STEPS = 3
SIGMAS_OF_STEPS = SCHEDULE.sigmas(STEPS, 4)


def hold_nothing(latents: Tensor, timestep: Tensor, noise: Tensor) -> LatentConstraint:
    return LatentConstraint(latents, timestep)


LOSS: Any = TRAJECTORY_IMITATION.loss.function


def loss(predict: Any, constrain_latents: Any = hold_nothing, **given: Any) -> Tensor:
    sigmas = given.get("sigmas", SIGMAS_OF_STEPS)[None]
    trajectory = [{LATENTS: one[None], SIGMAS: sigmas} for one in PATH]
    found: Tensor = LOSS(
        predict,
        given.get("trajectory", trajectory),
        given.get("steps", STEPS),
        given.get("loss_weight"),
        constrain_latents=constrain_latents,
        inference_sigmas=partial(inference_sigmas, SCHEDULE),
    )
    return found


def velocities() -> dict[float, Tensor]:
    """The teacher's mean velocity of each step, by the timestep that it begins at."""
    return {
        float(SIGMAS_OF_STEPS[i] * 1000): (PATH[:, i + 1] - PATH[:, i])
        / (SIGMAS_OF_STEPS[i + 1] - SIGMAS_OF_STEPS[i])
        for i in range(STEPS)
    }


def test_the_teachers_own_velocities_cost_nothing_and_others_their_mean_square() -> (
    None
):
    wanted = velocities()
    exact = loss(lambda latents, timestep: wanted[timestep[0].item()])
    assert exact.tolist() == pytest.approx([0, 0], abs=1e-12)
    off = {time: one + i for i, (time, one) in enumerate(wanted.items())}
    assert loss(lambda latents, timestep: off[timestep[0].item()]).tolist() == (
        pytest.approx([(0 + 1 + 4) / 3] * 2)
    )


def test_every_step_begins_at_the_teachers_latents_and_not_at_the_students() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def predict(latents: Tensor, timestep: Tensor) -> Tensor:
        seen.append((latents, timestep))
        return torch.full_like(latents, 100.0)

    loss(predict)
    assert same([latents for latents, _ in seen], [PATH[:, i] for i in range(STEPS)])
    assert [timestep.tolist() for _, timestep in seen] == [
        [sigma, sigma] for sigma in (SIGMAS_OF_STEPS[:STEPS] * 1000).tolist()
    ]


def test_what_is_kept_fixed_is_seen_at_every_step_and_costs_nothing() -> None:
    mask = torch.zeros(2, 1, 2, 2)
    mask[..., 0] = 1

    def constrain_latents(
        latents: Tensor, timestep: Tensor, noise: Tensor
    ) -> LatentConstraint:
        assert torch.equal(noise, PATH[:, 0])
        return LatentConstraint(latents * mask + 7 * (1 - mask), timestep, mask)

    wanted = velocities()

    def predict(latents: Tensor, timestep: Tensor) -> Tensor:
        assert bool((latents[..., 1] == 7).all())
        return wanted[timestep[0].item()] + 2

    assert loss(predict, constrain_latents).tolist() == pytest.approx([4, 4])


def test_what_is_masked_out_of_an_image_costs_nothing() -> None:
    wanted = velocities()
    weight = torch.zeros(2, 1, 2, 2)
    weight[..., 0] = 1

    def predict(latents: Tensor, timestep: Tensor) -> Tensor:
        return wanted[timestep[0].item()] + 5 * (1 - weight)

    given = loss(predict, loss_weight=weight)
    assert given.tolist() == pytest.approx([0, 0], abs=1e-12)
    assert loss(predict).tolist() == pytest.approx([12.5, 12.5])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": 2}, "3 .*num_inference_steps .*2"),
        (
            {"sigmas": FlowMatchSchedule(shift=5.0).sigmas(STEPS, 4)},
            r"\[1.0, 0.9091, 0.7143, 0.0\].*\[1.0, 0.8571, 0.6, 0.0\]",
        ),
        ({"trajectory": [{"image": PATH}]}, "image.*latents .*sigmas"),
    ],
)
def test_a_path_of_other_steps_sigmas_or_tensors_is_refused(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=f"(?s)trajectory: .*{said}.*--trajectory "):
        loss(lambda latents, timestep: latents, **given)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return distillable(tmp_path_factory.mktemp("project"))


def imitate(folder: Path, stage: str = "", **changes: Any) -> TrainConfig:
    given = {"dataset_base_path": folder / "made", **changes}
    return config(folder, task=f"trajectory_imitation{stage}", **given)


def losses_of(given: TrainConfig, rows: tuple[int, ...]) -> Tensor:
    ready = training_run(given)
    samples = [ready.source.sample(row) for row in rows]
    keys = [SampleKey(0, 0, 0, row) for row in rows]
    with torch.no_grad():
        return ready.module.eval().losses(samples, keys)


def test_the_student_starts_as_its_teacher_if_it_has_as_many_steps(
    tmp_path: Path,
) -> None:
    """So the loss runs the same model at the same latents as inference did; with fewer
    steps, and with guidance, there is something to learn.
    """
    twice = {"steps": (2,) * 6}
    equal = distillable(tmp_path / "equal", num_inference_steps=2, **twice)
    assert losses_of(imitate(equal), (0, 1)).max() < 1e-9
    for steps, scale in ((6, None), (2, 3.0)):
        teacher = {"num_inference_steps": steps, "guidance_scale": scale, **twice}
        other = distillable(tmp_path / str(steps), **teacher)
        assert losses_of(imitate(other), (0, 1)).min() > 1e-4


def test_the_teachers_image_is_neither_decoded_nor_encoded(here: Path) -> None:
    setup = resolve(imitate(here))
    plan = setup.plan(setup.dataset.input_sets[0])
    wanted = {"trajectory", "num_inference_steps", "prompt_emb", "prompt_mask"}
    assert set(plan.cached_values) == wanted
    assert "vae" not in plan.components[""]


def test_a_dataset_without_trajectories_is_told_what_makes_them(tmp_path: Path) -> None:
    project(tmp_path)
    with pytest.raises(UsageError, match=r"(?s)'trajectory'.*--trajectory "):
        run(config(tmp_path, task="trajectory_imitation", dry_run=True))


def test_a_damaged_path_is_a_bad_file_of_its_row(tmp_path: Path) -> None:
    distillable(tmp_path)
    path = next((tmp_path / "made/trajectory").iterdir())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    place = rf"metadata\.csv:\d+:trajectory: .*{path.name}"
    with pytest.raises(UsageError, match=place):
        run(imitate(tmp_path))
    skipping = {"on_bad_sample": "skip", "output_path": tmp_path / "kept"}
    run(imitate(tmp_path, **skipping))
    assert len(log(tmp_path / "kept")) == 5
    path.write_bytes(content[:-8])
    with pytest.raises(UsageError, match=place):
        run(imitate(tmp_path, output_path=tmp_path / "third"))


def test_views_of_the_images_are_refused(here: Path) -> None:
    for flag in ({"flip": True}, {"crops": 2}):
        with pytest.raises(UsageError, match="'trajectory'"):
            run(imitate(here, **flag))


def test_a_changed_path_is_another_value_of_the_cache(tmp_path: Path) -> None:
    distillable(tmp_path)
    cache = {"feature_cache": tmp_path / "cache"}
    run(imitate(tmp_path, ":data_process", **cache))
    path = next((tmp_path / "made/trajectory").iterdir())
    tensors = load_file(path)
    save_file({**tensors, LATENTS: tensors[LATENTS] + 1}, path)
    run(imitate(tmp_path, ":data_process", **cache))
    both: dict[str, Any] = {"max_steps": 6, "save_steps": 6}
    run(imitate(tmp_path, ":train", output_path=tmp_path / "two", **cache, **both))
    run(imitate(tmp_path, output_path=tmp_path / "one", **both))
    assert same(files(tmp_path / "one"), files(tmp_path / "two"))


def test_a_dry_run_plans_memory_by_the_shapes_of_the_paths(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(imitate(here, dry_run=True))
    out = capsys.readouterr().out
    assert re.search("activations +[0-9.]+ KiB", out)
    assert "metadata.csv:" in out
