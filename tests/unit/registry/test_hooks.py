"""Hooks are answered one plugin at a time, and a broken plugin harms no other."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dstrain.registry import Extensions, disabling, extensions_in_use, load_extensions

HOOKS = """
from types import SimpleNamespace
from dstrain.plugin import hookimpl
api = 2
@hookimpl
def dstrain_tasks():
    return (SimpleNamespace(name="a task"),)
"""
Load = Callable[..., Extensions]


@pytest.fixture
def load(fake_plugin: Callable[..., Path]) -> Load:
    """Names of plugins with their sources -> these and all others, loaded."""

    def loaded(**sources: str) -> Extensions:
        for name, source in sources.items():
            module = f"extra_{name}"
            fake_plugin(f"extra-{name}", {name: module}, {module: source}, "dstrain")
        return load_extensions()

    return loaded


def tasks(extensions: Extensions, own: tuple[str, ...] = ()) -> dict[str, Any]:
    return extensions.offered("dstrain_tasks", SimpleNamespace, own)


def test_what_is_disabled_is_so_in_threads_of_a_command(load: Load) -> None:
    load(good=HOOKS)

    def heard() -> bool:
        with ThreadPoolExecutor(1) as threads:
            run = copy_context().run
            return bool(
                threads.submit(run, lambda: tasks(extensions_in_use())).result()
            )

    assert heard()
    with disabling(("good",)):
        assert not heard()
        with disabling(()):
            assert heard()
        assert not heard()
    assert heard()


def test_a_hook_name_offered_twice_is_refused(fake_plugin: Callable[..., Path]) -> None:
    for name in ("one", "two"):
        module = f"extra_{name}"
        entry = {"twice": module}
        fake_plugin(f"extra-{name}", entry, {module: HOOKS}, group="dstrain")
    extensions = load_extensions()
    assert tasks(extensions) == {}
    assert len(extensions.broken) == 2
    for reason in extensions.broken:
        assert "extra-one 1.0" in reason and "extra-two 1.0" in reason


@pytest.mark.parametrize("kind", ["wrapper", "hookwrapper"])
def test_a_wrapper_of_a_hook_does_not_answer_it(kind: str, load: Load) -> None:
    wraps = HOOKS.replace("hookimpl\ndef", f"hookimpl({kind}=True)\ndef")
    extensions = load(good=HOOKS, wraps=wraps.replace("return", "return (yield);"))
    assert (list(tasks(extensions)), extensions.broken) == (["a task"], [])
