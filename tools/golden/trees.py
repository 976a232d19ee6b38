"""Revisions side by side: each one's sources and an environment of its own."""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / ".golden"
KEPT = 4
"""Trees that stay in `.golden`."""
LIBRARIES = Path(sysconfig.get_path("purelib"))


@dataclass(frozen=True)
class Tree:
    """What a revision installs: its core and plugins without their tests."""

    revision: str
    """As it was asked for; empty for the working tree."""
    id: str
    """The id of git's tree of these files."""

    @property
    def folder(self) -> Path:
        """Where its sources, its environment and its results are."""
        return GOLDEN / self.id

    @property
    def python(self) -> Path:
        """The Python of its environment."""
        return self.folder / "env/bin/python"

    def __str__(self) -> str:
        return f"{self.revision or 'the working tree'} ({self.id[:12]})"


def tree_of(revision: str = "") -> Tree:
    """Return the tree of a revision, or of the working tree as it is: with what is not
    committed, and without what git ignores.
    """
    with tempfile.TemporaryDirectory() as place:
        index = {"GIT_INDEX_FILE": f"{place}/index"}
        _git("read-tree", revision or "HEAD", **index)
        if not revision:
            _git("add", "--all", **index)
        left_out = (":!core", ":!plugins"), (":(glob)plugins/*/tests/**",)
        for paths in left_out:
            _git("rm", "-rfq", "--cached", "--ignore-unmatch", "--", *paths, **index)
        return Tree(revision, _git("write-tree", **index))


def _git(*words: str, **environment: str) -> str:
    done = subprocess.run(
        ("git", *words),
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    )
    return done.stdout.strip()


@cache
def libraries() -> str:
    """Return a digest of the libraries and their versions."""
    found = LIBRARIES.glob("*.dist-info")
    names = sorted(path.name for path in found if not _is_ours(path))
    return hashlib.sha256(repr(names).encode()).hexdigest()


def _is_ours(path: Path) -> bool:
    """Return whether this is the metadata of our distributions, or leads to their sources."""
    return path.name.startswith(("core-", "plugin_")) or path.suffix == ".pth"


def prepare(tree: Tree) -> None:
    """Write a tree's sources and environment, unless they are there."""
    mark = tree.folder / "libraries"
    if not (mark.exists() and mark.read_text("utf-8") == libraries()):
        shutil.rmtree(tree.folder, ignore_errors=True)
        sources = tree.folder / "sources"
        sources.mkdir(parents=True)
        packed = tree.folder / "sources.tar"
        _git("archive", f"--output={packed}", tree.id)
        shutil.unpack_archive(packed, sources, filter="data")
        packed.unlink()
        _install(tree, sources)
        mark.write_text(libraries(), "utf-8")
    os.utime(mark)


def make_environment(place: Path) -> Path:
    """Make an environment that has the libraries of this one, but none of this project's
    distributions; return its Python.
    """
    venv.create(place, with_pip=False)
    site = place / LIBRARIES.relative_to(sys.prefix)
    for path in LIBRARIES.iterdir():
        if not _is_ours(path):
            (site / path.name).symlink_to(path)
    return place / "bin/python"


def _install(tree: Tree, sources: Path) -> None:
    make_environment(tree.folder / "env")
    pip = (sys.executable, "-m", "pip", "--python", str(tree.python), "install", "-q")
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    plugins = sources.glob("plugins/*/pyproject.toml")
    packages = (str(sources / "core"), *(str(path.parent) for path in plugins))
    subprocess.run((*pip, *offline, *packages), check=True)


def remove_old(*used: Tree) -> None:
    """Remove all trees but those in use and the last ones."""
    marks = sorted(GOLDEN.glob("*/libraries"), key=lambda path: -path.stat().st_mtime)
    kept = {tree.folder for tree in used} | {mark.parent for mark in marks[:KEPT]}
    for mark in marks:
        if mark.parent not in kept:
            shutil.rmtree(mark.parent)
