"""Samples to a batch: joined, padded to its longest, or refused by name."""

import pytest
import torch
from dstrain import UsageError
from dstrain.training.collate import collate


def ramp(*shape: int, start: int = 1) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float32).view(shape)


@pytest.mark.parametrize("axis", [1, 2])
def test_the_named_axis_is_padded_with_zeros_at_its_end(axis: int) -> None:
    short, long = ramp(1, 2, 2), ramp(1, *(3 if i == axis else 2 for i in (1, 2)))
    first, second = collate([{"emb": short}, {"emb": long}], {"emb": axis})["emb"]
    assert torch.equal(second, long[0])
    assert torch.equal(first.narrow(axis - 1, 0, 2), short[0])
    assert not first.narrow(axis - 1, 2, 1).any()


def test_lists_and_records_are_joined_item_by_item() -> None:
    samples = [
        {"value": {"many": [ramp(1, 1), ramp(1, length)], "size": 3}}
        for length in (1, 2)
    ]
    value = collate(samples, {"many": 1})["value"]
    assert [item.shape for item in value["many"]] == [(2, 1), (2, 2)]
    assert value["size"] == 3


def test_the_error_shows_what_each_sample_has() -> None:
    samples = [{"value": {"mask": ramp(1, 3)}}, {"value": {"mask": None}}]
    with pytest.raises(UsageError, match=r"float32 \[1, 3\]; None") as caught:
        collate(samples, {})
    assert caught.value.where == "batch, value value/mask"
    collate(samples[:1], {})


def test_a_listed_value_is_what_each_sample_has_and_others_must_agree() -> None:
    samples = [
        {"seed": 3, "steps": 4, "pair": [1]},
        {"seed": 5, "steps": 4, "pair": [1, 2]},
    ]
    batch = collate(samples, {}, {"seed", "pair"})
    assert batch == {"seed": [3, 5], "steps": 4, "pair": [[1], [1, 2]]}
    with pytest.raises(UsageError, match="value seed"):
        collate(samples, {}, {"pair"})
