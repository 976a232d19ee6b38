"""Samples to a batch: joined, padded to the longest of this batch alone, or refused by
name.
"""

from typing import Any

import pytest
import torch
from dstrain import Frames, UsageError
from dstrain.training.collate import collate


def ramp(*shape: int, start: int = 1) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float32).view(shape)


def test_tensors_are_joined_along_their_first_axis() -> None:
    batch = collate([{"latents": ramp(1, 2)}, {"latents": ramp(1, 2, start=5)}], {})
    assert torch.equal(batch["latents"], torch.tensor([[1.0, 2.0], [5.0, 6.0]]))


@pytest.mark.parametrize("axis", [1, 2])
def test_the_named_axis_is_padded_with_zeros_at_its_end(axis: int) -> None:
    short, long = ramp(1, 2, 2), ramp(1, *(3 if i == axis else 2 for i in (1, 2)))
    first, second = collate([{"emb": short}, {"emb": long}], {"emb": axis})["emb"]
    assert torch.equal(second, long[0])
    assert torch.equal(first.narrow(axis - 1, 0, 2), short[0])
    assert not first.narrow(axis - 1, 2, 1).any()


def test_a_masks_padding_is_false_and_it_stays_a_mask() -> None:
    masks = [{"mask": torch.ones(1, length, dtype=torch.bool)} for length in (1, 3)]
    padded = collate(masks, {"mask": 1})["mask"]
    assert padded.tolist() == [[True, False, False], [True, True, True]]


def test_padding_depends_on_this_batch_alone_and_is_of_both_branches() -> None:
    samples = [{"negative.emb": ramp(1, length)} for length in (2, 5, 3)]
    for rows, shape in (((0, 1), (2, 5)), ((0,), (1, 2)), ((0, 2), (2, 3))):
        batch = collate([samples[row] for row in rows], {"emb": 1})
        assert batch["negative.emb"].shape == shape


def test_a_batch_of_one_is_the_sample() -> None:
    sample = {"emb": ramp(1, 3), "many": [ramp(1, 2)], "size": 4, "none": None}
    sample["scale"] = torch.tensor(2.0)
    batch = collate([sample], {"emb": 1})
    assert torch.equal(batch["emb"], sample["emb"])
    assert torch.equal(batch["many"][0], sample["many"][0])
    assert (batch["size"], batch["none"]) == (4, None)
    assert batch["scale"].shape == ()


def test_lists_and_records_are_joined_item_by_item() -> None:
    samples = [
        {"value": {"many": [ramp(1, 1), ramp(1, length)], "size": 3}}
        for length in (1, 2)
    ]
    value = collate(samples, {"many": 1})["value"]
    assert [item.shape for item in value["many"]] == [(2, 1), (2, 2)]
    assert value["size"] == 3


def test_gradients_go_through_joining_and_padding() -> None:
    short, long = ramp(1, 1).requires_grad_(), ramp(1, 2).requires_grad_()
    joined = collate([{"emb": short}, {"emb": long}], {"emb": 1})["emb"]
    (joined * torch.tensor([[2.0, 9.0], [3.0, 4.0]])).sum().backward()
    assert short.grad is not None and short.grad.tolist() == [[2.0]]
    assert long.grad is not None and long.grad.tolist() == [[3.0, 4.0]]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a", "b"),
        (1, 2),
        (1, True),
        (None, 1),
        (ramp(1, 1), None),
        (None, ramp(1, 1)),
        (ramp(1, 1), ramp(1, 2)),
        (ramp(1, 1), ramp(1, 1, 1)),
        (ramp(1, 1), ramp(1, 1).double()),
        (ramp(2, 1), ramp(2, 1)),
        (ramp(), ramp()),
        ([ramp(1, 1)], [ramp(1, 1), ramp(1, 1)]),
        ({"a": 1}, {"b": 1}),
        (Frames(ramp(1, 1), 8.0), Frames(ramp(1, 1, start=2), 8.0)),
        (Frames(ramp(1, 1), 8.0), Frames(ramp(1, 1), 9.0)),
    ],
)
def test_samples_that_differ_in_what_cannot_be_joined_are_refused_by_name(
    one: Any, other: Any
) -> None:
    with pytest.raises(UsageError, match=r"value style(.|\n)*--batch_size 1"):
        collate([{"style": one}, {"style": other}], {})


def test_the_error_shows_what_each_sample_has() -> None:
    samples = [{"value": {"mask": ramp(1, 3)}}, {"value": {"mask": None}}]
    with pytest.raises(UsageError, match=r"float32 \[1, 3\]; None") as caught:
        collate(samples, {})
    assert caught.value.where == "batch, value value/mask"
    collate(samples[:1], {})


def test_padding_hides_no_other_difference() -> None:
    with pytest.raises(UsageError, match="value emb"):
        collate([{"emb": ramp(1, 2, 3)}, {"emb": ramp(1, 4, 2)}], {"emb": 1})


def test_equal_frames_are_one_value() -> None:
    frames = Frames(ramp(1, 1), 8.0)
    samples = [{"clip": frames}, {"clip": Frames(ramp(1, 1), 8.0)}]
    assert collate(samples, {})["clip"] is frames


def test_a_listed_value_is_what_each_sample_has_and_others_must_agree() -> None:
    samples = [
        {"seed": 3, "steps": 4, "pair": [1]},
        {"seed": 5, "steps": 4, "pair": [1, 2]},
    ]
    batch = collate(samples, {}, {"seed", "pair"})
    assert batch == {"seed": [3, 5], "steps": 4, "pair": [[1], [1, 2]]}
    with pytest.raises(UsageError, match="value seed"):
        collate(samples, {}, {"pair"})
