"""Hooks are answered one plugin at a time, and a broken plugin harms no other."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dstrain import UsageError
from dstrain.registry import (
    Extensions,
    disabling,
    extensions_in_use,
    load_extensions,
)

HOOKS = """
from types import SimpleNamespace
from dstrain.plugin import hookimpl
api = 2
@hookimpl
def dstrain_tasks():
    return (SimpleNamespace(name="a task"),)
"""
MODIFY = """
import torch
from dstrain.plugin import hookimpl
api = 2
def halved(value):
    return value * 0.5
@hookimpl
def dstrain_modify_step(step, model, optimizer):
    print(step)
    optimizer.lr = halved(model.lr)
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


def test_what_is_disabled_is_so_in_threads_of_a_command_until_it_is_done(
    load: Load,
) -> None:
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


def test_a_hook_plugin_name_offered_twice_is_refused(
    fake_plugin: Callable[..., Path],
) -> None:
    for name in ("one", "two"):
        module = f"extra_{name}"
        entry = {"twice": module}
        fake_plugin(f"extra-{name}", entry, {module: HOOKS}, group="dstrain")
    extensions = load_extensions()
    assert tasks(extensions) == {}
    assert len(extensions.broken) == 2
    for reason in extensions.broken:
        assert "extra-one 1.0" in reason and "extra-two 1.0" in reason


UPDATES = """
from dstrain.plugin import Updater, hookimpl
api = 2
class Signs(Updater):
    def clip(self):
        return super().clip()
@hookimpl
def dstrain_updater(options):
    return Signs() if options == "signs" else None
"""


def test_an_updater_is_of_one_plugin_and_makes_another_run(load: Load) -> None:
    extensions = load(signs=UPDATES)
    assert extensions.updater("") is None
    assert extensions.modifiers("") == {}
    plugin, updater = extensions.updater("signs") or (None, None)
    assert plugin is not None and plugin.name == "signs"
    assert type(updater).__name__ == "Signs"
    assert list(extensions.modifiers("signs")) == ["signs (extra-signs 1.0)"]
    both = load(others=UPDATES)
    with pytest.raises(UsageError, match="extra-signs") as caught:
        both.updater("signs")
    assert "extra-others" in str(caught.value)
    broken = load(bad=UPDATES.replace("return Signs()", "return 1 / 0"))
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        broken.updater("signs")


def test_what_changes_steps_is_named_with_its_version_and_a_digest_of_its_code(
    load: Load, tmp_path: Path
) -> None:
    assert load_extensions().modifiers() == {}
    before = load(changes=MODIFY).modifiers()
    assert list(before) == ["changes (extra-changes 1.0)"]
    assert load_extensions().modifiers() == before
    for text, is_same in (
        (MODIFY.replace("import torch", "# a remark\nimport torch"), True),
        (MODIFY.replace("value * 0.5", "value * 0.25"), False),
    ):
        (tmp_path / "site/extra_changes.py").write_text(text)
        del sys.modules["extra_changes"]
        assert (load_extensions().modifiers() == before) == is_same
