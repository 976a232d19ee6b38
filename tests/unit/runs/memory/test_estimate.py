"""An estimate adds up what is there at once."""

import pytest
from dstrain.config.options.train import TrainConfig
from dstrain.runs.memory.activations import Activations
from dstrain.runs.memory.components import ComponentSize, Stored
from dstrain.runs.memory.estimate import RESERVE, estimate
from dstrain.runs.memory.facts import Facts


def stored(numbers: int, size: int, is_trained: bool = False) -> Stored:
    return Stored("layer", (numbers,), size, False, True, is_trained, -1)


ACTIVATIONS = Activations(10, 20, 400, 30, 5, 1000, 7)
FACTS = Facts(
    {
        "dit": ComponentSize(
            "dit", "bf16", (stored(50, 100), stored(6, 24, True)), True
        ),
        "vae": ComponentSize("vae", "bf16", (stored(40, 80),)),
    },
    (),
    ACTIVATIONS,
    "a sample",
)
CONFIG = TrainConfig(model="tiny")


def test_a_stage_that_trains_has_weights_gradients_state_and_activations() -> None:
    config = TrainConfig(model="tiny", use_gradient_checkpointing=True)
    found = estimate(FACTS, ("dit",), config, "train", mixed=True)
    assert found.weights == {"dit": 100}
    assert (found.trained, found.gradients, found.optimizer) == (24, 24, 48)
    assert found.activations == 10 + 20 + 30 + 5
    assert found.least == 100 + 24 + 24 + 48 + 65


def test_a_run_that_is_not_split_encodes_before_it_trains() -> None:
    found = estimate(FACTS, ("dit", "vae"), CONFIG, "", mixed=True)
    assert found.weights == {"dit": 100, "vae": 80}
    assert found.activations == 1000


def test_stage_1_trains_nothing() -> None:
    found = estimate(FACTS, ("vae",), CONFIG, "data_process", mixed=True)
    assert found.least == 80 + 1000


@pytest.mark.parametrize("beyond", [0, 1])
def test_it_fits_where_the_device_itself_has_room_too(beyond: int) -> None:
    found = estimate(FACTS, ("vae",), CONFIG, "data_process", mixed=True)
    assert found.fits(1080 + RESERVE - beyond) is (not beyond)


def test_without_activations_nothing_is_said_to_fit() -> None:
    facts = Facts(FACTS.components, (), None, "no tokenizer")
    found = estimate(facts, ("dit",), CONFIG, "train", mixed=True)
    assert found.activations is None
    assert found.fits(2**60) is None
    assert found.fits(RESERVE) is False
