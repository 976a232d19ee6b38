"""`dstrain cache show`, `export` and `import`: arguments, output and exit codes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dstrain import StateError
from dstrain.cache.in_use import exclusive, readers
from dstrain_tools.caches.contact_sheet import Wanted, show
from dstrain_tools.caches.exporting import export

from tests.support.caching_project import Place

Run = Callable[..., str]


def test_what_is_exported_is_imported_with_its_plan(
    shared_place: Place, tmp_path: Path, cache: Run
) -> None:
    (plan,) = shared_place.plans
    tar = tmp_path / "cache.tar"
    words = ("export", shared_place.cache, tar, "--plan", plan.stem[:8])
    cache(*words)
    written = tar.read_bytes()
    cache(*words, code=2)
    cache("export", shared_place.cache, tmp_path / "no.tar", "--plan", "none", code=2)
    assert tar.read_bytes() == written
    assert "--task TASK:train" in cache("import", tar, tmp_path / "cache")
    cache("verify", tmp_path / "cache")
    cache("import", plan, tmp_path / "more", code=3)
    cache("import", tmp_path / "none", tmp_path / "more", code=2)


def test_show_takes_rows_and_ranges_of_them(
    shared_place: Place, tmp_path: Path, cache: Run
) -> None:
    words = ("show", shared_place.cache, "--output", tmp_path / "x.html", "--rows")
    for wrong in ("a", "1-", "-1", "1,,2", ""):
        assert "--rows: " in cache(*words, wrong, code=2)
    assert "--limit: " in cache(*words, "0", "--limit", "0", code=2)
    cache(*words, "0", "--plan", "none", code=2)
    assert "2 samples" in cache(*words, "0-3", "--limit", "2")
    (tmp_path / "x.html").unlink()
    assert "3 samples" in cache(*words, "0-1,3")
    assert (tmp_path / "x.html").read_text().count("<figure>") == 3


@pytest.mark.parametrize("name", ["show", "export"])
def test_nothing_is_removed_while_a_cache_is_read(
    name: str, here: Path, tmp_path: Path
) -> None:
    folder = here / "whole"
    commands: dict[str, Callable[[], Any]] = {
        "show": partial(show, folder, tmp_path / "x.html", Wanted(None, (), 1, {})),
        "export": partial(export, folder, tmp_path / "out", []),
    }
    with exclusive(folder), pytest.raises(StateError) as caught:
        commands[name]()
    assert caught.value.where == str(folder)
    commands[name]()
    assert readers(folder) == []
