"""Source is read without what changes no value, and only if it is that of the code."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dstrain.graph.source_code import (
    NoSource,
    as_json,
    find_function,
    imports,
    literal,
    names_bound,
    names_used,
    source_of,
)

UNIT = "def unit(x):\n    return x\n"


@pytest.fixture
def syntax(tmp_path: Path) -> Callable[[str], ast.Module]:
    """Return a function: a text -> its syntax as a module's."""

    def parse(text: str) -> ast.Module:
        path = tmp_path / "module.py"
        path.write_text(text)
        return source_of(str(path), {}).tree

    return parse


SAME = {
    "formatting": (UNIT, "def unit( x ) :\n\n    return (x)\n"),
    "a comment": (UNIT, "# A comment.\ndef unit(x):\n    # Another.\n    return x\n"),
    "a docstring": (UNIT, 'def unit(x):\n    """Return x."""\n    return x\n'),
    "annotations": (UNIT, "def unit(x: int) -> 'int':\n    return x\n"),
    "an annotated variable": (
        "def unit(x):\n    y = x\n    return y\n",
        "def unit(x):\n    y: int = x\n    return y\n",
    ),
    "pass": (UNIT, "def unit(x):\n    pass\n    return x\n"),
    "quotes": ("def unit():\n    return 'a'\n", 'def unit():\n    return """a"""\n'),
    "a text in pieces": (
        "def unit(x):\n    return f'a b {x}'\n",
        "def unit(x):\n    return 'a ' f'b {x}'\n",
    ),
}
OTHER = {
    "another value": (UNIT, "def unit(x):\n    return -x\n"),
    "a default": (UNIT, "def unit(x=1):\n    return x\n"),
    "1 and 1.0": ("def unit():\n    return 1\n", "def unit():\n    return 1.0\n"),
    "fields of a class": ("class A:\n    x: int\n", "class A:\n    y: int\n"),
}


@pytest.mark.parametrize("change", SAME)
def test_what_changes_no_value_does_not_count(change: str, syntax: Any) -> None:
    one, other = SAME[change]
    assert as_json(syntax(one)) == as_json(syntax(other))


@pytest.mark.parametrize("change", OTHER)
def test_what_changes_a_value_counts(change: str, syntax: Any) -> None:
    one, other = OTHER[change]
    assert as_json(syntax(one)) != as_json(syntax(other))


def test_an_integer_of_any_length_is_a_literal() -> None:
    assert literal(10**5000) == ["int", hex(10**5000)]


def test_names_are_found_with_the_attribute_that_follows() -> None:
    tree = ast.parse("a.b.c(d)[e.f] = g")
    assert set(names_used(tree)) == {("a", "b"), ("d", ""), ("e", "f"), ("g", "")}


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("import a.b as c, d", [("a.b", ""), ("d", "")]),
        ("from a import b as c", [("a", "b")]),
        ("from . import b", [("own.package", "b")]),
        ("from ..c import b", [("own.c", "b")]),
    ],
)
def test_imports_are_found_by_whole_names(
    statement: str, found: list[tuple[str, str]]
) -> None:
    assert list(imports(ast.parse(statement), "own.package")) == found


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("def f(x): y = 1", {"f"}),
        ("a, (b, c.d) = 1, (2, 3)", {"a", "b"}),
        ("try:\n    import a.b as c\nexcept ImportError:\n    c = None", {"c"}),
        ("if x:\n    class D: pass", {"D"}),
    ],
)
def test_the_names_that_a_statement_binds(statement: str, names: set[str]) -> None:
    assert names_bound(ast.parse(statement).body[0]) == names


def compiled(path: Path, text: str) -> dict[str, Any]:
    """Run a file; return its globals."""
    path.write_text(text)
    namespace: dict[str, Any] = {"__name__": "of_no_module"}
    exec(compile(text, str(path), "exec"), namespace)  # noqa: S102
    return namespace


def test_a_function_is_found_by_its_code_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    text = "class A:\n    def unit(x): return x\n\n\ndef unit(x): return -x\n"
    found = compiled(path, text)
    tree = find_function(found["unit"].__code__, found)
    assert as_json(tree) == as_json(ast.parse("def unit(x): return -x").body[0])
    path.write_text(text.replace("-x", "+x"))
    with pytest.raises(NoSource, match="another source on disk"):
        find_function(found["unit"].__code__, found)


def test_two_functions_that_only_their_place_tells_apart_are_not_found(
    tmp_path: Path,
) -> None:
    found = compiled(tmp_path / "a.py", "unit, other = lambda x: x, lambda x: -x\n")
    with pytest.raises(NoSource, match="another function of its name in its line"):
        find_function(found["unit"].__code__, found)


def test_what_has_no_source_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoSource, match="no Python source"):
        source_of(str(tmp_path / "absent.py"), {})
    (tmp_path / "a.py").write_text("def")
    with pytest.raises(NoSource, match="source that cannot be parsed"):
        source_of(str(tmp_path / "a.py"), {})
