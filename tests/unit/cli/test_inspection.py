"""What is installed is shown by the command line; the library under it knows nothing of
the command line.
"""

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import dstrain
from dstrain.cli.inspection import inspect_all

HOOKS = """
import click
from dstrain.registry.hooks import hookimpl
from dstrain.graph.task import Task
@hookimpl
def dstrain_commands():
    return [click.Command("shout"), click.Command("train")]
@hookimpl
def dstrain_tasks():
    def loss(predict): return predict
    return [Task.of("whisper", loss)]
@hookimpl
def dstrain_step_end(step): pass
"""


def test_what_a_plugin_adds_is_listed_with_what_cannot_be_used(
    fake_plugin: Callable[..., Path],
) -> None:
    fake_plugin(
        "extra-some", {"some": "some_hooks"}, {"some_hooks": HOOKS}, group="dstrain"
    )
    (found,) = (
        f for f in inspect_all(("flux", "qwen_image", "wan")) if f.name == "some"
    )
    assert found.adds == [
        "command shout",
        "task whisper",
        "reads the numbers of each step",
    ]
    assert (
        found.reason
        == "its command 'train' has the same name as one of dstrain's own, and is ignored"
    )


def test_the_library_imports_nothing_of_the_command_line() -> None:
    folder = Path(dstrain.__file__).parent
    above = {folder / "cli", folder / "testing", folder / "registry/template"}
    paths = [
        path
        for path in folder.rglob("*.py")
        if not above & set(path.parents) and path.name != "__main__.py"
    ]
    nodes = [
        (path.name, node)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
    ]
    named = [
        (name, node.module or "")
        for name, node in nodes
        if isinstance(node, ast.ImportFrom)
    ]
    assert ("hooks.py", "dstrain.registry.discovery") in named
    assert not [
        (name, module)
        for name, module in named
        if f"{module}.".startswith("dstrain.cli.")
    ]


def test_inspecting_needs_no_torch() -> None:
    code = "import sys, dstrain.cli.inspection; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
