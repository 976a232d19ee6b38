"""The conformance kit tests at toy sizes that a family keeps its contract.

It needs pytest. A family's `tests/test_conformance.py`:

    from dstrain.testing import Conformance

    class TestConformance(Conformance):
        family = "my_model"

The plans and fingerprints that it compares lie beside that file; `python -m
dstrain.testing FAMILY FOLDER` writes them.
"""

import pytest

# Before they are imported, hence E402: pytest then says what stood on both sides of a
# failed assert.
pytest.register_assert_rewrite(
    *(
        f"dstrain.testing.{name}"
        for name in ("declared", "noisy", "trainable", "saved", "lora_files")
    )
)

from dstrain.testing.contract import Published, PublishedLatents  # noqa: E402
from dstrain.testing.declared import Declared  # noqa: E402
from dstrain.testing.lora_files import LoraCase, LoraFiles  # noqa: E402
from dstrain.testing.loras import LoraReader  # noqa: E402
from dstrain.testing.noisy import Noisy  # noqa: E402
from dstrain.testing.saved import Saved  # noqa: E402
from dstrain.testing.trainable import Trainable  # noqa: E402

__all__ = (
    "Conformance",
    "LoraCase",
    "LoraFiles",
    "LoraReader",
    "Published",
    "PublishedLatents",
)


class Conformance(Declared, Noisy, Trainable, Saved):
    """The contract of one family, as tests.

    Subclass it as `TestConformance` in the family's `tests/test_conformance.py`, where
    the plans and fingerprints lie. The static methods
    `published` and `published_latents` may run the published pipeline, for comparison
    (see `Published` and `PublishedLatents`).
    """
