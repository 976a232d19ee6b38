"""`dstrain cache`: arguments, output and exit codes."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.caching_project import Place, filled_place

Run = Callable[..., str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with filled_place(tmp_path_factory.mktemp("filled")) as place:
        yield place


def test_without_a_command_it_prints_its_help(cache: Run) -> None:
    assert "verify" in cache()
    cache("lss", code=2)
    cache("ls", code=2)


def test_ls_lists_several_caches_as_text_and_as_json(place: Place, cache: Run) -> None:
    assert cache("ls", place.cache, place.cache).count(f"{place.cache}: 4 rows") == 2
    (found,) = json.loads(cache("ls", "--json", place.cache))
    assert found["rows"] == 4


@pytest.mark.parametrize("command", ["ls", "verify", "prune"])
def test_what_is_no_cache_is_refused(command: str, tmp_path: Path, cache: Run) -> None:
    assert str(tmp_path) in cache(command, tmp_path, code=3)
    (tmp_path / "store.json").write_text('{"format": "dstrain-features", "version": 1}')
    assert "another format" in cache(command, tmp_path, code=3)
    cache(command, "", code=2)


def test_verify_prints_what_it_read(place: Place, cache: Run) -> None:
    assert "1 plan" in cache("verify", place.cache)


def test_prune_removes_what_is_named_with_yes_alone(place: Place, cache: Run) -> None:
    (plan,) = place.plans
    said = cache("prune", place.cache)
    assert plan.stem in said and "--plan" in said
    assert "--yes" in cache("prune", place.cache, "--plan", plan.stem[:8])
    cache("prune", place.cache, "--plan", "none", "--yes", code=2)
    assert plan.exists()


def test_help_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from dstrain.cli.main import main; code = main(['cache', 'verify', '--help']);"
        " sys.exit(code or bool({'torch', 'numpy', 'pyarrow'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
