"""Values are moved to a device whole, and never cast."""

import torch
from dstrain.training.batch import to_device


def test_tensors_in_lists_and_records_are_moved_and_nothing_is_cast() -> None:
    half = torch.ones(2, dtype=torch.bfloat16)
    value = {
        "a": [half, {"b": torch.ones(1, dtype=torch.int64)}],
        "c": "text",
        "d": None,
    }
    moved = to_device(value, torch.device("meta"))
    assert moved["a"][0].device.type == moved["a"][1]["b"].device.type == "meta"
    assert moved["a"][0].dtype == torch.bfloat16
    assert moved["a"][1]["b"].dtype == torch.int64
    assert (moved["c"], moved["d"]) == ("text", None)
    assert half.device.type == "cpu"


def test_a_tensor_that_is_there_already_is_not_copied() -> None:
    here = torch.ones(2)
    assert to_device([here], torch.device("cpu"))[0] is here
