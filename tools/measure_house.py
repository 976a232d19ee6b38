"""Print the size and the shape of the project's distributions: packages, modules, lines,
tokens, public names, options, import chains and circles.

`python tools/measure_house.py` prints the core's packages and every distribution;
`--budget` compares the distributions with `[tool.house]` of pyproject.toml, and fails where
one is above its number.

Of core, the conformance kit (`testing`) and the template count nowhere. A public name is a
pair of a module and a name in it that another module imports; a name that is imported
through the face of a package counts where it is defined, and so does its import.
"""

import ast
import statistics
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = frozenset({"testing", "template"})
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
OPTIONS = ("option", "Option")
"""What declares an option of the command line: of core, and of a family's record."""
MOST_NAMES = 25
"""Names that the face of a package lists, at most."""
MOST_FACES = 4
"""Packages of core whose faces a plugin may import beside `INTERFACE`."""
OPEN = (
    "dstrain",
    "dstrain.plugin",
    "dstrain.plugin.commands",
    "dstrain.plugin.lora",
    "dstrain.plugin.noise",
)
"""What scripts and plugins may use is longer, and is used outside the project."""


@dataclass(frozen=True)
class Module:
    """A module of a package, read once; a stub beside it counts with it."""

    name: str
    paths: tuple[Path, ...]

    @cached_property
    def trees(self) -> tuple[ast.Module, ...]:
        """The syntax of its files."""
        return tuple(ast.parse(path.read_text("utf-8")) for path in self.paths)

    @cached_property
    def lines(self) -> int:
        """Lines of its files."""
        return sum(len(path.read_text("utf-8").splitlines()) for path in self.paths)

    @cached_property
    def code(self) -> Counter[str]:
        """Its lines of code without docstrings, their tokens, and its comments."""
        found: Counter[str] = Counter()
        for path, tree in zip(self.paths, self.trees, strict=True):
            documented = {line for node in docstrings(tree) for line in lines_of(node)}
            code = set()
            with path.open("rb") as file:
                for token in tokenize.tokenize(file.readline):
                    found["comments"] += token.type == tokenize.COMMENT
                    if token.type not in LAYOUT and token.start[0] not in documented:
                        found["tokens"] += 1
                        code.update(range(token.start[0], token.end[0] + 1))
            found["code"] += len(code)
        return found

    @property
    def is_face(self) -> bool:
        """Whether it only says where the names of a package are."""
        return any(path.name == "__init__.pyi" for path in self.paths)


def docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    """Yield the statements that are a text alone."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr):
                value = statement.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield statement


def lines_of(node: ast.stmt) -> range:
    """Return the numbers of a statement's lines."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


