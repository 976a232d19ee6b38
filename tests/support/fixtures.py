"""Plugins that are installed for one test, and the tests' own family (`family.py`),
installed for a module of tests.
"""

import importlib
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from dstrain import TrainConfig
from dstrain.cli.main import main

FakePlugin = Callable[..., Path]
Run = Callable[..., str]


def write_distribution(
    site: Path,
    name: str,
    entries: Mapping[str, str],
    group: str = "dstrain.models",
    version: str = "1.0",
) -> None:
    """Write the metadata of an installed distribution that has these entry points."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(about)
    lines = "\n".join(f"{name} = {value}" for name, value in entries.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}\n")


@pytest.fixture
def cache(capsys: pytest.CaptureFixture[str]) -> Run:
    """Words, exit code -> what `dstrain cache` prints, on stderr where it is refused."""

    def run(*words: object, code: int = 0) -> str:
        assert main(["cache", *map(str, words)]) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    return run


@pytest.fixture
def fake_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakePlugin]:
    """Return install(distribution, entry points, {module: source}), which returns the
    folder on sys.path.
    """
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def install(
        distribution: str,
        entries: Mapping[str, str],
        modules: Mapping[str, str],
        group: str = "dstrain.models",
        version: str = "1.0",
    ) -> Path:
        write_distribution(site, distribution, entries, group, version)
        for module, source in modules.items():
            (site / f"{module}.py").write_text(source)
        importlib.invalidate_caches()
        return site

    yield install
    for name, module in tuple(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(site)):
            del sys.modules[name]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which the test works."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def family_source() -> Callable[..., str]:
    """Return source(name, **fields as source text): a module that defines MODEL."""

    def source(name: str, /, **fields: str) -> str:
        given = {
            "name": repr(name),
            "api": "2",
            "pipelines": "__name__ + ':build'",
            "components": "__name__ + ':COMPONENTS'",
            "toy": "__name__ + ':toy'",
            "variants": "('base', 'edit')",
            "default_trainable": "'dit'",
            "lora_targets": "{'dit': ('to_q',)}",
            "lora_prefixes": "{'dit': 'transformer'}",
            "options": "(Option('tokenizer_path', 'Folder of the tokenizer.', 'tokenizer'),)",
            **fields,
        }
        arguments = ", ".join(f"{key}={value}" for key, value in given.items())
        return f"from dstrain.registry.family import ModelFamily, Option\nMODEL = ModelFamily({arguments})\n"

    return source


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the family `tiny`; returns the folder of its metadata, for processes that
    a test starts.
    """
    site = tmp_path_factory.mktemp("site")
    write_distribution(site, "plugin-tiny", {"tiny": "tests.support.family:MODEL"})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield site


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a model of the family `tiny`."""
    from tests.support.family import write

    folder = tmp_path_factory.mktemp("model")
    write(folder)
    return folder


@pytest.fixture
def pipe(tiny: Path, model: Path) -> Any:
    """A pipeline of that model."""
    from dstrain import Pipeline

    from tests.support.runs import configs

    return Pipeline.from_pretrained("tiny", list(configs(model)))


@pytest.fixture
def filled(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A project whose cache is filled (`stage_project.Project`)."""
    from tests.support.stage_project import filled_project

    return filled_project(tmp_path, monkeypatch)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A hub of Tiny/Tiny (`hub_server.tiny_hub`)."""
    from tests.support.hub_server import tiny_hub

    with tiny_hub(tmp_path, monkeypatch) as running:
        yield running


@pytest.fixture(params=["modelscope", "huggingface"])
def hub(request: pytest.FixtureRequest) -> str:
    """Each hub's name."""
    named: str = request.param
    return named


@pytest.fixture
def runs(
    fake_plugin: FakePlugin,
    family_source: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> list[TrainConfig]:
    """The configurations that the runner is given; the family `faky` is installed."""
    source = family_source("faky")
    fake_plugin("plugin-faky", {"faky": "faky_record:MODEL"}, {"faky_record": source})
    given: list[TrainConfig] = []
    runner = types.ModuleType("dstrain.runs.runner")
    runner.__dict__["start"] = given.append
    monkeypatch.setitem(sys.modules, "dstrain.runs.runner", runner)
    return given


@pytest.fixture
def lines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Words -> the lines that bash gets for the last one."""

    def answered(*words: str) -> list[str]:
        with monkeypatch.context() as patch:
            patch.setenv("_DSTRAIN_COMPLETE", "bash_complete")
            patch.setenv("COMP_WORDS", "\n".join(["dstrain", *words]))
            patch.setenv("COMP_CWORD", str(len(words)))
            assert main([]) == 0
        said = capfd.readouterr()
        assert not said.err
        return said.out.split()

    return answered


@pytest.fixture
def completed(lines: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Words -> the completions of the last one."""
    return lambda *words: [line.partition(",")[2] for line in lines(*words)]


@pytest.fixture(scope="module")
def here(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project without dropout, which tests leave as it is."""
    from tests.support.runs import warm_project

    return warm_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def dropping(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose denoiser has dropout, which tests leave as it is."""
    from tests.support.runs import warm_project

    return warm_project(tmp_path_factory.mktemp("dropping"), dropout=0.3)


@pytest.fixture
def ask_to_stop() -> Iterator[Callable[[], None]]:
    """Return a function that sends this process SIGTERM, which a run has to handle."""

    def fail(number: int, frame: object) -> None:
        raise AssertionError("no run handles the signal")

    before = signal.signal(signal.SIGTERM, fail)
    yield lambda: os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def shared_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A filled cache (`caching_project.Place`) of four rows, of which the last two have one
    prompt; tests leave it as it is.
    """
    from tests.support.caching_project import filled_place

    with filled_place(tmp_path_factory.mktemp("shared")) as place:
        yield place
