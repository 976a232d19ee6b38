"""Run two revisions of the project here, and compare what they compute and write.

`python -m tools.golden BASE` compares the working tree with a revision on the small set of
cases, one for each mechanism; `python -m tools.golden BASE all` on everything. Each
difference is named; the exit code is 1 if there are any. What a tree made of a case is kept
beside it in `.golden`, and not made again.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock

from tools.golden import cases
from tools.golden.compare import differences
from tools.golden.material import write_material
from tools.golden.trees import GOLDEN, Tree, libraries, prepare, remove_old, tree_of

HERE = Path(__file__).parent
MOST = 10
"""Lines about one case."""


def made_material() -> Path:
    """Return the folder of the files that cases work with."""
    source = (HERE / "material.py").read_bytes()
    place = GOLDEN / f"material-{hashlib.sha256(source).hexdigest()[:16]}"
    if not place.exists():
        building = GOLDEN / f"material-{os.getpid()}"
        building.mkdir(parents=True)
        write_material(building)
        building.rename(place)
    return place


def rows_of(table: list[cases.Case], material: Path) -> list[dict[str, Any]]:
    """Return the cases, each with the name of its results: a digest of what they depend on
    beside the tree.
    """
    runner = (HERE / "runner.py").read_text("utf-8")
    rows = []
    for row in map(asdict, table):
        parts = (json.dumps(row), material.name, runner, libraries())
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        rows.append({**row, "folder": digest[:16]})
    return rows


def start(
    tree: Tree, rows: list[dict[str, Any]], material: Path
) -> "subprocess.Popen[bytes]":
    """Start a process that runs those cases of a tree that are not done."""
    given = {"cases": rows, "material": str(material), "results": str(tree.folder)}
    file = tree.folder / "cases.json"
    file.write_text(json.dumps(given), "utf-8")
    environment = {
        "PATH": os.environ["PATH"],
        "OMP_NUM_THREADS": "1",
        "DSTRAIN_SKIP_DOWNLOAD": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = (str(tree.python), "-I", str(HERE / "runner.py"), str(file))
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)


def main() -> int:
    """Run and compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base")
    parser.add_argument("cases", nargs="?", choices=("small", "all"), default="small")
    wanted = parser.parse_args()
    chosen = cases.everything if wanted.cases == "all" else cases.small_set
    GOLDEN.mkdir(exist_ok=True)
    with FileLock(GOLDEN / "lock"):
        return compared(tree_of(wanted.base), tree_of(), list(chosen()))


def compared(base: Tree, own: Tree, table: list[cases.Case]) -> int:
    """Run both trees, print what differs, and return the exit code."""
    began = time.monotonic()
    trees = {tree.id: tree for tree in (base, own)}.values()
    for tree in trees:
        prepare(tree)
    remove_old(*trees)
    material = made_material()
    rows = rows_of(table, material)
    running = [start(tree, rows, material) for tree in trees]
    codes = [one.wait() for one in running]
    if any(codes):
        return 1
    differing = 0
    for row in rows:
        places = (tree.folder / row["folder"] for tree in (base, own))
        # Where all should work, failures that are equal would compare nothing.
        shows_errors = row["material"] == "pages" or row["name"].endswith("bad input")
        found = list(differences(*places, row["commands"], shows_errors))
        differing += bool(found)
        for line in found[:MOST]:
            print(f"{row['name']}: {line}")
        if found[MOST:]:
            print(f"{row['name']}: {len(found) - MOST} more")
    print(
        f"{differing} of {len(rows)} cases differ between {base} and {own},"
        f" after {time.monotonic() - began:.0f} s"
    )
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
