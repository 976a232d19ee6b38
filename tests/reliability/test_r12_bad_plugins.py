"""A bad plugin is shown as broken, by name and with its reason; others still run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from dstrain import Pipeline, UsageError
from dstrain.cli import inspection
from dstrain.cli.main import main
from dstrain.installed import GROUP, HOOK_GROUP, installed
from safetensors.torch import save_file

from tests.support.runs import log, project

pytestmark = pytest.mark.promise(
    "R12", "a bad plugin is shown as broken and harms no other"
)
Install = Callable[..., Path]
Source = Callable[..., str]
LEFT_OUT = (
    "tiny",
    *{one.name for group in (GROUP, HOOK_GROUP) for one in installed(group=group)},
)
"""Plugins that are not listed, so that a trial is quick."""
HOOK = "from dstrain.registry.hooks import hookimpl\napi = 2\n"


@dataclass(frozen=True)
class Bad:
    """A plugin: `source` of its module, or the fields of a record; the reason that is
    shown of it.

    others: further plugins that are broken with it. at_run: what a training run warns
    of.
    """

    reason: str
    source: str = ""
    fields: tuple[tuple[str, str], ...] = ()
    entry: str = "bad_module:MODEL"
    twice: bool = False
    hooks: bool = False
    at_run: str = ""


def family(reason: str, **fields: str) -> Bad:
    return Bad(reason, fields=tuple(fields.items()))


def hook(reason: str, source: str) -> Bad:
    return Bad(reason, source, entry="bad_module", hooks=True, at_run=reason)


CASES: tuple[tuple[str, Bad], ...] = (
    ("import error", Bad("cannot be imported: ModuleNotFoundError: No module named 'not_there'", "import not_there")),
    ("syntax error", Bad("cannot be imported: SyntaxError", "def (:")),
    ("raises", Bad("cannot be imported: ZeroDivisionError: division by zero", "1 / 0")),
    ("leaves with sys.exit", Bad("cannot be imported: SystemExit: 0", "import sys\nsys.exit(0)")),
    ("ends the process", Bad("exit code 9) torn off", "import os\nos.write(2, b'torn off')\nos._exit(9)")),
    ("hangs", Bad("its import took longer than 10 s", "import time\ntime.sleep(60)")),
    ("no module", Bad("cannot be imported: ModuleNotFoundError: No module named 'gone_module'",
                      entry="gone_module:MODEL")),
    ("no MODEL", Bad("cannot be imported: AttributeError", "X = 1")),
    ("a dictionary", Bad("bad_module:MODEL is a dict, not a dstrain.plugin.ModelFamily", "MODEL = {}")),
    ("other interface", family("made for plugin interface 99, this dstrain has 2", api="99")),
    ("other name", family("its entry point is named 'bad', but its record 'else'", name="'else'")),
    ("no variant", family("has no variant", variants="()")),
    ("one text for variants", family("its field variants is a str, not a tuple", variants="'base'")),
    ("options that are none", family("its field options contains something other than Option", options="('a',)")),
    ("no pipelines", family("its pipelines, 'gone_module:build', does not exist", pipelines="'gone_module:build'")),
    ("no place for the toy", family("its toy, 'bad_module', does not exist", toy="'bad_module'")),
    ("flag of ours", family("its flag --seed is already one of dstrain's own", options="(Option('seed', 'S.'),)")),
    ("flag of generate", family("its flag --num_inference_steps is already one of dstrain's own",
                                options="(Option('num_inference_steps', 'S.'),)")),
    ("flag of a file's", family("its flag --config is already", options="(Option('config', 'S.'),)")),
    ("two of one name", Bad("'bad' is provided by plugin-bad 1.0 and by plugin-twin 1.0", twice=True)),
    ("prints, and then fails", Bad("cannot be imported: KeyError", "print('noise')\n{}['x']")),
    ("hook: import error", hook("cannot be imported: ModuleNotFoundError", "import not_there")),
    ("hook: unknown name", hook("unknown hook 'dstrain_tusks'", HOOK + "@hookimpl\ndef dstrain_tusks(): return ()")),
    ("hook: wrong arguments", hook("nonsense", HOOK + "@hookimpl\ndef dstrain_modify_step(step, nonsense): pass")),
    ("hook: tasks raise", hook("dstrain_tasks failed: ValueError: no",
                               HOOK + "@hookimpl\ndef dstrain_tasks(): raise ValueError('no')")),
    ("hook: tasks of a wrong type", hook("dstrain_tasks failed: TypeError: returned str, not Task",
                                         HOOK + "@hookimpl\ndef dstrain_tasks(): return ['sft']")),
    ("hook: no list of tasks", hook("dstrain_tasks failed: TypeError",
                                    HOOK + "@hookimpl\ndef dstrain_tasks(): return 3")),
    ("hook: a task of ours", hook("its task 'sft' has the same name as one of dstrain's own",
        HOOK + "from dstrain.plugin import Task\n@hookimpl\ndef dstrain_tasks():\n"
               "    def loss(predict): return predict\n    return [Task.of('sft', loss)]")),
    ("hook: a command of ours", Bad("its command 'train' has the same name as one of dstrain's own",
        HOOK + "import click\n@hookimpl\ndef dstrain_commands(): return [click.Command('train')]",
        entry="bad_module", hooks=True)),
    ("hook: commands leave", Bad("dstrain_commands failed: SystemExit: 3",
        HOOK + "@hookimpl\ndef dstrain_commands(): raise SystemExit(3)", entry="bad_module", hooks=True)),
    *((f"hook: {name} are None", Bad(f"dstrain_{name} failed: TypeError: returned None",
        HOOK + f"@hookimpl\ndef dstrain_{name}(): return None", entry="bad_module", hooks=True))
      for name in ("commands", "hints")),
)  # fmt: skip


def install(bad: Bad, fake_plugin: Install, family_source: Source) -> None:
    source = bad.source or family_source("bad", **dict(bad.fields))
    fake_plugin(
        "plugin-bad",
        {"bad": bad.entry},
        {"bad_module": source},
        "dstrain" if bad.hooks else "dstrain.models",
    )
    if bad.twice:
        fake_plugin("plugin-twin", {"bad": bad.entry}, {})
    fake_plugin(
        "plugin-good",
        {"good": "good_module:MODEL"},
        {"good_module": family_source("good")},
    )


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    "bad", [bad for _, bad in CASES], ids=[name for name, _ in CASES]
)
def test_it_is_shown_as_broken_with_its_reason_and_the_others_work(
    bad: Bad, fake_plugin: Install, family_source: Source, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    install(bad, fake_plugin, family_source)
    if "time.sleep" in bad.source:
        monkeypatch.setattr(inspection, "IMPORT_TIMEOUT", 10.0)
    monkeypatch.chdir(tmp_path)
    disabled = [f"-pno:{name}" for name in LEFT_OUT]
    assert main(["plugins", "--json", *disabled]) == 0
    rows = json.loads(capfd.readouterr().out)
    found = {(row["name"], row["distribution"]): row for row in rows}
    assert found["bad", "plugin-bad"]["state"] == "broken"
    assert bad.reason in found["bad", "plugin-bad"]["reason"]
    assert [row["name"] for row in rows if row["state"] == "ready"] == ["good"]
    works(tmp_path, capfd, bad.at_run if bad.hooks else "")


def works(folder: Path, capfd: pytest.CaptureFixture[str], warned: str) -> None:
    place = project(folder / "project")
    model = ["--model", "tiny", "--toy"]
    train = [*model, "--dataset_base_path", str(place / "data"), "--lora_rank=2"]
    once = ["--max_steps=1", "--output_path"]
    assert main(["models"]) == 0
    assert main(["graph", "--model", "tiny"]) == 0
    capfd.readouterr()
    assert main([*train, *once, str(place / "out")]) == 0
    printed = capfd.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err
    warnings = [
        line
        for line in printed.err.splitlines()
        if line.startswith("dstrain: warning: plugin plugin-bad 1.0: ")
    ]
    assert not warned or [line for line in warnings if warned in line]
    cached = [*train, "--feature_cache", str(place / "cache"), "--task"]
    assert main([*cached, "sft:data_process"]) == 0
    assert main([*cached, "sft:train", *once, str(place / "out2")]) == 0
    lora = str(next((place / "out").glob("*.safetensors")))
    make = ["generate", *model, "--prompt=dog", "--num_inference_steps=1"]
    assert main([*make, "--lora", lora, "--output", str(place / "x.png")]) == 0
    assert main(["toy", "--model", "tiny", "--output", str(place / "toy")]) == 0
    if warned:
        assert main(["nothing-like-it"]) == 2
        assert main([*train, "--task", "nothing", "--dry_run"]) == 2
        said = capfd.readouterr().err
        assert "Traceback" not in said
        assert "no command named" in said and "no task named" in said


def install_hooks(fake_plugin: Install, **sources: str) -> None:
    """Install a plugin of hooks, extra-NAME, for each source."""
    for name, source in sources.items():
        fake_plugin(
            f"extra-{name}",
            {name: f"{name}_hooks"},
            {f"{name}_hooks": source},
            group="dstrain",
        )


def train_toy(folder: Path, steps: int, *more: str) -> int:
    """Train the toy of `tiny` on a fresh dataset; returns the exit code."""
    place = project(folder)
    words = ["--model", "tiny", "--toy", "--dataset_base_path", str(place / "data")]
    words += ["--lora_rank", "2", "--max_steps", str(steps)]
    return main([*words, "--output_path", str(place / "out"), *more])


def observing(body: str, method: str = "step(self, run, numbers)") -> str:
    """A plugin of one observer, with this body of one method."""
    imports = f"{HOOK}import time\nfrom dstrain import UsageError\nfrom dstrain.plugin import Observer\n"
    own = f"class Own(Observer):\n    def {method}:\n        {body}\n"
    return f"{imports}{own}@hookimpl\ndef dstrain_observers(run):\n    return [Own()]\n"


FAULTS = (
    "start(self, run)",
    "step(self, run, numbers)",
    "saved(self, run, files)",
    "end(self, run, how)",
    "state(self)",
)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    "error", ["ValueError('no')", "SystemExit(3)", "UsageError('a', 'b')"]
)
@pytest.mark.parametrize("method", FAULTS)
def test_an_observer_that_raises_is_disabled_and_the_run_completes(
    method: str, error: str, fake_plugin: Install, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    good = observing("print('seen', run.step)")
    install_hooks(fake_plugin, bad=observing(f"raise {error}", method), good=good)
    assert train_toy(tmp_path / "project", steps=3) == 0
    printed = capfd.readouterr()
    seen = [line for line in printed.out.splitlines() if line.startswith("seen")]
    assert seen == ["seen 1", "seen 2", "seen 3"]
    said = f"plugin extra-bad 1.0 disabled: Own.{method.partition('(')[0]} raised "
    assert printed.err.count(said) == 1


@pytest.mark.usefixtures("tiny")
def test_the_share_of_a_slow_observer_stands_in_the_summary(
    fake_plugin: Install, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    install_hooks(fake_plugin, slow=observing("time.sleep(0.3)"), quick=observing("0"))
    assert train_toy(tmp_path / "project", steps=2) == 0
    printed = capfd.readouterr().err
    assert "plugin extra-slow 1.0: its Own took " in printed
    assert "extra-quick" not in printed


@pytest.mark.usefixtures("tiny")
def test_an_observer_cannot_change_what_others_see(
    fake_plugin: Install, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good = observing("print('seen', numbers['loss'])")
    bad = observing("numbers['loss'] = 0.0")
    install_hooks(fake_plugin, a_bad=bad, b_good=good)
    assert train_toy(tmp_path / "project", steps=2) == 0
    printed = capfd.readouterr()
    assert printed.err.count("plugin extra-a_bad 1.0 disabled: Own.step") == 1
    seen = [line for line in printed.out.splitlines() if line.startswith("seen ")]
    losses = [one["loss"] for one in log(tmp_path / "project/out")]
    assert [float(one.split()[1]) for one in seen] == pytest.approx(losses, rel=1e-5)


@dataclass(frozen=True)
class Fault:
    """A plugin that is at fault in a run: `source` of its module; what a run says of it.

    code: the exit code: 0 where the run goes on without it. option: whether the module has
    a class of options, Own, and no hooks. words: more of the command line.
    """

    said: str
    source: str
    code: int = 0
    option: bool = False
    words: tuple[str, ...] = ()
    twin: bool = False


def option(said: str, field: str, code: int = 0, *words: str) -> Fault:
    """A class of options with one field, or with another body."""
    body = f"    {field}\n"
    source = f"from dstrain.plugin import UsageError, option, options\n@options\nclass Own:\n{body}"
    return Fault(said, source, code, option=True, words=words)


def hooked(
    said: str, body: str, code: int = 0, *words: str, twin: bool = False
) -> Fault:
    imports = (
        HOOK
        + "from dstrain.plugin import Defaults, Form, Keeper, PromptRow, Section, Updater\n"
    )
    return Fault(
        said, f"{imports}@hookimpl\ndef {body}\n", code, words=words, twin=twin
    )


def keeping(said: str, *body: str) -> Fault:
    """A keeper with these lines in its class, for every run."""
    own = "".join(f"    {line}\n" for line in (*body, "pass"))
    hook = "@hookimpl\ndef dstrain_keepers(request): return [Own()]\n"
    imports = "from dstrain.plugin import Keeper\n"
    return Fault(said, f"{HOOK}{imports}class Own(Keeper):\n{own}{hook}", 2)


def updating(said: str, method: str) -> Fault:
    """An updater with this method."""
    own = f"from dstrain.plugin import Updater\nclass Own(Updater):\n    def {method}\n"
    hook = "@hookimpl\ndef dstrain_updater(options): return Own()\n"
    return Fault(said, f"{HOOK}{own}{hook}", 2)


def offering(said: str, kind: str, name: str, more: str = "") -> Fault:
    """A type of LoRA, or a format, with this name."""
    hook = f"dstrain_{kind.lower().replace('lora', 'lora_')}s(): return [Own()]\n"
    imports = f"from dstrain.plugin.lora import {kind}\n"
    own = f"class Own({kind}):\n    name = {name!r}\n{more}"
    return Fault(said, f"{HOOK}{imports}{own}@hookimpl\ndef {hook}")


ZIP = ("--dataset_metadata_path", "photos.zip")
OWN = "own of plugin extra-bad 1.0"
OTHER = "it was made for plugin interface"
FAULTY: tuple[tuple[str, Fault], ...] = (
    ("no api", Fault(f"{OTHER} 1, this dstrain has 2", "")),
    ("another api", Fault(f"{OTHER} 3, this dstrain has 2", "api = 3")),
    ("an api that is a text", Fault(f"{OTHER} '2.0', this dstrain has 2", "api = '2.0'")),
    ("a retired hook", hooked("dstrain_step_end is no hook any more; implement dstrain_observers",
                              "dstrain_step_end(step, numbers): pass")),
    *((f"{hook.partition('(')[0]} that is None", hooked(
        f"plugin-bad 1.0: dstrain_{hook.partition('(')[0]} failed: TypeError: returned None",
        f"dstrain_{hook}: return None", code, *words))
      for hook, code, words in (("tasks()", 0, ()), ("rows(options)", 0, ()), ("observers(run)", 0, ()),
                                ("lora_types()", 0, ()), ("lora_formats()", 0, ()), ("forms(options)", 2, ZIP),
                                ("dry_run(planned)", 0, ("--dry_run",)))),
    *((f"{hook} that are None", hooked(
        f"plugin-bad 1.0: its dstrain_{hook} hook raised TypeError: returned None",
        f"dstrain_{hook}(): return None", 2)) for hook in ("keepers", "defaults")),
    ("a section that raises", hooked("dstrain_dry_run failed: ZeroDivisionError",
                                     "dstrain_dry_run(planned): 1 / 0", 0, "--dry_run")),
    ("a section that is a text", hooked("dstrain_dry_run failed: TypeError: returned str",
                                        "dstrain_dry_run(planned): return ['x']", 0, "--dry_run")),
    *((f"a section of {what}", hooked("dstrain_dry_run failed: TypeError",
        f"dstrain_dry_run(planned): return [Section('t', {given})]", 0, "--dry_run"))
      for what, given in (("numbers", "[3]"), ("no JSON", "(), {'a': {1}}"))),
    ("no list of sections", hooked("dstrain_dry_run failed: TypeError",
                                   "dstrain_dry_run(planned): return 3", 0, "--dry_run")),
    ("observers that raise", hooked("dstrain_observers failed: ZeroDivisionError", "dstrain_observers(run): 1 / 0")),
    ("an observer that is a text", hooked("dstrain_observers failed: TypeError: returned str, not Observer",
                                          "dstrain_observers(run): return ['x']")),
    ("observers that refuse", hooked("--flag: is not for this model", """dstrain_observers(run):
    from dstrain import UsageError
    raise UsageError("--flag", "is not for this model")""", 2)),
    ("two updaters", hooked("updates weights in a way of its own, as plugin plugin-twin 1.0 does",
                            "dstrain_updater(options): return Updater()", 2, twin=True)),
    ("an updater that raises", hooked("its dstrain_updater hook raised ZeroDivisionError",
                                      "dstrain_updater(options): 1 / 0", 2)),
    *((f"an updater whose {method}", updating(f"plugin plugin-bad 1.0: its updater raised {said}", method))
      for said, method in (("ZeroDivisionError", "start(self, *given): 1 / 0"),
                           ("TypeError: clip returned float", "clip(self): return 1.0"),
                           ("SystemExit", "step(self): raise SystemExit"))),
    ("rows that are no text", hooked("dstrain_rows failed: TypeError: prompt is 3",
                                     "dstrain_rows(options): return [PromptRow('--x', 't', 3)]")),
    ("a default of no value", hooked("its dstrain_defaults hook raised TypeError: values are texts",
                                     "dstrain_defaults(options): return [Defaults('it', {'seed': None})]", 2)),
    ("a change of steps that raises", hooked("its dstrain_modify_step hook raised ZeroDivisionError",
                                             "dstrain_modify_step(step): 1 / 0", 2)),
    ("hints that raise", hooked("plugin plugin-bad 1.0: dstrain_hints failed: ZeroDivisionError",
                                "dstrain_hints(): 1 / 0", 2, "--network_dimm", "3")),
    ("hints that are none", hooked("dstrain_hints failed: TypeError", "dstrain_hints(): return {'--network_dimm': 3}",
                                   2, "--network_dimm", "3")),
    ("forms that raise", hooked("dstrain_forms failed: ZeroDivisionError", "dstrain_forms(options): 1 / 0", 2, *ZIP)),
    ("a form that is a text", hooked("dstrain_forms failed: TypeError: returned str, not Form",
                                     "dstrain_forms(options): return ['zip']", 2, *ZIP)),
    ("a form that raises", Fault("bad 1.0: its form zip, at photos.zip", HOOK + """from dstrain.plugin import Form
