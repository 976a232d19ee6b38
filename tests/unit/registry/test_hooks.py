"""Hooks of extensions are answered one plugin at a time, and a broken plugin harms no
other.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from dstrain import UsageError
from dstrain.registry import load_extensions

Install = Callable[..., Path]
HOOKS = """
from types import SimpleNamespace
from dstrain.registry.hooks import hookimpl
SEEN = []
@hookimpl
def dstrain_tasks():
    return (SimpleNamespace(name="a task"),)
@hookimpl
def dstrain_step_end(step, numbers):
    SEEN.append((step, numbers["loss"]))
"""


def test_hooks_are_answered_and_a_broken_plugin_is_reported(
    fake_plugin: Install,
) -> None:
    wrong = "from dstrain.registry.hooks import hookimpl\n@hookimpl\ndef dstrain_tusks(): return ()"
    more = "from dstrain.registry.hooks import hookimpl\n@hookimpl\ndef dstrain_step_end(step, nonsense): pass"
    for name, source in {
        "good": HOOKS,
        "gone": "import not_there_at_all",
        "wrong": wrong,
        "more": more,
    }.items():
        fake_plugin(
            f"extra-{name}",
            {name: f"extra_{name}"},
            {f"extra_{name}": source},
            group="dstrain",
        )
    extensions = load_extensions()
    before = list(extensions.broken)
    offers = extensions.offered("dstrain_tasks", SimpleNamespace, ())
    assert offers == {"a task": SimpleNamespace(name="a task")}
    assert extensions.broken == before
    assert extensions.step_end(3, {"loss": 0.5}) == []
    assert sys.modules["extra_good"].SEEN == [(3, 0.5)]
    printed = sorted(reason for reason in extensions.broken if "extra-" in reason)
    assert [reason.split(":")[0] for reason in printed] == [
        f"plugin extra-{n} 1.0" for n in ("gone", "more", "wrong")
    ]
    assert (
        "dstrain_tusks" in printed[2]
        and "nonsense" in printed[1]
        and "not_there_at_all" in printed[0]
    )
    others = load_extensions(("good",))
    assert others.offered("dstrain_tasks", SimpleNamespace, ()) == {}
    assert extensions.implement("dstrain_tasks")
    assert not others.implement("dstrain_tasks")


def test_a_hook_plugin_name_offered_twice_is_refused(fake_plugin: Install) -> None:
    for name in ("one", "two"):
        fake_plugin(
            f"extra-{name}",
            {"twice": f"extra_{name}"},
            {f"extra_{name}": HOOKS},
            group="dstrain",
        )
    extensions = load_extensions()
    assert extensions.offered("dstrain_tasks", SimpleNamespace, ()) == {}
    assert all(
        "provided by extra-one 1.0 and by extra-two 1.0" in reason
        for reason in extensions.broken
    )


def test_a_hook_that_raises_is_left_out_from_then_on(fake_plugin: Install) -> None:
    raises = HOOKS.replace("SEEN.append(", "raise ValueError(")
    for name, source in {"good": HOOKS, "bad": raises}.items():
        fake_plugin(
            f"extra-{name}",
            {name: f"looks_{name}"},
            {f"looks_{name}": source},
            group="dstrain",
        )
    extensions = load_extensions()
    (reason,) = extensions.step_end(1, {"loss": 0.5})
    assert reason.startswith(
        "plugin extra-bad 1.0 disabled: its dstrain_step_end hook raised ValueError"
    )
    assert extensions.step_end(2, {"loss": 0.25}) == []
    assert sys.modules["looks_good"].SEEN == [(1, 0.5), (2, 0.25)]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("return ('text',)", "dstrain_tasks returned a str, not a SimpleNamespace"),
        ("raise KeyError('x')", "dstrain_tasks failed: KeyError"),
    ],
)
def test_what_cannot_be_used_is_reported(
    answer: str, reason: str, fake_plugin: Install
) -> None:
    source = HOOKS.replace('return (SimpleNamespace(name="a task"),)', answer)
    fake_plugin("extra-odd", {"odd": "odd"}, {"odd": source}, group="dstrain")
    extensions = load_extensions()
    assert not extensions.offered("dstrain_tasks", SimpleNamespace, ())
    (said,) = extensions.broken
    assert said.startswith(f"plugin extra-odd 1.0: {reason}")


def test_a_name_of_dstrains_own_is_refused(fake_plugin: Install) -> None:
    fake_plugin("extra-good", {"good": "own"}, {"own": HOOKS}, group="dstrain")
    extensions = load_extensions()
    assert not extensions.offered("dstrain_tasks", SimpleNamespace, ("a task",))
    (said,) = extensions.broken
    assert "has the same name as one of dstrain's own" in said


MODIFY = """
import torch
from dstrain.registry.hooks import hookimpl
CALLS = []
def halved(value):
    return value * 0.5
