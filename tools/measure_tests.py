"""Print what the tests weigh and how deep they reach: lines, lines of code and their
tokens, internal names, patches and sentences, by group.

`python tools/measure_tests.py [--names GROUP]`; with a group, the internal names that its
files reach, and in how many files.

An *internal name* is a dotted name of `dstrain` or of a plugin's package, outside
`dstrain`, `dstrain.plugin`, `dstrain.testing` and the `__init__` of a package. It counts
once, however many tests reach it, by import, as an attribute of an imported module, or in a
string, such as a script or the target of a patch. A module counts if it is imported whole.

A *sentence* is a line of a string that shares four words in a row with a message of the
product. A *patch* is a call of `setattr` of pytest's MonkeyPatch.
"""

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.measure_house import Module  # noqa: E402  # of the project's folder

PUBLIC = frozenset({"dstrain", "dstrain.plugin", "dstrain.testing"})
DOTTED = re.compile(r"\bdstrain(?:_\w+)?(?:[.:]\w+)+")
IMPORT = re.compile(r"\bfrom (dstrain[\w.]*) import \(?([\w,\s]+)")
WORDS_IN_A_ROW = 4


def test_files() -> list[Path]:
    """Return the files of all tests, with what they share."""
    found = [*(ROOT / "tests").rglob("*.py"), ROOT / "conftest.py"]
    for folder in (ROOT / "plugins").glob("*/tests"):
        found += folder.rglob("*.py")
    return sorted(found)


def group_of(path: Path) -> str:
    """Return a file's group: `unit/data`, `reliability`, `plugins/wan`."""
    first, *rest = path.relative_to(ROOT).parts
    if first == "plugins":
        return f"plugins/{rest[0]}"
    if rest and rest[0] == "unit" and len(rest) > 2:
        return f"unit/{rest[1]}"
    return rest[0] if len(rest) > 1 else "conftest"


@cache
def packages() -> dict[str, bool]:
    """Return the project's modules, and whether each is a package."""
    roots = [ROOT / "core/dstrain", *(ROOT / "plugins").glob("*/dstrain_*")]
    found = {}
    for root in roots:
        for path in root.rglob("*.py"):
            parts = path.relative_to(root.parent).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            found[".".join(parts[:-1] if is_package else parts)] = is_package
    return found


def internal_name(dotted: str) -> str | None:
    """Return the internal name that a dotted one is or begins with, if any."""
    parts = dotted.replace(":", ".").split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        if module in packages():
            break
    else:
        return None
    if module in PUBLIC or packages()[module]:
        return None
    return ".".join(parts[: end + 1])


def internal_names(source: str) -> set[str]:
    """Return the internal names that a test file reaches."""
    tree = ast.parse(source)
    modules = {}
    reached = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                name = f"{node.module}.{one.name}"
                reached.add(name)
                modules[one.asname or one.name] = name
        elif isinstance(node, ast.Import):
            for one in node.names:
                reached.add(one.name)
                first = one.name.partition(".")[0]
                modules[one.asname or first] = one.name if one.asname else first
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            reached.update(DOTTED.findall(node.value))
            for module, names in IMPORT.findall(node.value):
                words = (one.split(" as ")[0].strip() for one in names.split(","))
                reached.update(f"{module}.{word}" for word in words if word)
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="setattr"),
                args=[ast.Name(module), ast.Constant(str(name)), *_],
            ) if module in modules:
                reached.add(f"{modules[module]}.{name}")
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in modules:
                reached.add(f"{modules[first]}.{rest}")
    found = {name for one in reached if (name := internal_name(one))}
    used_modules = {name.rpartition(".")[0] for name in found}
    return found - used_modules


def strings(path: Path) -> Iterator[ast.Constant]:
    """Yield a file's strings, without docstrings."""
    tree = ast.parse(path.read_text("utf-8"))
    bodies = (getattr(node, "body", None) for node in ast.walk(tree))
    statements = [one for body in bodies if isinstance(body, list) for one in body]
    docs = {id(one.value) for one in statements if isinstance(one, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docs:
            yield node


def rows_of_words(text: str) -> set[tuple[str, ...]]:
    """Return each four words in a row of a text."""
    words = re.findall("[a-z]+", text.lower())
    ends = range(WORDS_IN_A_ROW, len(words) + 1)
    return {tuple(words[end - WORDS_IN_A_ROW : end]) for end in ends}


@cache
def messages() -> frozenset[tuple[str, ...]]:
    """Return each four words in a row of the strings of core and plugins."""
    files = [*(ROOT / "core/dstrain").rglob("*.py")]
    files += (ROOT / "plugins").glob("*/dstrain_*/**/*.py")
    texts = (str(one.value) for path in files for one in strings(path))
    return frozenset(row for text in texts for row in rows_of_words(text))


def sentences(path: Path) -> int:
    """Count the lines of a file's strings that repeat a message."""
    lines = set()
    for one in strings(path):
        if rows_of_words(str(one.value)) & messages():
            lines.update(range(one.lineno, (one.end_lineno or one.lineno) + 1))
    return len(lines)


def patches(source: str) -> int:
    """Count the calls of `setattr` of pytest's MonkeyPatch."""
    calls = [
        node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)
    ]
    return sum(
        isinstance(one, ast.Attribute) and one.attr == "setattr" for one in calls
    )


def main() -> None:
    """Print the table, or the internal names of a group."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", metavar="GROUP")
    wanted = parser.parse_args().names
    figures: dict[str, Counter[str]] = defaultdict(Counter)
    reached: dict[str, Counter[str]] = defaultdict(Counter)
    for path in test_files():
        group = group_of(path)
        source = path.read_text("utf-8")
        reached[group].update(internal_names(source))
        figures[group]["files"] += 1
        figures[group]["lines"] += len(source.splitlines())
        figures[group].update(Module(path.stem, (path,)).code)
        figures[group]["patches"] += patches(source)
        figures[group]["sentences"] += sentences(path)
    if wanted:
        for name, count in sorted(reached[wanted].items()):
            print(f"{count:4} {name}")
        return
    columns = ("files", "lines", "code", "tokens", "patches", "sentences")
    print(f"{'group':20}", *(f"{one:>9}" for one in (*columns, "names")))
    for group, counts in sorted(figures.items()):
        numbers = (counts[one] for one in columns)
        print(f"{group:20}", *(f"{one:9}" for one in (*numbers, len(reached[group]))))
    sums = [sum(counts[one] for counts in figures.values()) for one in columns]
    names = {name for group in reached.values() for name in group}
    print(f"{'all':20}", *(f"{one:9}" for one in (*sums, len(names))))


if __name__ == "__main__":
    main()
