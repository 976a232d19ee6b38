"""Write the plans and fingerprints that a family's tests in FOLDER compare.

`python -m dstrain.testing FAMILY FOLDER`. Look at what changed before you keep it.
"""

import sys
import tempfile
from pathlib import Path

from dstrain.errors import DstrainError
from dstrain.lazy import own_process
from dstrain.registry import load_family
from dstrain.testing.family_under_test import FamilyUnderTest
from dstrain.testing.fingerprints import unit_fingerprints, write_fingerprints
from dstrain.testing.golden import plan_texts, write_plans


def write(family_name: str, folder: Path) -> None:
    """Write the plans and fingerprints of every variant of an installed family."""
    family = load_family(family_name)
    with tempfile.TemporaryDirectory(prefix="dstrain-toy-") as place:
        tested_variants = [
            FamilyUnderTest(family, variant, Path(place) / variant)
            for variant in family.variants
        ]
        made = {
            tested.variant: unit_fingerprints(tested.spec, tested.values)
            for tested in tested_variants
        }
    folder.mkdir(parents=True, exist_ok=True)
    write_fingerprints(folder, made)
    texts: dict[str, str] = {}
    for tested in tested_variants:
        texts.update(plan_texts(family, tested.spec))
    write_plans(folder, texts)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m dstrain.testing FAMILY FOLDER")
    try:
        with own_process():
            write(sys.argv[1], Path(sys.argv[2]))
    except DstrainError as error:
        sys.exit(str(error))