@hookimpl
def dstrain_modify_step(step, model, optimizer):
    CALLS.append(step)
    optimizer.lr = halved(model.lr)
@hookimpl
def dstrain_step_end(numbers):
    raise ValueError("no")
"""


def install(fake_plugin: Install, source: str, version: str = "1.0") -> None:
    names = {"changes": "changes_steps"}
    modules = {"changes_steps": source}
    sys.modules.pop("changes_steps", None)
    fake_plugin("extra-changes", names, modules, group="dstrain", version=version)


def test_a_hook_changes_steps_even_where_its_other_hook_was_disabled(
    fake_plugin: Install,
) -> None:
    install(fake_plugin, MODIFY)
    extensions = load_extensions()
    model, optimizer = SimpleNamespace(lr=1.0), SimpleNamespace(lr=0.0)
    assert len(extensions.step_end(1, {})) == 1
    assert extensions.step_end(2, {}) == []
    extensions.modify_step(2, model, optimizer)  # type: ignore[arg-type]
    assert optimizer.lr == 0.5


def test_what_changes_steps_is_named_with_its_version_and_a_digest_of_its_code(
    fake_plugin: Install, tmp_path: Path
) -> None:
    assert load_extensions().modifiers() == {}
    install(fake_plugin, MODIFY)
    before = load_extensions().modifiers()
    assert list(before) == ["changes (extra-changes 1.0)"]
    again = load_extensions()
    assert again.modifiers() == before
    texts = {
        "the same": MODIFY.replace("CALLS = []", "# a remark\nCALLS = []"),
        "another": MODIFY.replace("value * 0.5", "value * 0.25"),
    }
    digests = {}
    for name, text in texts.items():
        (tmp_path / "site/changes_steps.py").write_text(text)
        del sys.modules["changes_steps"]
        digests[name] = load_extensions().modifiers()
    assert digests["the same"] == before
    assert digests["another"] != before


def test_each_of_two_of_a_distribution_changes_the_run(
    fake_plugin: Install,
) -> None:
    names = {"one": "changes_one", "two": "changes_two"}
    fake_plugin("extra-both", names, dict.fromkeys(names.values(), MODIFY), "dstrain")
    both = load_extensions().modifiers()
    assert sorted(both) == ["one (extra-both 1.0)", "two (extra-both 1.0)"]
    assert len(load_extensions(("one",)).modifiers()) == 1


def test_a_method_changes_steps_too(fake_plugin: Install) -> None:
    source = """
from dstrain.registry.hooks import hookimpl
class Half:
    @hookimpl
    def dstrain_modify_step(self, model):
        model.lr = 0.5
HALF = Half()
"""
    fake_plugin(
        "extra-half", {"half": "half_steps:HALF"}, {"half_steps": source}, "dstrain"
    )
    extensions = load_extensions()
    model = SimpleNamespace(lr=1.0)
    extensions.modify_step(1, model, None)  # type: ignore[arg-type]
    assert model.lr == 0.5
    assert list(extensions.modifiers()) == ["half (extra-half 1.0)"]


@pytest.mark.parametrize("error", ["ValueError('no')", "SystemExit(3)"])
def test_a_change_that_raises_ends_the_run_and_names_the_plugin(
    error: str, fake_plugin: Install
) -> None:
    install(fake_plugin, MODIFY.replace("CALLS.append(step)", f"raise {error}"))
    with pytest.raises(UsageError) as caught:
        load_extensions().modify_step(3, None, None)  # type: ignore[arg-type]
    assert caught.value.where == "plugin extra-changes 1.0"
    name = error.partition("(")[0]
    assert f"dstrain_modify_step hook raised {name}" in caught.value.what
    assert "after step 3" in caught.value.what
    assert "-p no:changes" in caught.value.help_lines[0]