class Zip(Form):
    name = "zip"
    reads = (".zip",)
    def find(self, given): raise OSError('not gzipped')
@hookimpl
def dstrain_forms(options): return [Zip()]
""", 2, words=ZIP)),
    ("a form that finds a text", Fault("its form zip, at photos.zip, raised TypeError: find returned str", HOOK +
        """from dstrain.plugin import Form
class Zip(Form):
    name = "zip"
    def find(self, given): return 'photos'
@hookimpl
def dstrain_forms(options): return [Zip()]
""", 2, words=ZIP)),
    ("an option of ours", option("its option --seed is already one of dstrain's own",
                                 "seed: int = option('data', 'S.', 1)")),
    ("an option of another plugin", replace(
        option("its option --shade is one of plugin plugin-", "shade: int = option('data', 'S.', 1)"), twin=True)),
    ("a default of a wrong type", option("its option --shade is not usable: its default",
                                         "shade: int = option('data', 'S.', 'dark')")),
    ("a default out of bounds", option("its option --shade is not usable: its default",
                                       "shade: int = option('data', 'S.', 1, minimum=2)")),
    ("an option of no type", option("its option --shade is not usable: is of type <class 'dict'>",
                                    "shade: dict = option('data', 'S.')")),
    ("an option in upper case", option("its option --Shade is not usable: has a name",
                                       "Shade: int = option('data', 'S.')")),
    ("a check that raises", option("plugin plugin-bad 1.0: the check of its options raised ZeroDivisionError",
                                   "shade: int = option('data', 'S.')\n    def check(self, config): 1 / 0", 2)),
    ("several or none, not given", option("", """shades: tuple[str, ...] | None = option('data', 'S.')
    def check(self, config): assert self.shades is None""")),
    ("an effect that is none", option("affects 'weather', which is no effect",
                                      "shade: int = option('data', 'S.', 1, affects={'weather'})")),
    ("a command that is none", option("is for commands ('export',)",
                                      "shade: int = option('data', 'S.', 1, commands=('export',))")),
    ("options that are no class", Fault("is no class of options", "Own = 3", option=True)),
    ("options that cannot be imported",
     Fault("cannot be imported: ModuleNotFoundError", "import not_there", option=True)),
    ("a check that refuses", option("--shade: is too dark", """shade: int = option('data', 'S.', 1)
    def check(self, config): raise UsageError('--shade', 'is too dark')""", 2)),
    ("two keepers of a kind", replace(keeping(
        "dstrain: error: plugin plugin-twin 1.0: plugin plugin-bad 1.0 and plugin plugin-twin 1.0 both move "
        "the weights of dit", "components = ('dit',)"), twin=True)),
    ("a keeper for no component", keeping("plugin plugin-bad 1.0: its keeper Own is for no component")),
    ("a keeper of no kind", keeping("its keeper Own is of kind 'shrink'", "components = ('dit',)", "kind = 'shrink'")),
    *((f"a keeper that raises in {method}", keeping("plugin plugin-bad 1.0: its keeper Own raised ZeroDivisionError",
        "components = ('dit',)", f"def {method}: 1 / 0", *more))
      for method, *more in (("place(self, component, network, name, weight)",), ("identity(self, component, config)",),
                            ("describe(self, component)",), ("recorded(self)",), ("on_device(self, component)",),
                            ("step_done(self)",),
                            ("leave(self)", "from contextlib import contextmanager", "@contextmanager",
                             "def on_device(self, component):", "    yield", "    self.leave()"))),
    *((f"a keeper that returns a text in {method}", keeping(f"its keeper Own raised {said}",
        "components = ('dit',)", f"def {method}")) for said, method in (
            ("AttributeError", "identity(self, *given): return 'x'"),
            ("TypeError: place returned no tensor", "place(self, *given): pass"))),
    ("keepers that raise", hooked("its dstrain_keepers hook raised ZeroDivisionError",
                                  "dstrain_keepers(request): 1 / 0", 2)),
    ("keepers that are none", hooked("its dstrain_keepers hook raised TypeError: returned str, not Keeper",
                                     "dstrain_keepers(request): return ['dit']", 2)),
    ("defaults that raise", hooked("its dstrain_defaults hook raised ZeroDivisionError",
                                   "dstrain_defaults(options): 1 / 0", 2)),
    ("defaults that are a dictionary", hooked("its dstrain_defaults hook raised TypeError: returned dict",
                                              "dstrain_defaults(options): return [{'seed': '1'}]", 2)),
    ("defaults without values", hooked("plugin plugin-bad 1.0: its dstrain_defaults hook raised TypeError",
                                       "dstrain_defaults(options): return [Defaults('it', 3)]", 2)),
    ("a default that is no number", hooked("it:seed: ",
        "dstrain_defaults(options): return [Defaults('it', {'seed': 'x'})]", 2)),
    ("a default that is several", hooked("it:seed: expected one value",
                                         "dstrain_defaults(options): return [Defaults('it', {'seed': ['1']})]", 2)),
    ("a default of no option", hooked("it:sead: ",
        "dstrain_defaults(options): return [Defaults('it', {'sead': '1'})]", 2)),
    ("a LoRA type of our name", offering("its LoRA type 'lora' has the same name", "LoraType", "lora")),
    ("a LoRA type without a name", offering("its LoRA type '' has no name", "LoraType", "")),
    ("a LoRA type of no keys", offering("its LoRA type 'own' has keys that are no", "LoraType", "own",
                                        "    keys = '('\n")),
    ("a LoRA type that peft has not", replace(offering("bad 1.0: its LoRA type 'own' raised", "LoraType", "own",
        "    kind = 'No'\n"), code=2, words=("--lora_type", "own"))),
    ("a LoRA type that is a text", hooked("dstrain_lora_types failed: TypeError: returned str, not LoraType",
                                          "dstrain_lora_types(): return ['hra']")),
    ("LoRA types that raise", hooked("dstrain_lora_types failed: ZeroDivisionError", "dstrain_lora_types(): 1 / 0")),
    *((f"a LoRA type whose {method} raises", replace(offering(
        "plugin plugin-bad 1.0: its LoRA type 'own' raised ZeroDivisionError", "LoraType", "own",
        f"    def {method}(self, *given): 1 / 0\n"), code=2, words=("--lora_type", "own")))
      for method in ("settings", "check", "configured")),
    ("a LoRA type that fails on names of LoRA", offering("", "LoraType", "own", "    def names(self, parts): 1 / 0\n")),
    *((f"a LoRA format that nobody chose, whose {method} raises", offering(
        "plugin plugin-bad 1.0: its LoRA format own is left out: ZeroDivisionError", "LoraFormat", "own",
        f"    def {method}(self, *given): 1 / 0\n")) for method in ("needs_export", "has_names", "asked_by")),
    *((f"a chosen LoRA format whose {method} raises", replace(offering(
        "error: plugin plugin-bad 1.0: its LoRA format own raised ZeroDivisionError", "LoraFormat", "own",
        f"    def has_names(self, *given): return True\n    def {method}(self, *given): 1 / 0\n"),
        code=2, words=("--lora_format", "own"))) for method in ("has_names", "check")),
    ("a LoRA format of our name", offering("its LoRA format 'diffusers' has the same name", "LoraFormat", "diffusers")),
    ("LoRA formats that raise", hooked("dstrain_lora_formats failed: ZeroDivisionError",
                                       "dstrain_lora_formats(): 1 / 0")),
)  # fmt: skip


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    "fault", [fault for _, fault in FAULTY], ids=[name for name, _ in FAULTY]
)
def test_what_a_run_says_of_a_plugin_at_fault(
    fault: Fault,
    fake_plugin: Install,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    group = "dstrain.options" if fault.option else "dstrain"
    for name in ("bad", "twin") if fault.twin else ("bad",):
        module = f"{name}_{abs(hash(fault))}"
        place = f"{module}:Own" if fault.option else module
        fake_plugin(f"plugin-{name}", {name: place}, {module: fault.source}, group)
    assert train_toy(tmp_path / "project", 1, *fault.words) == fault.code
    said = " ".join(capfd.readouterr().err.split())
    assert fault.said in said
    assert "Traceback" not in said
    assert said.count(fault.said) == 1 or not fault.said


@pytest.mark.usefixtures("tiny")
def test_an_option_whose_plugin_is_broken_is_refused_by_both_names(
    fake_plugin: Install, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    field = "shade: int = option('data', 'S.', 1, commands=('train', 'generate'))"
    own = option("", field).source
    modules = {"unheard_options": own, "unheard_hooks": "api = 3"}
    entries = {"unheard": "unheard_options:Own"}
    site = fake_plugin("plugin-unheard", entries, modules, "dstrain.options")
    with next(site.glob("*/entry_points.txt")).open("a") as file:
        file.write("[dstrain]\nunheard = unheard_hooks\n")
    toy = ["--model", "tiny", "--toy", "--shade"]
    data = str(project(tmp_path / "project") / "data")
    train = ["--dataset_base_path", data, "--output_path", str(tmp_path / "out")]
    train += ["--lora_rank", "2", "--max_steps", "1"]
    make = ["--prompt", "a", "--output", str(tmp_path / "a.png")]
    for words in (train, [*train, "--dry_run"], make):
        command = ["generate"] if words is make else []
        assert main([*command, *toy, "2", *words]) == 2
        said = " ".join(capfd.readouterr().err.split())
        assert "--shade: is of plugin plugin-unheard 1.0, which is broken" in said
        assert OTHER in said
    with pytest.raises(UsageError, match="--shade: is of plugin plugin-unheard"):
        Pipeline.from_pretrained("tiny", shade=2)
    assert main([*toy, "1", *train]) == 0


def test_options_that_import_torch_are_refused_by_the_name_of_their_plugin(
    fake_plugin: Install, tmp_path: Path
) -> None:
    own = "shade: int = option('data', 'S.', 1)"
    source = f"import torch\nfrom dstrain.plugin import option, options\n@options\nclass Own:\n    {own}\n"
    site = fake_plugin(
        "plugin-bad",
        {"bad": "heavy_options:Own"},
        {"heavy_options": source},
        "dstrain.options",
    )
    code = (
        "from dstrain.config.options import TrainConfig\n"
        "from dstrain.config.plugin_options import broken_records, flags\n"
        "print(broken_records(TrainConfig), 'shade' in {one.name for one in flags(TrainConfig)})"
    )
    paths = os.pathsep.join([str(site), *filter(None, sys.path)])
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    ).stdout
    assert (
        "plugin plugin-bad 1.0: its options, heavy_options:Own, import torch" in found
    )
    assert found.rstrip().endswith("False")


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("def reads(self, keys, header): 1 / 0", 0, "bad 1.0: its LoRA format own is left out: ZeroDivisionError"),
        ("def read(self, source): 1 / 0", 3, f"start.safetensors: its format, {OWN}, failed: ZeroDivisionError"),
        ("def read(self, source): return None", 3, f"start.safetensors: its format, {OWN}, failed: TypeError"),
        ("def read(self, source): raise ValueError('is torn')", 3, "start.safetensors: is torn"),
        ("def components(self, path, tensors, family): 1 / 0", 3, f"{OWN}, failed: ZeroDivisionError"),
        ("def write(self, lora, family, shapes): 1 / 0", 3, f"{OWN}, failed: ZeroDivisionError"),
        ("def write(self, lora, family, shapes): return None", 3, f"{OWN}, failed: AttributeError"),
    ],
)  # fmt: skip
def test_a_format_of_lora_files_that_fails_is_named_with_the_file(
    body: str, code: int, said: str, fake_plugin: Install, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    place = project(tmp_path / "project")
    words = ["--model", "tiny", "--toy", "--dataset_base_path", str(place / "data")]
    words += ["--lora_rank", "2", "--max_steps", "1"]
    start = place / "start.safetensors"
    layer = "transformer.blocks.0.to_q"
    down, up = torch.ones(2, 8), torch.zeros(8, 2)
    matrices = {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
    save_file({**matrices, f"{layer}.alpha": torch.tensor(2.0)}, start)
    writes = "write" in body
    own = f"""{HOOK}from dstrain.plugin.lora import LoraFormat
class Own(LoraFormat):
    name = "own"
    def has_names(self, component, family, lora_type): return True
    def asked_by(self, options): return "--own" if {writes} else ""
    def reads(self, keys, header): return not {writes}
    {body}
@hookimpl
def dstrain_lora_formats(): return [Own()]
"""
    install_hooks(fake_plugin, bad=own)
    words += ["--output_path", str(place / "out")]
    if not writes:
        words += ["--preset_lora_path", str(start)]
    if "components" not in body and not writes:
        words += ["--preset_lora_model", "dit"]
    assert main(words) == code
    printed = capfd.readouterr().err
    assert said in " ".join(printed.split())
    assert "Traceback" not in printed
