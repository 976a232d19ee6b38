"""The digest of code changes with what is computed, and with nothing else."""

import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from dstrain.graph import code_of

Load = Callable[[str], ModuleType]


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "own"]:
        del sys.modules[name]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Text, in which "# NAME" begins a module -> its module `units`, in a new place."""

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
    "comments and docstrings": """
-def unit(x):
+# A comment.
+def unit(x):
+    '''Return x.'''
+    # Another.
    y = x
    return y
""",
    "a module that it does not import": """
# units
from own.steps import step
def unit(x):
    return step(x)
# steps
def step(x):
    return x
# others
-A = 1
+A = 2
""",
    "the package's own module": """
# __init__
-A = 1
+A = 2
# units
from own import steps
from .steps import step
def unit(x):
    return steps.step(step(x))
# steps
def step(x):
    return x
""",
}


@pytest.mark.parametrize("change", SAME)
def test_what_changes_no_value_keeps_the_digest(change: str, load: Load) -> None:
    before, after = versions(SAME[change])
    assert digest(load(before)) == digest(load(after))


DIFFERENT = {
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
    "a registry that a decorator fills": """
# units
from own import steps, tables
def unit(name):
    return tables.Table.known[name]
# tables
class Table:
    known = {}
def known(f):
    Table.known[f.__name__] = f
    return f
# steps
from own.tables import known
@known
def step(x):
-    return x
+    return -x
""",
    "what the package's own module gives": """
# __init__
-A = 1
+A = 2
# units
from own import A
def unit():
    return A
""",
    "what a package gives by the name of one of its modules": """
# __init__
-from own.step import one as step
+from own.step import two as step
# units
from own import step
def unit(x):
    return step(x)
# step
def one(x):
    return x
def two(x):
    return -x
""",
    "a class that is named in a text": """
# units
ENCODER = "own.steps:Encoder"
def unit(x):
    return ENCODER
# steps
class Encoder:
-    factor = 1
+    factor = 2
""",
    "a module of a package that is taken as an object": """
# units
import own
def unit(x):
    return getattr(own, x).step
# steps
def step(x):
-    return x
+    return -x
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
        "own.units uses exec",
    ),
    "a closure": (
        "def make(value):\n    def unit(x):\n        return x, value\n    return unit\nunit = make(1)\n",
        "own.units.make.<locals>.unit is made by a call",
    ),
    "a partial": (
        "from functools import partial\ndef step(x, y):\n    return x\nunit = partial(step, y=1)\n",
        "own.units.partial is made by a call",
    ),
    "an imported module that does so": (
        "# units\nfrom own.steps import step as unit\n# steps\nfrom own.far import step\n"
        "# far\ndef step(x):\n    return eval(x)\n",
        "own.far uses eval",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_cannot_be_compared_is_named(case: str, load: Load) -> None:
    source, named = UNKNOWN[case]
    assert named in " ".join(code_of(load(source).unit).unknown)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("return globals()[x]", "globals"),
        ("return unit.__doc__", "__doc__"),
        ("return lib.import_module(x)", "import_module"),
        ("from importlib import import_module as load", "import_module"),
        ("return sys.modules[x]", "sys.modules"),
    ],
)
def test_what_reaches_code_by_text_is_named(line: str, named: str, load: Load) -> None:
    source = f"import importlib as lib, runpy, sys\ndef unit(x):\n    {line}\n"
    assert code_of(load(source).unit).unknown == (f"own.units uses {named}",)


def test_a_source_that_is_not_that_of_the_running_code_is_unknown(load: Load) -> None:
    module = load(
        "# units\nfrom own import steps\ndef unit(x):\n    return steps.step(x)\n"
        "# steps\ndef step(x):\n    return x\n"
    )
    assert code_of(module.unit).unknown == ()
    Path(str(module.steps.__file__)).write_text("def step(x):\n    return -x\n")
    (unknown,) = code_of(module.unit).unknown
    assert unknown.startswith("own.steps has another source")
    for edited in ("def unit(x):\n    return -steps.step(x)\n", "def"):
        Path(str(module.__file__)).write_text(edited)
        assert "own.units" in code_of(module.unit).unknown[0]


def test_what_compiling_adds_to_a_module_is_no_code_of_it(load: Load) -> None:
    module = load(
        "import torch\ndef unit(x):\n    y = x + 1\n    print()\n    return y * 2\n"
    )
    before = digest(module)
    torch.compile(module.unit, backend="eager")(torch.ones(2))
    assert any(name.startswith("__resume_at_") for name in vars(module))
    assert digest(module) == before


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
    assert len(said) == 1
