"""Every draw depends on its key alone."""

from collections import Counter

import numpy as np
import pytest
import torch
from dstrain import Rng, SampleKey
from dstrain.randomness import choose, seed_global

GOLDEN = (1.4760138988494873, -0.23928557336330414, 0.715182363986969)
GOLDEN_CHOICES = [0, 2, 2, 2, 0, 2, 1, 0, 2, 2, 2, 0]
KEY = SampleKey(seed=1, epoch=2, repeat=3, row=4, chunk=5)


def test_numbers_of_a_key_stay_what_they_are() -> None:
    """A run resumed under a later version has the same noise."""
    rng = Rng([SampleKey(1, 2, 3, 4)])
    normal, uniform = rng.normal("noise", (2,))[0], rng.uniform("timestep")
    assert [*normal.tolist(), *uniform.tolist()] == pytest.approx(GOLDEN, abs=1e-7)
    keys = [KEY._replace(row=row) for row in range(12)]
    assert [choose(key, "variant", (3, 1, 2)) for key in keys] == GOLDEN_CHOICES


def test_streams_count_their_own_draws() -> None:
    plain, mixed = Rng([KEY]), Rng([KEY])
    mixed.uniform("timestep")
    mixed.normal("jitter", (7,))
    first = plain.normal("noise", (4,))
    assert torch.equal(first, mixed.normal("noise", (4,)))
    second = plain.normal("noise", (4,))
    assert not torch.equal(first, second)
    assert torch.equal(second, mixed.normal("noise", (4,)))
    assert not torch.equal(first, Rng([KEY]).normal("jitter", (4,)))


def test_numbers_are_fp32_on_the_cpu_and_spread_as_they_should() -> None:
    rng = Rng([SampleKey(0, 0, 0, row) for row in range(2_000)])
    normal, uniform = rng.normal("noise", (20,)), rng.uniform("timestep", (20,))
    assert normal.dtype == uniform.dtype == torch.float32
    assert normal.device.type == uniform.device.type == "cpu"
    assert abs(float(normal.mean())) < 0.02
    assert abs(float(normal.std()) - 1) < 0.02
    assert float(uniform.min()) >= 0
    assert float(uniform.max()) < 1
    assert float(uniform.histc(10, 0, 1).min()) > 3_700
    between = np.corrcoef(normal[:-1].flatten(), normal[1:].flatten())[0, 1]
    assert abs(float(between)) < 0.02


def test_drawing_neither_reads_nor_moves_the_global_generator() -> None:
    torch.manual_seed(1)
    first, state = Rng([KEY]).normal("noise", (3,)), torch.get_rng_state()
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(first, Rng([KEY]).normal("noise", (3,)))


def test_the_global_generator_is_seeded_by_key_and_stream() -> None:
    drawn = []
    for key, stream in (
        (KEY, "step"),
        (KEY, "step"),
        (KEY._replace(repeat=9), "step"),
        (KEY, "lora"),
    ):
        torch.rand(3)
        seed_global(key, stream)
        drawn.append(tuple(torch.rand(4).tolist()))
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


def test_seeds_that_agree_in_their_low_32_bits_differ() -> None:
    low, high = (
        Rng([SampleKey(seed, 0, 0, 0)]).normal("noise", (4,)) for seed in (5, 5 + 2**32)
    )
    assert not torch.equal(low, high)


def test_a_units_streams_are_its_own() -> None:
    rng = Rng([SampleKey(0, 0, 0, 1)])
    drawn = [
        rng.normal("noise", (3,)),
        rng.scoped("one").normal("noise", (3,)),
        rng.scoped("two").normal("noise", (3,)),
    ]
    assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    assert torch.equal(rng.scoped("one").normal("noise", (3,)), drawn[1])


def test_what_a_key_chooses_is_as_probable_as_its_weight() -> None:
    weights = (1, 0, 6, 3)
    keys = [SampleKey(0, 0, 0, row) for row in range(4000)]
    counts = Counter(choose(key, "variant", weights) for key in keys)
    for number, weight in enumerate(weights):
        # Six standard deviations of binomial distributions of 4,000.
        deviation = (400 * weight * (1 - weight / 10)) ** 0.5
        assert abs(counts[number] - 400 * weight) <= 6 * deviation
    assert choose(KEY, "variant", weights) == choose(KEY, "variant", weights)
    assert {choose(key, "other", (2**62, 2**62)) for key in keys[:40]} == {0, 1}


def test_of_weights_that_are_all_0_nothing_is_chosen() -> None:
    with pytest.raises(ValueError, match="0"):
        choose(KEY, "variant", (0, 0))
