"""`python -m dstrain.testing FAMILY FOLDER` writes the plans and digests that a
family's tests in FOLDER compare.

Look at what changed before you keep it. A unit that makes something else under the
version it had is refused.
"""

import sys
import tempfile
from pathlib import Path

from dstrain.errors import DstrainError
from dstrain.registry.discovery import load_family
from dstrain.testing.golden import plan_texts, write_plans
from dstrain.testing.sketches import unit_sketches, write_sketches
from dstrain.testing.subject import Subject


def write(family_name: str, folder: Path) -> None:
    """Write both for every variant of an installed family."""
    family = load_family(family_name)
    with tempfile.TemporaryDirectory(prefix="dstrain-toy-") as place:
        subjects = [
            Subject(family, variant, Path(place) / variant)
            for variant in family.variants
        ]
        made = {subject.variant: unit_sketches(subject.values) for subject in subjects}
    versions = {
        unit.name: unit.version for subject in subjects for unit in subject.spec.units
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_sketches(folder, made, versions)
    write_plans(
        folder,
        {
            name: text
            for s in subjects
            for name, text in plan_texts(family, s.spec).items()
        },
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m dstrain.testing FAMILY FOLDER")
    try:
        write(sys.argv[1], Path(sys.argv[2]))
    except DstrainError as error:
        sys.exit(str(error))