class House:
    """The modules of the project, and who imports what."""

    def __init__(self, root: Path) -> None:
        packages = [root / "core/dstrain", *sorted(root.glob("plugins/*/dstrain_*"))]
        self.distributions = {
            package: package.parent.relative_to(root).as_posix()
            for package in packages
            if package.is_dir()
        }
        self.modules: dict[str, Module] = {}
        self.kit: list[Module] = []
        for package in self.distributions:
            files: dict[str, list[Path]] = {}
            for path in sorted(package.rglob("*.py*")):
                parts = path.relative_to(package.parent).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                if path.suffix not in (".py", ".pyi") or "template" in parts:
                    continue
                if "testing" in parts:
                    self.kit.append(Module(name, (path,)))
                else:
                    files.setdefault(name, []).append(path)
            self.modules |= {
                name: Module(name, tuple(paths)) for name, paths in files.items()
            }

    @cached_property
    def faces(self) -> Mapping[str, Mapping[str, str]]:
        """Package, or part of the interface -> each name that its stub lists, and the module
        that defines it."""
        return {
            name: {
                alias.name: str(node.module)
                for path, tree in zip(module.paths, module.trees, strict=True)
                if path.suffix == ".pyi"
                for node in tree.body
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
            for name, module in self.modules.items()
            if any(path.suffix == ".pyi" for path in module.paths)
        }

    def imported(self, module: Module) -> Iterator[tuple[str, str]]:
        """Yield what a module imports from others: where it is defined, and its name; the
        name of an imported module is ''. Late imports and those for types count.
        """
        for tree in module.trees:
            for node in ast.walk(tree):
                if (
                    not isinstance(node, ast.ImportFrom)
                    or not node.module
                    or node.level
                ):
                    continue
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    place = self.faces.get(node.module, {}).get(alias.name, node.module)
                    if name in self.modules:
                        yield name, ""
                    elif place in self.modules and place != module.name:
                        yield place, alias.name

    @cached_property
    def graph(self) -> Mapping[str, frozenset[str]]:
        """Module -> the modules that it imports; a face imports none."""
        return {
            name: frozenset(place for place, _ in self.imported(module)) - {name}
            if not module.is_face
            else frozenset()
            for name, module in self.modules.items()
        }

    @cached_property
    def public_names(self) -> frozenset[tuple[str, str]]:
        """The pairs of module and name that another module imports."""
        return frozenset(
            pair
            for module in self.modules.values()
            for pair in self.imported(module)
            if pair[1]
        )

    def class_lines(self) -> Iterator[tuple[str, int]]:
        """Yield each class with its lines and those of the classes that it inherits from,
        as far as they are the project's.
        """
        own: dict[str, int] = {}
        bases: dict[str, list[str]] = {}
        for module in self.modules.values():
            for tree in module.trees:
                for node in ast.walk(tree):
                    if isinstance(node, ast.ClassDef):
                        own[node.name] = len(lines_of(node))
                        bases[node.name] = [ast.unparse(base) for base in node.bases]

        def ancestors(name: str) -> set[str]:
            known = [base for base in bases[name] if base in own]
            return {name}.union(*(ancestors(base) for base in known))

        for name in own:
            yield name, sum(own[one] for one in ancestors(name))

    def figures(self, package: Path) -> dict[str, float]:
        """Return what a distribution has: what its budget limits."""
        modules = [
            module
            for module in self.modules.values()
            if module.name.partition(".")[0] == package.name
        ]
        tables = [
            path
            for path in package.rglob("*.json")
            if not LEFT_OUT & {*path.relative_to(package).parts}
        ]
        calls = (
            node.func
            for module in modules
            for tree in module.trees
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
        )
        code = sum((module.code for module in modules), Counter[str]())
        found: dict[str, float] = {
            "lines": sum(module.lines for module in modules)
            + sum(len(path.read_text("utf-8").splitlines()) for path in tables),
            "tokens": code["tokens"],
            "tokens_per_line": round(code["tokens"] / max(code["code"], 1), 2),
            "modules": len(modules),
            "public_names": sum(
                place.partition(".")[0] == package.name
                for place, _ in self.public_names
            ),
            "options": sum(
                isinstance(call, ast.Name) and call.id in OPTIONS for call in calls
            ),
        }
        if package.name == "dstrain":
            sizes = sorted(module.lines for module in modules if not module.is_face)
            interface = (self.faces[name] for name in INTERFACE[1:2])
            found |= {
                "plugin_names": sum(map(len, interface)),
                "chain": len(longest_chain(self.graph)),
                "imports_of_a_module": max(map(len, self.graph.values())),
                "lines_of_a_class": max(lines for _, lines in self.class_lines()),
                "median_module": statistics.median(sizes),
                "largest_tenth": statistics.quantiles(sizes, n=10)[-1],
            }
        return found


INTERFACE = (*OPEN, "dstrain.plugin.functional")
"""What every plugin may import of core; a few may import further faces of packages."""


def faces_of(house: House, package: str) -> set[str]:
    """Return the modules of core that a plugin's package imports, beside the interface."""
    return {
        str(node.module)
        for module in house.modules.values()
        if module.name.partition(".")[0] == package
        for tree in module.trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and str(node.module).partition(".")[0] == "dstrain"
        and node.module not in INTERFACE
    }


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
            chains = (chain(target) for target in graph[node])
            known[node] = [node, *max(chains, key=len, default=[])]
        return known[node]

    return max((chain(node) for node in graph), key=len)


def breaches(house: House, budget: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return where a distribution is above its budget, has none, or breaks a rule."""
    found = []
    for package, distribution in house.distributions.items():
        limits = budget.get(distribution, {})
        for name, figure in house.figures(package).items():
            limit = limits.get(name, 0)
            if figure > limit:
                found.append(f"{distribution}: {name} is {figure:g}, at most {limit:g}")
        if package.name != "dstrain":
            others = faces_of(house, package.name) - {*limits.get("faces", ())}
            found += [f"{distribution}: imports {one} of core" for one in others]
            if len(limits.get("faces", ())) > MOST_FACES:
                found.append(f"{distribution}: more than {MOST_FACES} faces of core")
    for name, names in house.faces.items():
        if name not in OPEN:
            outside = {
                one
                for module in (*house.modules.values(), *house.kit)
                if not f"{module.name}.".startswith(f"{name}.")
                for place, one in house.imported(module)
                if names.get(one) == place
            }
            found += [
                f"{name}: {one} is used by no other package"
                for one in {*names} - outside
            ]
            if len(names) > MOST_NAMES:
                found.append(f"{name}: {len(names)} names, at most {MOST_NAMES}")
    for module in (*house.modules.values(), *house.kit):
        for place, one in house.imported(module):
            if one.startswith("_") and not one.startswith("__"):
                found.append(f"{module.name}: {one} is private to {place}")
    return found


def print_packages(house: House) -> None:
    """Print a row for each package of core."""
    groups: dict[str, list[Module]] = {}
    for module in house.modules.values():
        first, _, rest = module.name.partition(".")
        if first == "dstrain":
            groups.setdefault(rest.partition(".")[0] or "dstrain", []).append(module)
    columns = ("modules", "lines", "tokens", "tokens/line", "comments")
    print(f"{'package':16}", *(f"{one:>11}" for one in columns))
    for name, modules in sorted(groups.items()):
        code = sum((module.code for module in modules), Counter[str]())
        lines = sum(module.lines for module in modules)
        rate = f"{code['tokens'] / max(code['code'], 1):.1f}"
        row = (len(modules), lines, code["tokens"], rate, code["comments"])
        print(f"{name:16}", *(f"{one:>11}" for one in row))


def main(words: list[str]) -> int:
    """Print the tables, or the breaches of the budget; return the exit status."""
    house = House(ROOT)
    if words == ["--budget"]:
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
        found = breaches(house, settings["tool"]["house"])
        sizes = [len(names) for name, names in house.faces.items() if name not in OPEN]
        within = f"the house is within its budget; {len(sizes)} faces have at most {max(sizes)} names"
        print("\n".join(found) or within)
        return bool(found)
    print_packages(house)
    for package, distribution in house.distributions.items():
        figures = house.figures(package).items()
        print(f"{distribution}:", ", ".join(f"{name} {one:g}" for name, one in figures))
    found_circles = circles(house.graph)
    print("circles:", found_circles or "none")
    if not found_circles:
        chain = longest_chain(house.graph)
        short = (name.removeprefix("dstrain.") for name in chain)
        print(f"longest chain: {len(chain)}:", " -> ".join(short))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
