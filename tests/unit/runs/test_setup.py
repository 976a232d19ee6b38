"""A resolved run: where its files are, which inputs it has, what each stage loads."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dstrain import TrainConfig, UsageError
from dstrain.models import component_digests, default_device
from dstrain.models.execution import Kept, StoredLayers
from dstrain.plugin import QuantizationMethod
from dstrain.runs.resolve import of_stage, resolve
from dstrain.storage import Digests

from tests.support.runs import config, project

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


def test_the_feature_cache_is_where_the_flags_or_diffsynth_studios_commands_have_it(
    here: Path,
) -> None:
    places = {
        "sft:data_process": here / "out",
        "sft:train": here / "data",
    }
    for task, place in places.items():
        assert resolve(config(here, task=task)).cache_path == place
        assert (
            resolve(config(here, task=task, feature_cache=here / "cache")).cache_path
            == here / "cache"
        )


@pytest.mark.parametrize(
    ("flag", "launched", "precision"),
    [
        (None, None, "no"),
        ("bf16", None, "bf16"),
        (None, "bf16", "bf16"),
        ("no", None, "no"),
    ],
)
def test_precision_is_the_flags_else_the_launchers_else_that_of_the_device(
    flag: str | None,
    launched: str | None,
    precision: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if launched:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    setup = resolve(config(here, mixed_precision=flag))
    assert default_device().type == "cuda" or setup.mixed_precision == precision
    assert (
        setup.dtype
        == {"bf16": torch.bfloat16, "no": torch.float32}[setup.mixed_precision]
    )


def test_a_plan_is_made_once_for_each_set_of_inputs(here: Path) -> None:
    setup = resolve(config(here))
    inputs = frozenset(setup.dataset.rows[0])
    assert setup.plan(inputs) is setup.plan(frozenset(setup.dataset.rows[1]))
    assert setup.plan(inputs) is not setup.plan(setup.all_inputs() - {"height"})


def test_each_stage_finds_the_files_that_it_loads(here: Path) -> None:
    setup = resolve(config(here))
    plans = [setup.plan(setup.all_inputs())]
    found = {
        stage: set(replace(setup, stage=stage).find(plans).files)
        for stage in ("", "data_process", "train")
    }
    assert found["train"] == {"dit"}
    assert "dit" not in found["data_process"]
    assert found[""] == found["data_process"] | found["train"]


def test_boundaries_given_are_those_of_the_timesteps(here: Path) -> None:
    sampler = resolve(config(here, min_timestep_boundary=0.25)).build_timestep_sampler()
    assert (sampler.min_boundary, sampler.max_boundary) == (0.25, 1.0)
    with pytest.raises(UsageError):
        resolve(config(here, min_timestep_boundary=0.5, max_timestep_boundary=0.5))


def test_the_rows_of_a_run_without_a_dataset_are_asked_for() -> None:
    setup = resolve(TrainConfig(model="tiny", dry_run=True))
    with pytest.raises(UsageError, match="--dataset_base_path: is required"):
        _ = setup.dataset


def test_files_say_how_their_component_is_kept_and_their_digests_depend_on_its_methods(
    here: Path,
) -> None:
    setup = resolve(config(here))
    digests = Digests(here / "digests.json")

    def found(**kept: Kept) -> tuple[list[Kept], dict[str, str]]:
        ready = replace(setup, kept=kept)
        files = ready.find([setup.plan(setup.all_inputs())])
        names = ("dit", "text_encoder")
        digest = component_digests(files, digests)
        return [files.files[name].kept for name in names], digest

    kept = Kept((StoredLayers(QuantizationMethod("half", lambda *_: _[0], sum)),))
    _, before = found()
    swapped, same = found(text_encoder=Kept(swapped_blocks=1))
    stored, after = found(text_encoder=kept)
    assert swapped == [Kept(), Kept(swapped_blocks=1)] and same == before
    assert stored == [Kept(), kept]
    differing = [name for name in before if before[name] != after[name]]
    assert differing == ["text_encoder"]


def test_a_stage_of_a_command_that_runs_both_is_recorded_as_it_was_typed(
    here: Path,
) -> None:
    both = resolve(config(here, feature_cache=here / "cache"))
    for stage in ("data_process", "train"):
        one = of_stage(both, stage)
        assert (one.stage, one.config.task) == (stage, f"sft:{stage}")
        assert one.typed.task == one.recorded.task == "sft"
        alone = resolve(config(here, feature_cache=here / "cache", task=f"sft:{stage}"))
        assert alone.typed.task == alone.recorded.task == f"sft:{stage}"
