"""An estimate adds up what is there at once."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from dstrain import TrainConfig
from dstrain.distributed import Sharding
from dstrain.models import METHODS
from dstrain.models.execution import ALL_BLOCKS, Kept, StoredLayers
from dstrain.runs.memory.activations import Activations
from dstrain.runs.memory.components import ComponentSize, Stored
from dstrain.runs.memory.estimate import (
    CONTEXT,
    FRAGMENTED,
    Choice,
    estimate,
    state_bytes,
)
from dstrain.runs.memory.facts import Facts
from dstrain.training.optimizers import choose_optimizer


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


def choice(kept: Mapping[str, Kept] = MappingProxyType({}), **flags: Any) -> Choice:
    return Choice(TrainConfig(model="tiny", **flags), kept, 8.0, mixed=True)


def test_a_stage_that_trains_has_weights_gradients_state_and_activations() -> None:
    flags = choice(use_gradient_checkpointing=True)
    found = estimate(FACTS, ("dit",), flags, "train")
    assert found.weights == {"dit": 100}
    assert (found.trained, found.gradients, found.optimizer) == (24, 24, 48)
    assert found.activations == 10 + 20 + 30 + 5
    assert found.least == 100 + 24 + 24 + 48 + 65


def test_a_run_that_is_not_split_encodes_before_it_trains() -> None:
    found = estimate(FACTS, ("dit", "vae"), choice(), "")
    assert found.weights == {"dit": 100, "vae": 80}
    assert found.activations == 1000


def test_stage_1_trains_nothing() -> None:
    found = estimate(FACTS, ("vae",), choice(), "data_process")
    assert found.least == 80 + 1000


@pytest.mark.parametrize("beyond", [0, 1])
def test_it_fits_where_there_is_room_for_what_is_not_counted(beyond: int) -> None:
    found = estimate(FACTS, ("vae",), choice(), "data_process")
    margin = CONTEXT + int(1080 * FRAGMENTED)
    assert found.fits(1080 + margin - beyond) is (not beyond)


def test_without_activations_nothing_is_said_to_fit() -> None:
    facts = Facts(FACTS.components, (), None, "no tokenizer")
    found = estimate(facts, ("dit",), choice(), "train")
    assert found.activations is None
    assert found.fits(2**60) is None
    assert found.fits(CONTEXT) is False


def test_swapped_blocks_are_in_ram_and_two_of_them_on_the_device() -> None:
    blocks = [Stored(f"b{i}", (1,), 100 + i, False, True, False, i) for i in range(4)]
    size = ComponentSize("dit", "bf16", (stored(50, 7), *blocks))
    facts = Facts({"dit": size}, (), ACTIVATIONS, "a sample")
    for count, device in ((0, 7 + 406), (1, 7 + 406), (3, 7 + 100 + 205)):
        kept = {"dit": Kept(swapped_blocks=count)}
        found = estimate(facts, ("dit",), choice(kept), "train")
        assert found.weights == {"dit": device}
        assert found.ram == sum(100 + i for i in range(4 - count, 4))
    found = estimate(
        facts, ("dit",), choice({"dit": Kept(swapped_blocks=ALL_BLOCKS)}), "train"
    )
    assert (found.weights, found.ram) == ({"dit": 7 + 205}, 406)


def test_a_divided_network_has_its_rows_and_two_whole_blocks() -> None:
    blocks = [Stored(f"b{i}", (9,), 90, False, True, False, i) for i in range(4)]
    size = ComponentSize("dit", "bf16", (stored(7, 14), *blocks, stored(6, 24, True)))
    facts = Facts({**FACTS.components, "dit": size}, (), ACTIVATIONS, "a sample")
    rows = 4 * 2 + 4 * 50  # of 7 rows 4, of 9 rows 5
    for sharding, together in ((Sharding(), 2), (Sharding("full", False), 4)):
        flags = replace(choice(ema_decay=0.9), sharding=sharding, processes=2)
        found = estimate(facts, ("dit", "vae"), flags, "train")
        assert found.weights == {"dit": rows, "vae": 80}
        assert (found.trained, found.gradients, found.average) == (12, 12, 12)
        assert found.optimizer == 24
        assert found.together == 14 + 24 + together * 90
        assert found.least == rows + 80 + 60 + found.together + 415
        flags = replace(flags, sharding=replace(sharding, offload=True))
        found = estimate(facts, ("dit", "vae"), flags, "train")
        assert found.ram == rows + 60
        assert found.least == 80 + found.together + 415


@pytest.mark.parametrize("way", ["blocks_to_swap", "enable_model_cpu_offload"])
def test_swapping_recomputes_blocks(way: str) -> None:
    found = estimate(FACTS, ("dit",), choice(**{way: True}), "train")
    assert found.activations == 10 + 20 + 30 + 5


def test_what_is_offloaded_is_on_the_device_while_a_unit_borrows_it() -> None:
    kept = {"vae": Kept(offloaded=True)}
    found = estimate(FACTS, ("dit", "vae"), choice(kept), "data_process")
    assert (found.weights["vae"], found.activations, found.ram) == (0, 1080, 80)


def test_what_is_stored_is_restored_to_encode_with_it() -> None:
    weight = Stored("layer", (4, 8), 64, True, True, False, -1)
    facts = replace(FACTS, components={"vae": ComponentSize("vae", "bf16", (weight,))})
    kept = {"vae": Kept(methods=(StoredLayers(METHODS["int8_block"]),))}
    found = estimate(facts, ("vae",), choice(kept), "data_process")
    assert found.weights["vae"] < 64
    assert found.activations == 1000 + 2 * 32


def test_trained_weights_in_bf16_have_gradients_in_bf16_and_no_copies() -> None:
    flags = choice(use_gradient_checkpointing=True, ema_decay=0.9)
    many = ComponentSize("dit", "bf16", (stored(6000, 24000, is_trained=True),))
    facts = replace(FACTS, components={"dit": many})
    fp32 = estimate(facts, ("dit",), flags, "train")
    assert (fp32.trained, fp32.gradients) == (24000, 24000)
    assert fp32.activations == 10 + 20 + 12000 + 5
    bf16 = estimate(facts, ("dit",), replace(flags, rounds=True), "train")
    assert (bf16.trained, bf16.gradients) == (12000, 12000)
    assert (bf16.optimizer, bf16.average) == (fp32.optimizer, fp32.average)
    assert bf16.activations == 10 + 20 + 30 + 5


def test_an_average_is_one_copy_of_what_is_trained() -> None:
    found = estimate(FACTS, ("dit",), choice(ema_decay=0.99), "train")
    assert found.average == found.gradients == 24


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("adamw", 8, 8.1), ("adafactor", 0, 0.2), ("muon", 4, 4.1), ("adamw8bit", 2, 3)],
)
def test_the_state_of_an_optimizer_is_seen(
    name: str, least: float, most: float
) -> None:
    trial = choose_optimizer(TrainConfig(model="tiny", optimizer=name)).trial
    assert least <= state_bytes(trial) <= most
