"""A layout's digest is that of its names and shapes, in any order."""

import hashlib

from dstrain.testing.layouts import layout_digest


def test_names_count_with_and_without_their_shapes_sorted() -> None:
    wanted = hashlib.md5(b"a,a:2_3,b,b:")
    assert layout_digest({"b": (), "a": (2, 3)}) == wanted.hexdigest()
    assert layout_digest({"a": (2, 3), "b": ()}) == wanted.hexdigest()
    assert layout_digest({"a": (3, 2), "b": ()}) != wanted.hexdigest()


def test_a_dictionary_in_a_file_counts_as_one_name() -> None:
    wanted = hashlib.md5(b"inner|a,a:1,z,z:2")
    assert layout_digest({"z": (2,), "inner": {"a": (1,)}}) == wanted.hexdigest()
