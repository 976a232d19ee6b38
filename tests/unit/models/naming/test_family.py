"""One word tells the family of a model among those that are asked."""

from pathlib import Path

import pytest
from dstrain.errors import UsageError
from dstrain.models.naming.family import family_of
from dstrain.registry.discovery import load_family

from tests.support.family import MODEL, write

pytestmark = pytest.mark.usefixtures("tiny")


def test_the_family_is_one_of_those_that_are_asked(tmp_path: Path) -> None:
    others = [load_family(name) for name in ("qwen_image", "wan")]
    write(tmp_path / "model")
    for value in ("Tiny/Tiny", str(tmp_path / "model")):
        assert family_of(value, [*others, MODEL]) is MODEL
        with pytest.raises(UsageError, match="families: qwen_image, wan") as caught:
            family_of(value, others, ["tiny was not asked, since it is broken: why"])
        assert caught.value.help_lines[1:] == (
            "tiny was not asked, since it is broken: why",
        )
