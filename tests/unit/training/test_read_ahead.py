"""Items are taken ahead in their order, errors come in their place, and the thread ends
when it is closed.
"""

import threading
from collections.abc import Iterator
from threading import Event

import pytest
from dstrain.training.read_ahead import NotReady, ReadAhead

LONG = 60.0
"""Seconds that no test waits."""


def test_items_come_in_order_and_the_end_stays_the_end() -> None:
    ahead = ReadAhead(range(100), 2, LONG)
    assert list(ahead) == list(range(100))
    assert list(ahead) == []
    ahead.close()


def test_an_error_comes_in_the_place_of_its_item() -> None:
    def items() -> Iterator[int]:
        yield 0
        yield 1
        raise OSError("no such device")

    ahead = ReadAhead(items(), 4, LONG)
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(OSError, match="no such device"):
        next(ahead)
    assert list(ahead) == []
    ahead.close()


def test_items_are_taken_while_one_is_used_and_no_more_than_asked() -> None:
    taken: list[int] = []
    enough = Event()

    def items() -> Iterator[int]:
        for item in range(100):
            taken.append(item)
            if item == 4:
                enough.set()
            yield item

    ahead = ReadAhead(items(), 3, LONG)
    assert next(ahead) == 0
    # One is used, three wait, and one waits for room.
    assert enough.wait(LONG)
    ahead.close()
    assert taken == [0, 1, 2, 3, 4]


def test_a_wait_can_be_looked_into() -> None:
    go_on = Event()

    def items() -> Iterator[int]:
        go_on.wait(LONG)
        yield 0

    ahead = ReadAhead(items(), 1, 0.01)
    for _ in range(3):
        with pytest.raises(NotReady):
            next(ahead)
    go_on.set()
    found = []
    while not found:
        try:
            found.append(next(ahead))
        except NotReady:
            continue
    assert found == [0]
    ahead.close()


def test_a_closed_thread_has_ended() -> None:
    before = threading.active_count()
    for used in range(3):
        ahead = ReadAhead(iter(range(1000)), 2, LONG)
        for _ in range(used):
            next(ahead)
        ahead.close()
        ahead.close()
    assert threading.active_count() == before
