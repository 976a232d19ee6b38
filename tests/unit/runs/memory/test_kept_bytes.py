"""`dstrain graph` says how components are kept, and the bytes that they then take."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import Pipeline, UsageError
from dstrain.models import METHODS
from dstrain.runs import plan_of
from dstrain.runs.checks.rows import dataset_inputs
from dstrain.runs.resolve import resolve

from tests.support.family import IDS, PIPELINES
from tests.support.runs import config, project

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


def kept(here: Path, **flags: Any) -> dict[str, str]:
    return dict(plan_of(config(here, dry_run=True, **flags))[1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_bytes_are_within_2_percent_of_what_is_allocated(
    method: str, precision: str, here: Path
) -> None:
    options = f"dit:{method};text_encoder:{method}"
    flags = {"quant_options": options, "mixed_precision": precision}
    found = kept(here, **flags)
    setup = resolve(config(here, **flags))
    files = setup.find([setup.plan(dataset_inputs(setup))])
    loaded = Pipeline.from_found(
        setup.family, setup.spec, files, setup.device, setup.dtype
    )
    dtype = "fp32" if precision == "no" else "bf16"
    for name in ("dit", "text_encoder"):
        network = loaded.components[name]
        tensors = [*network.parameters(), *network.buffers()]
        allocated = sum(one.untyped_storage().nbytes() for one in tensors)
        start, end = f"{method}: ", f" KiB, loaded as {dtype}"
        assert found[name].startswith(start) and found[name].endswith(end)
        shown = float(found[name].removeprefix(start).removesuffix(end)) * 2**10
        # As many digits as are shown.
        assert shown == pytest.approx(allocated, rel=0.02, abs=0.05 * 2**10)


def test_the_place_of_weights_is_said_with_their_bytes(here: Path) -> None:
    found = kept(here, blocks_to_swap=1, offload_models="text_encoder")
    assert "1 block swapped: " in found["dit"]
    assert " on the device, " in found["dit"] and " in RAM, " in found["dit"]
    assert found["text_encoder"].endswith(" KiB in RAM, loaded as fp32")


def test_without_model_files_the_first_published_ones_are_measured(here: Path) -> None:
    given: dict[str, Any] = {"model_paths": None, "quant_options": "dit:fp8"}
    found = kept(here, **given, fp8_models="text_encoder")
    first = IDS.partition(":")[0]
    assert found["dit"].endswith(f" KiB, loaded as fp32, if it is as in {first}")
    # Nothing is published of it.
    assert found["text_encoder"] == "fp8"
    published = kept(here, **given, model_id_with_origin_paths=IDS)
    assert published["dit"].endswith(" KiB, loaded as fp32")
    toy = kept(here, **given, toy=True)
    assert toy["dit"].endswith(" KiB, loaded as fp32")


def test_the_published_one_is_one_of_the_variant(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"depth": 3, "is_wide": False}
    other = replace(PIPELINES["base"], denoiser_config=wanted)
    monkeypatch.setitem(PIPELINES, "base", other)
    given: dict[str, Any] = {"model_paths": None, "variant": "base"}
    assert kept(here, quant_options="dit:fp8", **given) == {"dit": "fp8"}
    fitting = replace(PIPELINES["base"], denoiser_config={**wanted, "depth": 2})
    monkeypatch.setitem(PIPELINES, "base", fitting)
    assert "KiB" in kept(here, quant_options="dit:fp8", **given)["dit"]


def test_a_pattern_that_fits_no_layer_is_refused(here: Path) -> None:
    with pytest.raises(UsageError, match="no linear layer of dit matches 'to_qq'"):
        kept(here, quant_options="dit:fp8@to_qq")
