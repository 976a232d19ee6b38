"""Print the size and the shape of the library: packages, modules, lines, tokens, import
chains and circles.

`python tools/measure_house.py [ROOT]`; ROOT is the folder of the package, by default
core/dstrain of this project.
"""

import ast
import sys
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PROTOCOLS = (
    "graph",
    "cache",
    "pipeline",
    "training",
    "storage",
    "errors.py",
    "randomness.py",
)
"""What a family implements and what makes a split right: the minimal core."""
LAYOUT = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)
"""Tokens that say nothing: they are not counted."""


@dataclass(frozen=True)
class Module:
    """One file, measured. code: lines with at least one token that counts."""

    path: Path
    lines: int
    code: int
    tokens: int
    comments: int


def measure(path: Path) -> Module:
    """Count a file's lines, its lines of code without docstrings, their tokens, and its
    comment lines.
    """
    docstrings = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            for statement in body:
                value = getattr(statement, "value", None)
                if (
                    isinstance(statement, ast.Expr)
                    and isinstance(value, ast.Constant)
                    and isinstance(value.value, str)
                ):
                    docstrings.update(
                        range(
                            statement.lineno,
                            (statement.end_lineno or statement.lineno) + 1,
                        )
                    )
    tokens = 0
    comments = 0
    code = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            comments += token.type == tokenize.COMMENT
            if token.type not in LAYOUT and token.start[0] not in docstrings:
                tokens += 1
                code.update(range(token.start[0], token.end[0] + 1))
    return Module(
        path, len(path.read_text("utf-8").splitlines()), len(code), tokens, comments
    )


def imports(root: Path) -> dict[str, set[str]]:
    """Return each module's imports within the package, by file name: late ones and
    those for types included.
    """
    modules = {_name(root, path): path for path in _files(root)}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
                found[name] |= {
                    target if target in modules else node.module for target in targets
                }
        found[name] = {
            target for target in found[name] if target in modules and target != name
        }
    return found


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module, the largest
    first (Tarjan 1972).
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            members = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(members) > 1:
                found.append(members)

    for node in graph:
        if node not in index:
            visit(node)
    return sorted(found, key=len, reverse=True)


def longest_chain(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the longest chain of imports; the graph must have no circle."""
    known: dict[str, list[str]] = {}

    def chain(node: str) -> list[str]:
        if node not in known:
            known[node] = [
                node,
                *max((chain(target) for target in graph[node]), key=len, default=[]),
            ]
        return known[node]

    return max((chain(node) for node in graph), key=len)


def main(root: Path) -> None:
    """Print the table."""
    modules = [measure(path) for path in _files(root)]
    groups: dict[str, list[Module]] = {}
    for module in modules:
        groups.setdefault(module.path.relative_to(root).parts[0], []).append(module)
    print(
        f"{'package':16} {'modules':>8} {'lines':>8} {'tokens':>8} {'tokens a line':>14} {'comments':>9}"
    )
    for name, members in sorted(groups.items()):
        _print_row(name, members)
    _print_row("all", modules)
    core = [
        module
        for module in modules
        if module.path.relative_to(root).parts[0] != "testing"
    ]
    _print_row("without testing", core)
    protocols = [
        module
        for module in modules
        if module.path.relative_to(root).parts[0] in PROTOCOLS
    ]
    _print_row("protocols", protocols)
    graph = imports(root)
    found = circles(graph)
    print(f"largest circle: {len(found[0]) if found else 0}", *(found[:1]))
    if not found:
        chain = longest_chain(graph)
        print(
            f"longest chain: {len(chain)}:",
            " -> ".join(name.removeprefix("dstrain.") for name in chain),
        )


def _print_row(name: str, modules: Iterable[Module]) -> None:
    members = list(modules)
    lines = sum(module.lines for module in members)
    tokens = sum(module.tokens for module in members)
    code = sum(module.code for module in members)
    comments = sum(module.comments for module in members)
    print(
        f"{name:16} {len(members):8} {lines:8} {tokens:8} {tokens / max(code, 1):14.1f} {comments:9}"
    )


def _files(root: Path) -> list[Path]:
    """Return the modules and their stubs, without the template of a plugin."""
    found = (path for path in root.rglob("*.py*") if path.suffix in (".py", ".pyi"))
    return sorted(path for path in found if "template" not in path.parts)


def _name(root: Path, path: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


if __name__ == "__main__":
    main(
        Path(sys.argv[1])
        if len(sys.argv) > 1
        else Path(__file__).resolve().parents[1] / "core/dstrain"
    )
