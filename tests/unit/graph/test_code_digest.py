"""The digest of code changes with what is computed, and with nothing else."""

import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from dstrain.graph import code_of
from dstrain.plugin import functional

Load = Callable[[str], ModuleType]
UNIT = "def unit(x):\n    return x\n"
FACTORY = """
def make(value):
    def unit(x):
        return x, value
    return unit
"""


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "own"]:
        del sys.modules[name]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Return a function that writes a package in a new place, imports it, and returns its
    module `units`; each module is a text after a comment with its name.
    """

    def imported(text: str) -> ModuleType:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        (place / "own").mkdir(parents=True)
        text = text if text.startswith("# ") else f"# units\n{text}"
        parts = re.split(r"^# (\w+)\n", text, flags=re.MULTILINE)[1:]
        for name, source in zip(parts[::2], parts[1::2], strict=True):
            (place / f"own/{name}.py").write_text(source)
        monkeypatch.syspath_prepend(place)
        forget()
        return importlib.import_module("own.units")

    yield imported
    forget()


def digest(module: ModuleType) -> str:
    code = code_of(module.unit)
    assert code.unknown == ()
    return code.digest


def versions(text: str) -> tuple[str, str]:
    """Return the text with the lines that begin with - and with those that begin with +."""
    lines = text.lstrip().splitlines(keepends=True)
    before = [line.removeprefix("-") for line in lines if line[0] != "+"]
    after = [line.removeprefix("+") for line in lines if line[0] != "-"]
    return "".join(before), "".join(after)


SAME = {
    "formatting": """
-def unit(x):
+def unit( x ) :
-    return "a"
+    return ('a')
""",
    "comments, docstrings, annotations and pass": """
-def unit(x):
+# A comment.
+def unit(x: int) -> "int":
+    '''Return x.'''
+    # Another.
+    pass
-    y = x
+    y: int = x
    return y
""",
    "a text in pieces": """
def unit(x):
-    return f"a b {x}"
+    return "a " f"b {x}"
""",
    "what is not used": """
+OTHER = 1
+def other():
+    return OTHER
def unit(x):
    return x
""",
    "order of definitions": """
-A = 1
B = 2
+A = 1
def unit():
    return A + B
""",
    "how a constant is computed": """
-A = 10**5000
+A = 10**4999 * 10
def unit():
    return A
""",
    "order of a set": """
-A = {"a", "b", "c"}
+A = {"c", "b", "a"}
def unit():
    return sorted(A)
""",
    "a docstring of a field": """
class A:
    x = 1
+    "The x."
def unit():
    return A.x
""",
    "an object that holds a cached property": """
from functools import cached_property
class A:
    @cached_property
    def b(self):
        return 1
a = A()
+a.b
def unit():
    return a.b
""",
    "the annotation of what has no value to compare": """
import threading
-lock = threading.Lock()
+lock: object = threading.Lock()
def unit():
    return lock
""",
    "where the package lies": """
from pathlib import Path
HERE = Path(__file__).parent / "table.json"
TEXT = str(HERE)
def unit():
    return HERE, TEXT, __file__
""",
}


@pytest.mark.parametrize("change", SAME)
def test_what_changes_no_value_keeps_the_digest(change: str, load: Load) -> None:
    before, after = versions(SAME[change])
    assert digest(load(before)) == digest(load(after))


DIFFERENT = {
    "a class's attribute, assigned later": """
class Scale:
    factor = 1
-Scale.factor = 2
+Scale.factor = 3
def unit(x):
    return x * Scale.factor
""",
    "1 and True": """
def unit():
-    return 1
+    return True
""",
    "0.0 and -0.0": """
-ZERO = 0.0
+ZERO = -0.0
def unit():
    return ZERO
""",
    "name of a variable": """
def unit(x):
-    y = x
+    z = x
-    return y
+    return z
""",
    "a default argument": """
-A = 1
+A = 2
def unit(x=A):
    return x
