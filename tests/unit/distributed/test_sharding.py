"""Sharding is a record that says nothing more than it is told."""

from dstrain.distributed.sharding import Sharding


def test_without_more_words_every_process_has_a_part_of_everything() -> None:
    assert Sharding() == Sharding("full", reshard_after_forward=True, offload=False)
