"""The digest of code changes with what is computed, and with nothing else."""

import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from dstrain.graph import code_of
from dstrain.graph.code_digest import Code

Sources = dict[str, str]
UNIT = "def unit(x):\n    return x\n"
FACTORY = """
def make(value):
    def unit(x):
        return x, value
    return unit
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that imports a package of these modules anew, and returns its
    module `units`.
    """
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "own"

    def load(sources: Sources) -> ModuleType:
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
        for name in [name for name in sys.modules if name.partition(".")[0] == "own"]:
            del sys.modules[name]
        for name, text in sources.items():
            (folder / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module("own.units")

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield load
    for name in [name for name in sys.modules if name.partition(".")[0] == "own"]:
        del sys.modules[name]


def digest(module: ModuleType, name: str = "unit") -> str:
    code = code_of(getattr(module, name))
    assert code.unknown == ()
    return code.digest


SAME = {
    "formatting": (UNIT, "def unit( x ) :\n\n    return (x)\n"),
    "a comment": (UNIT, "# A comment.\ndef unit(x):\n    # Another.\n    return x\n"),
    "a docstring": (UNIT, 'def unit(x):\n    """Return x."""\n    return x\n'),
    "what is not used": (
        UNIT,
        f"OTHER = 1\n\n\ndef other():\n    return OTHER\n\n\n{UNIT}",
    ),
    "order of definitions": (
        "A = 1\nB = 2\n\n\ndef unit():\n    return A + B\n",
        "B = 2\nA = 1\n\n\ndef unit():\n    return A + B\n",
    ),
    "how a constant is computed": (
        "A = 4\n\n\ndef unit():\n    return A\n",
        "A = 2 * 2\n\n\ndef unit():\n    return A\n",
    ),
    "order of a set": (
        "A = {'a', 'b', 'c'}\n\n\ndef unit():\n    return sorted(A)\n",
        "A = {'c', 'b', 'a'}\n\n\ndef unit():\n    return sorted(A)\n",
    ),
    "a docstring of a field": (
        "class A:\n    x = 1\n\n\ndef unit():\n    return A.x\n",
        "class A:\n    x = 1\n    'The x.'\n\n\ndef unit():\n    return A.x\n",
    ),
    "an object that holds a cached property": (
        "from functools import cached_property\n\n\nclass A:\n    @cached_property\n    def b(self):\n"
        "        return 1\n\n\na = A()\n\n\ndef unit():\n    return a.b\n",
        "from functools import cached_property\n\n\nclass A:\n    @cached_property\n    def b(self):\n"
        "        return 1\n\n\na = A()\na.b\n\n\ndef unit():\n    return a.b\n",
    ),
    "a lock": (
        "import threading\nlock = threading.Lock()\n\n\ndef unit():\n    return lock\n",
        "import threading\nlock: object = threading.Lock()\n\n\ndef unit():\n    return lock\n",
    ),
}
"""What changes nothing: the module before and after."""


@pytest.mark.parametrize("change", SAME)
def test_what_changes_nothing_keeps_the_digest(change: str, package: Any) -> None:
    before, after = SAME[change]
    assert digest(package({"units": before})) == digest(package({"units": after}))


DIFFERENT = {
    "a class's attribute, assigned later": (
        """
class Scale:
    factor = 1

Scale.factor = 2

def unit(x):
    return x * Scale.factor
""",
        "Scale.factor = 2",
        "Scale.factor = 3",
    ),
    "a class's text, assigned later": (
        """
class Scale:
    mode = "a"

Scale.mode = "b"

def unit(x):
    return x, Scale.mode
""",
        'Scale.mode = "b"',
        'Scale.mode = "c"',
    ),
    "a literal": (
        """
def unit(x):
    return x
""",
        "    return x",
        "    return x + 1",
    ),
    "1 and True": (
        """
def unit():
    return 1
""",
        "    return 1",
        "    return True",
    ),
    "0.0 and -0.0": (
        """
ZERO = 0.0

def unit():
    return ZERO
""",
        "ZERO = 0.0",
        "ZERO = -0.0",
    ),
    "name of a variable": (
        """
def unit(x):
    y = x
    return y
""",
        "    y = x\n    return y",
        "    z = x\n    return z",
    ),
    "a default argument": (
        """
A = 1

def unit(x=A):
    return x
""",
        "A = 1",
        "A = 2",
    ),
    "a constant": (
        """
# units
from own.steps import A

def unit():
    return A
# steps
A = 1
""",
        "A = 1",
        "A = 2",
    ),
    "a constant in a table": (
        """
A = {'a': [1, (2, None)]}

def unit():
    return A
""",
        "A = {'a': [1, (2, None)]}",
        "A = {'a': [1, (2, False)]}",
    ),
    "a helper": (
        """
# units
from own.steps import step

def unit(x):
    return step(x)
# steps
def step(x):
    return x
""",
        "    return x",
        "    return -x",
    ),
    "a helper two calls away": (
        """
# units
from own.steps import step

def unit(x):
    return step(x)
# steps
from own import far

def step(x):
    return far.step(x)
# far
def step(x):
    return x
""",
        "    return x",
        "    return -x",
    ),
    "a helper imported in the function": (
        """
# units
def unit(x):
    from .steps import step

    return step(x)
# steps
def step(x):
    return x
""",
        "    return x",
        "    return -x",
    ),
    "a helper of a helper that call each other": (
        """
def unit(x):
    return x and step(x)

def step(x):
    return unit(x - 1)
""",
        "    return unit(x - 1)",
        "    return unit(x - 2)",
    ),
    "a module used as a value": (
        """
# units
from own import steps

def unit(name):
    return getattr(steps, name)
# steps
def step(x):
    return x
""",
        "    return x",
        "    return -x",
    ),
    "a method": (
        """
class A:
    def f(self):
        return 1

def unit():
    return A().f()
""",
        "        return 1",
        "        return 2",
    ),
    "a method of a base class": (
        """
# units
from own.steps import B

class A(B):
    pass

def unit():
    return A().f()
# steps
class B:
    def f(self):
        return 1
""",
        "        return 1",
        "        return 2",
    ),
    "order of the fields of a dataclass": (
        """
from dataclasses import dataclass

@dataclass
class A:
    x: int
    y: int

def unit():
    return A(1, 2)
""",
        "    x: int\n    y: int",
        "    y: int\n    x: int",
    ),
    "fields of a namedtuple": (
        """
from collections import namedtuple
A = namedtuple('A', 'x y')

def unit():
    return A(1, 2)
""",
        "A = namedtuple('A', 'x y')",
        "A = namedtuple('A', 'y x')",
    ),
    "an object's state": (
        """
class A:
    def __init__(self, x):
        self.x = x

a = A(int('1'))

def unit():
    return a.x
""",
        "a = A(int('1'))",
        "a = A(int('2'))",
    ),
    "a decorator": (
        """
# units
from own.steps import scaled

@scaled
def unit(x):
    return x
# steps
def scaled(f):
    return lambda x: f(x) * 2
""",
        "    return lambda x: f(x) * 2",
        "    return lambda x: f(x) * 3",
    ),
    "what a decorator wraps": (
        """
from contextlib import contextmanager
A = [1]

@contextmanager
def step():
    yield A

def unit(x):
    with step() as a:
        return a
""",
        "A = [1]",
        "A = [2]",
    ),
    "a function with a cache": (
        """
from functools import cache

@cache
def step():
    return 1

def unit():
    return step()
""",
        "    return 1",
        "    return 2",
    ),
    "a closure's value": (
        """
def make(value):
    def unit(x):
        return x, value
    return unit

unit = make(1)
""",
        "unit = make(1)",
        "unit = make(2)",
    ),
    "a closure's tensor": (
        """
import torch

def make(value):
    def unit(x):
        return x, value
    return unit

unit = make(torch.ones(2))
""",
        "unit = make(torch.ones(2))",
        "unit = make(torch.zeros(2))",
    ),
    "a closure's function of another library": (
        """
import math

def make(value):
    def unit(x):
        return x, value
    return unit

unit = make(math.sin)
""",
        "unit = make(math.sin)",
        "unit = make(math.cos)",
    ),
    "an argument of a partial": (
        """
from functools import partial

def step(x, y):
    return x

unit = partial(step, y=1)
""",
        "unit = partial(step, y=1)",
        "unit = partial(step, y=2)",
    ),
    "a function that another replaces": (
        """
# units
from own import steps

def unit(x):
    return steps.step(x)
# steps
def step(x):
    return x

def other(x):
    return x

assert step
""",
        "assert step\n",
        "step = other\n",
    ),
    "a method that another replaces": (
        """
class A:
    def f(self):
        return 1

def g(self):
    return 2

assert A.f

def unit():
    return A().f()
""",
        "assert A.f",
        "A.f = g",
    ),
    "a function in a decorator of another library": (
        """
import torch

@torch.no_grad()
def unit(x):
    return x
""",
        "    return x",
        "    return -x",
    ),
    "an argument of a decorator of another library": (
        """
from contextlib import ContextDecorator

class scaled(ContextDecorator):
    def __init__(self, x):
        self.x = x

def step(x):
    return x

unit = scaled(int('1'))(step)
unit.__module__ = __name__
""",
        "int('1')",
        "int('2')",
    ),
    "a method of another object of the same class": (
        """
class A:
    def __init__(self, x):
        self.x = x

    def f(self):
        return self.x

def make(f):
    return lambda: f()

unit = make(A(1).f)
""",
        "make(A(1).f)",
        "make(A(2).f)",
    ),
    "one of two lambdas": (
        """
A = [
    lambda x: x,
    lambda x: -x,
]
step = A[0]

def unit(x):
    return step(x)
""",
        "step = A[0]",
        "step = A[1]",
    ),
    "a module of another library": (
        """
import math

def unit(x):
    return math.sqrt(x)
""",
        "import math",
        "import cmath as math",
    ),
    "a function of another library": (
        """
from math import sqrt

def unit(x):
    return sqrt(x)
""",
        "from math import sqrt",
        "from cmath import sqrt",
    ),
    "the definition of what has no value to compare": (
        """
import threading
lock = threading.Lock()

def unit():
    return lock
""",
        "lock = threading.Lock()",
        "lock = threading.RLock()",
    ),
    "a global that a function sets": (
        """
A = 1

def unit():
    global A
    return A
""",
        "A = 1",
        "A = 2",
    ),
    "a name that is also a variable of an inner function": (
        """
A = 1

def unit():
    return A, [A for A in (1, 2)]
""",
        "A = 1",
        "A = 2",
    ),
}
"""Modules, each after a comment with its name; what stands there, and what instead."""


@pytest.mark.parametrize("change", DIFFERENT)
def test_what_changes_the_value_changes_the_digest(change: str, package: Any) -> None:
    text, old, new = DIFFERENT[change]
    assert text.count(old) == 1
    first = digest(package(modules(text)))
    assert digest(package(modules(text))) == first
    assert digest(package(modules(text.replace(old, new)))) != first


def modules(text: str) -> Sources:
    """Divide a text at its comments; without any, it is the module `units`."""
    parts = re.split(r"^# (\w+)\n", text.lstrip(), flags=re.MULTILINE)
    if len(parts) == 1:
        return {"units": text}
    return dict(zip(parts[1::2], parts[2::2], strict=True))


UNKNOWN = {
    "code that is executed": (
        "scope = {}\nexec('def unit(x): return x', scope)\nunit = scope['unit']\nunit.__module__ = __name__\n",
        "no Python source",
    ),
    "a helper that is executed": (
        "exec('def step(x): return x')\n\n\ndef unit(x):\n    return step(x)\n",
        "own.units.step has no Python source",
    ),
    "a closure over a lock": (
        f"import threading\n{FACTORY}\nunit = make(threading.Lock())\n",
        "'value' in own.units.make.<locals>.unit is a _thread.lock",
    ),
    "a closure over a path": (
        f"from pathlib import Path\n{FACTORY}\nunit = make(Path('/data/table.bin'))\n",
        "an absolute path",
    ),
    "one of two lambdas in a line": (
        "A = [lambda x: x, lambda x: -x]\nunit = A[0]\n",
        "another function of its name in its line",
    ),
    "a class made by a function": (
        f"{FACTORY}\ndef other():\n    class A:\n        pass\n    return A\n\n\nunit = make(other())\n",
        "own.units.other.<locals>.A, a class made by a function",
    ),
    "functions found by their names": (
        "def unit(name):\n    return globals()[name]\n",
        "own.units.unit uses globals()",
    ),
    "a module found by its name": (
        "import importlib\ndef unit(x):\n    return importlib.import_module('own.' + x)\n",
        "own.units.unit uses importlib to import by name",
    ),
    "a function found by its name in text": (
        "from pkgutil import resolve_name\ndef unit(x):\n    return resolve_name('own.' + x)\n",
        "own.units.unit uses resolve_name to import by name",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_cannot_be_compared_is_named(case: str, package: Any) -> None:
    source, reason = UNKNOWN[case]
    (unknown,) = set(code_of(package({"units": source}).unit).unknown)
    assert reason in unknown


def test_a_source_that_was_edited_while_its_code_runs_is_unknown(package: Any) -> None:
    module = package({"units": UNIT})
    Path(str(module.__file__)).write_text(UNIT.replace("return x", "return -x"))
    (unknown,) = code_of(module.unit).unknown
    assert (
        unknown == "own.units.unit has another source on disk than the code that runs"
    )


def test_a_function_of_dstrain_counts(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import dstrain.plugin.functional as F\n\n\ndef unit(x):\n    return F.pack(x)\n"
    import dstrain.plugin.functional as functional

    module = package({"units": source})
    before = digest(module)
    monkeypatch.setattr(functional, "pack", functional.unpack)
    assert digest(module) != before


def test_folders_do_not_count(package: Any, tmp_path: Path) -> None:
    source = (
        "from pathlib import Path\nHERE = Path(__file__).parent / 'table.json'\n"
        "TEXT = str(HERE)\n\n\ndef unit():\n    return HERE, TEXT, __file__\n"
    )
    before = digest(package({"units": source}))
    moved = tmp_path / "elsewhere/own"
    moved.parent.mkdir()
    (tmp_path / "own").rename(moved)
    sys.path.insert(0, str(moved.parent))
    for name in ("own", "own.units"):
        del sys.modules[name]
    try:
        assert digest(importlib.import_module("own.units")) == before
    finally:
        del sys.path[0]


PRINT = """
import sys
from dstrain.graph.code_digest import code_of
from dstrain.models.functional import check_sides, images_to_tensor, override_positional_args
from dstrain.graph.values import kind_of
print([code_of(one) for one in (check_sides, images_to_tensor, override_positional_args, kind_of)])
"""


def test_every_process_finds_the_same_digest() -> None:
    """Whatever the order of its sets."""
    said = {
        subprocess.run(
            [sys.executable, "-c", PRINT],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }
    (only,) = said
    assert "unknown=()" in only


def test_a_long_chain_of_calls_is_followed(package: Any) -> None:
    lines = ["def f0(x):\n    return x\n"]
    lines += [f"def f{i}(x):\n    return f{i - 1}(x)\n" for i in range(1, 1500)]
    source = "".join([*lines, "unit = f1499\n"])
    before = digest(package({"units": source}))
    after = source.replace("return x\n", "return -x\n")
    assert digest(package({"units": after})) != before


def test_a_class_that_is_called_is_code(package: Any) -> None:
    source = "class A:\n    def __call__(self, x):\n        return x\n\n\nunit = A()\n"
    before: Callable[..., Any] = package({"units": source}).unit
    first: Code = code_of(before)
    assert first.unknown == ()
    after = source.replace("return x", "return -x")
    assert code_of(package({"units": after}).unit) != first