""",
    "a constant in a table": """
-A = {'a': [1, (2, None)]}
+A = {'a': [1, (2, False)]}
def unit():
    return A
""",
    "a helper two calls away": """
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
-    return x
+    return -x
""",
    "a helper imported in the function": """
# units
def unit(x):
    from .steps import step
    return step(x)
# steps
def step(x):
-    return x
+    return -x
""",
    "a helper of a helper that call each other": """
def unit(x):
    return x and step(x)
def step(x):
-    return unit(x - 1)
+    return unit(x - 2)
""",
    "a module used as a value": """
# units
from own import steps
def unit(name):
    return getattr(steps, name)
# steps
def step(x):
-    return x
+    return -x
""",
    "a method": """
class A:
    def f(self):
-        return 1
+        return 2
def unit():
    return A().f()
""",
    "a method of a base class": """
# units
from own.steps import B
class A(B):
    pass
def unit():
    return A().f()
# steps
class B:
    def f(self):
-        return 1
+        return 2
""",
    "order of the fields of a dataclass": """
from dataclasses import dataclass
@dataclass
class A:
+    y: int
    x: int
-    y: int
def unit():
    return A(1, 2)
""",
    "fields of a namedtuple": """
from collections import namedtuple
-A = namedtuple('A', 'x y')
+A = namedtuple('A', 'y x')
def unit():
    return A(1, 2)
""",
    "an object's state": """
class A:
    def __init__(self, x):
        self.x = x
-a = A(int('1'))
+a = A(int('2'))
def unit():
    return a.x
""",
    "a decorator": """
# units
from own.steps import scaled
@scaled
def unit(x):
    return x
# steps
def scaled(f):
-    return lambda x: f(x) * 2
+    return lambda x: f(x) * 3
""",
    "what a decorator wraps": """
from contextlib import contextmanager
-A = [1]
+A = [2]
@contextmanager
def step():
    yield A
def unit(x):
    with step() as a:
        return a
""",
    "a function with a cache": """
from functools import cache
@cache
def step():
-    return 1
+    return 2
def unit():
    return step()
""",
    "a closure's tensor": f"""
import torch{FACTORY}-unit = make(torch.ones(2))
+unit = make(torch.zeros(2))
""",
    "a closure's function of another library": f"""
import math{FACTORY}-unit = make(math.sin)
+unit = make(math.cos)
""",
    "an argument of a partial": """
from functools import partial
def step(x, y):
    return x
-unit = partial(step, y=1)
+unit = partial(step, y=2)
""",
    "a function that another replaces": """
# units
from own import steps
def unit(x):
    return steps.step(x)
# steps
def step(x):
    return x
def other(x):
    return x
-assert step
+step = other
""",
    "a method that another replaces": """
class A:
    def one(self):
        return 1
def two(self):
    return 2
-assert A.one
+A.one = two
def unit():
    return A().one()
""",
    "a function in a decorator of another library": """
import torch
@torch.no_grad()
def unit(x):
-    return x
+    return -x
""",
    "an argument of a decorator of another library": """
from contextlib import ContextDecorator
class scaled(ContextDecorator):
    def __init__(self, x):
        self.x = x
def step(x):
    return x
-unit = scaled(int('1'))(step)
+unit = scaled(int('2'))(step)
unit.__module__ = __name__
""",
    "a method of another object of the same class": """
class A:
    def __init__(self, x):
        self.x = x
    def f(self):
        return self.x
def make(f):
    return lambda: f()
-unit = make(A(1).f)
+unit = make(A(2).f)
""",
    "one of two lambdas": """
A = [
    lambda x: x,
    lambda x: -x,
]
-step = A[0]
+step = A[1]
def unit(x):
    return step(x)
""",
    "a module of another library": """
-import math
+import cmath as math
def unit(x):
    return math.sqrt(x)
""",
    "a function of another library": """
