"""Fingerprints tell values apart, and agree within rounding."""

import json
from pathlib import Path

import pytest
import torch
from dstrain.testing.fingerprints import (
    changed,
    fingerprint,
    matches,
    read_fingerprints,
    write_fingerprints,
)
from PIL import Image


def test_fingerprints_within_the_tolerance_stay_as_they_are_recorded(
    tmp_path: Path,
) -> None:
    """And others are recorded anew: what changed is seen in the file."""
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    recorded = {"encode": {"emb": fingerprint(values, "emb")}}
    write_fingerprints(tmp_path, {"base": recorded})
    for factor, faults in (
        (1 + 2e-4, []),
        (0.99, ["encode: makes another emb for base than recorded"]),
    ):
        now = {"encode": {"emb": fingerprint(values * factor, "emb")}}
        before = read_fingerprints(tmp_path)
        assert changed(before, now, "base") == faults
        write_fingerprints(tmp_path, {"base": now})
        kept = now if faults else recorded
        assert read_fingerprints(tmp_path) == {
            "encode": {"base": json.loads(json.dumps(kept["encode"]))}
        }


@pytest.mark.parametrize(
    ("factor", "equal"), [(1.0, True), (1 + 2e-4, True), (1 + 5e-3, False)]
)
def test_fingerprints_are_equal_within_a_thousandth(factor: float, equal: bool) -> None:
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    assert matches(fingerprint(values, "x"), fingerprint(values * factor, "x")) is equal


def test_fingerprints_tell_shapes_elements_texts_and_pixels_apart() -> None:
    values = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    moved = values.clone()
    moved[5, 5] += 1
    black, grey = (Image.new("RGB", (8, 8), (level,) * 3) for level in (0, 9))
    for one, other in (
        (values, values.T),
        (values, moved),
        ("a", "b"),
        ([values], values),
        (black, grey),
        (1, 2),
    ):
        assert not matches(fingerprint(one, "x"), fingerprint(other, "x"))
        assert matches(
            fingerprint(one, "x"), json.loads(json.dumps(fingerprint(one, "x")))
        )
    mask = torch.ones(4, dtype=torch.bool)
    assert not matches(fingerprint(mask, "x"), fingerprint(~mask, "x"))
    assert matches(fingerprint(torch.zeros(0), "x"), fingerprint(torch.zeros(0), "x"))
