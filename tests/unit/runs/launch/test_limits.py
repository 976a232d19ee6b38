"""What cannot be divided among processes is refused before anything is loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain.errors import UsageError
from dstrain.models.execution.kept import Kept
from dstrain.runs.launch.limits import refuse_unshardable
from dstrain.runs.resolve import dataset_inputs, resolve

from tests.support.runs import config, project

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("project"))


@pytest.mark.parametrize(
    ("flags", "kept", "words"),
    [
        ({"trainable_models": "text_encoder"}, {},
         "cannot divide text_encoder: encode_prompt runs it once for each sample"),
        ({"preview_prompt": ("dog",)}, {}, "one process makes the previews"),
        ({"compile": True}, {}, "--compile: sharding puts other weights"),
        ({"optimizer": "muon"}, {}, "muon is not known to do with rows what"),
        ({"customized_optimizer": "torch.optim.Adafactor"}, {}, "use adamw, lion or"),
        ({}, {"dit": Kept(swapped_blocks=1)}, "leave out --blocks_to_swap"),
    ],
)  # fmt: skip
def test_it_is_refused_in_words(
    here: Path, flags: dict[str, Any], kept: dict[str, Kept], words: str
) -> None:
    setup = resolve(config(here, **flags))
    plans = [setup.plan(dataset_inputs(setup))]
    with pytest.raises(UsageError, match=words):
        refuse_unshardable(replace(setup, kept=kept), plans)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"trainable_models": "dit"},
        {"trainable_models": "dit.blocks.1"},
        *({"optimizer": name} for name in ("adamw", "lion", "schedulefree")),
    ],
)
def test_the_denoiser_can_be_divided(here: Path, flags: dict[str, Any]) -> None:
    setup = resolve(config(here, **flags))
    refuse_unshardable(
        replace(setup, kept={"text_encoder": Kept(swapped_blocks=1)}),
        [setup.plan(dataset_inputs(setup))],
    )