-from xml.dom.minidom import parse
+from xml.etree.ElementTree import parse
def unit(x):
    return parse(x)
""",
    "the definition of what has no value to compare": """
import threading
-lock = threading.Lock()
+lock = threading.RLock()
def unit():
    return lock
""",
    "a global that a function sets": """
-A = 1
+A = 2
def unit():
    global A
    return A
""",
    "a global with the name of an inner variable": """
-A = 1
+A = 2
def unit():
    return A, [A for A in (1, 2)]
""",
    "a helper that is imported whole in the function": """
# units
def unit(x):
    import own.steps
    return own.steps.step(x)
# steps
def step(x):
-    return x
+    return -x
""",
    "a class whose object is called": """
class A:
    def __call__(self, x):
-        return x
+        return -x
unit = A()
""",
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_what_changes_the_value_changes_the_digest(change: str, load: Load) -> None:
    before, after = versions(DIFFERENT[change])
    first = digest(load(before))
    assert digest(load(before)) == first
    assert digest(load(after)) != first


UNKNOWN = {
    "code that is executed": (
        "exec('def step(x): return x')\ndef unit(x):\n    return step(x)\n",
        "own.units.step",
    ),
    "a closure over a lock": (
        f"import threading\n{FACTORY}\nunit = make(threading.Lock())\n",
        "'value' in own.units.make.<locals>.unit is a _thread.lock",
    ),
    "a closure over a file of this machine": (
        f"from pathlib import Path\n{FACTORY}\nunit = make(Path('/data/table.bin'))\n",
        "'value' in own.units.make.<locals>.unit",
    ),
    "one of two lambdas in a line": (
        "A = [lambda x: x, lambda x: -x]\nunit = A[0]\n",
        "own.units.<lambda>",
    ),
    "a class of a function": (
        f"{FACTORY}\ndef other():\n    class A:\n        pass\n    return A\nunit = make(other())\n",
        "own.units.other.<locals>.A",
    ),
    "functions found by their names": (
        "def unit(name):\n    return globals()[name]\n",
        "own.units.unit uses globals()",
    ),
    "a module found by its name": (
        "import importlib\ndef unit(x):\n    return importlib.import_module('own.' + x)\n",
        "own.units.unit uses importlib",
    ),
    "a function found by its name in text": (
        "from pkgutil import resolve_name\ndef unit(x):\n    return resolve_name('own.' + x)\n",
        "own.units.unit uses resolve_name",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_cannot_be_compared_is_named(case: str, load: Load) -> None:
    source, named = UNKNOWN[case]
    (unknown,) = set(code_of(load(source).unit).unknown)
    assert named in unknown


def test_a_source_that_is_not_that_of_the_running_code_is_unknown(load: Load) -> None:
    module = load(UNIT)
    for edited in (UNIT.replace("return x", "return -x"), "def"):
        Path(str(module.__file__)).write_text(edited)
        (unknown,) = code_of(module.unit).unknown
        assert "own.units.unit" in unknown


def test_a_function_of_dstrain_counts(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load(
        "from dstrain.plugin import functional\n"
        "def unit(x):\n    return functional.pack(x)\n"
    )
    before = digest(module)
    monkeypatch.setattr(functional, "pack", functional.unpack)
    assert digest(module) != before


PRINT = """
from dstrain.graph import code_of
from dstrain.plugin import functional
names = ("check_sides", "images_to_tensor", "override_positional_args", "pack")
print([code_of(getattr(functional, name)) for name in names])
"""


def test_every_process_finds_the_same_digest_whatever_the_order_of_its_sets() -> None:
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


def test_a_long_chain_of_calls_is_followed(load: Load) -> None:
    lines = ["def f0(x):\n-    return x\n+    return -x\n"]
    lines += [f"def f{i}(x):\n    return f{i - 1}(x)\n" for i in range(1, 1500)]
    before, after = versions("".join([*lines, "unit = f1499\n"]))
    assert digest(load(before)) != digest(load(after))
