"""Write the golden plans anew: `python -m tests.paper.write_plans`, from the root of
the project. Read what changed.
"""

from .rows import PLANS, ROWS


def write_plans() -> None:
    """Write one file per row and remove files of rows that are gone."""
    PLANS.mkdir(exist_ok=True)
    for row in ROWS:
        (PLANS / f"{row.name}.txt").write_text(row.text())
    for path in PLANS.glob("*.txt"):
        if path.stem not in {row.name for row in ROWS}:
            path.unlink()


if __name__ == "__main__":
    write_plans()
