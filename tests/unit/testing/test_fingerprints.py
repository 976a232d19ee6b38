"""Fingerprints tell values apart, agree within rounding, and change only under a new
version.
"""

import json
from pathlib import Path

import pytest
import torch
from dstrain.errors import UsageError
from dstrain.testing.__main__ import write as write_golden
from dstrain.testing.fingerprints import fingerprint, matches
from PIL import Image

from tests.support.kit import install_family


def test_fingerprints_change_only_under_a_new_version(site: Path) -> None:
    changes = (
        (
            "units.py",
            "images_to_tensor([input_image])",
            "0.99 * images_to_tensor([input_image])",
        ),
    )
    tests = install_family("dimmed", site, changes)
    with pytest.raises(
        UsageError,
        match=r"encode_image 1: makes another input_latents for base than recorded",
    ):
        write_golden("dimmed", tests)
    raised = (
        ("pipeline.py", "units.encode_image)", "Unit(units.encode_image, version=2))"),
        ("pipeline.py", "    PipelineSpec,\n", "    PipelineSpec,\n    Unit,\n"),
    )
    tests = install_family("versioned", site, (*changes, *raised))
    write_golden("versioned", tests)
    assert set(json.loads((tests / "fingerprints.json").read_text())) == {
        "encode_image 2",
        "encode_prompt 1",
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
