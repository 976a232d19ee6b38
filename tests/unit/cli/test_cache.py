"""`dstrain cache`: arguments, output and exit codes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dstrain.cli.main import main

from tests.support.caching_project import Place, filled_place

Printed = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with filled_place(tmp_path_factory.mktemp("filled")) as place:
        yield place


def test_without_a_command_it_prints_its_help(capsys: Printed) -> None:
    assert main(["cache"]) == 0
    assert "verify" in capsys.readouterr().out
    assert main(["cache", "lss"]) == 2


def test_ls_lists_several_caches_as_text_and_as_json(
    place: Place, capsys: Printed
) -> None:
    folder = str(place.cache)
    assert main(["cache", "ls", folder, folder]) == 0
    assert capsys.readouterr().out.count(f"{folder}: 4 rows") == 2
    assert main(["cache", "ls", "--json", folder]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["rows"] == 4


@pytest.mark.parametrize("command", ["ls", "verify", "prune"])
def test_what_is_no_cache_is_refused_in_words(
    command: str, tmp_path: Path, capsys: Printed
) -> None:
    assert main(["cache", command, str(tmp_path)]) == 3
    assert "is not a feature cache" in capsys.readouterr().err
    (tmp_path / "store.json").write_text('{"format": "dstrain-features", "version": 1}')
    assert main(["cache", command, str(tmp_path)]) == 3
    assert "of format 1" in capsys.readouterr().err
    assert main(["cache", command, ""]) == 2


def test_verify_prints_what_it_read(place: Place, capsys: Printed) -> None:
    assert main(["cache", "verify", str(place.cache)]) == 0
    assert "and 1 plan" in capsys.readouterr().out


def test_prune_lists_what_it_would_remove(place: Place, capsys: Printed) -> None:
    folder = str(place.cache)
    assert main(["cache", "prune", folder]) == 0
    (plan,) = place.plans
    assert capsys.readouterr().out == (
        f"{folder}: nothing to remove: its plan uses all of it; --plan NAME removes a "
        f"plan, and what no other one uses: {plan.stem}\n"
    )
    assert main(["cache", "prune", folder, "--plan", plan.stem[:8]]) == 0
    assert "nothing was removed; add --yes" in capsys.readouterr().out
    assert main(["cache", "prune", folder, "--plan", "none", "--yes"]) == 2
    assert plan.exists()


def test_what_is_exported_is_imported_with_its_plan(
    place: Place, tmp_path: Path, capsys: Printed
) -> None:
    (plan,) = place.plans
    tar = str(tmp_path / "cache.tar")
    words = ["cache", "export", str(place.cache), tar, "--plan", plan.stem[:8]]
    assert main(words) == 0
    assert main(words) == 2
    assert "existing files were not modified" in capsys.readouterr().err
    assert main(["cache", "import", tar, str(tmp_path / "cache")]) == 0
    assert "--task TASK:train" in capsys.readouterr().out
    assert main(["cache", "verify", str(tmp_path / "cache")]) == 0
    assert main(["cache", "import", str(plan), str(tmp_path / "more")]) == 3
    assert (
        main(["cache", "import", str(tmp_path / "none"), str(tmp_path / "more")]) == 2
    )


@pytest.mark.parametrize(
    "words",
    [
        ("--model_paths", "[]"),
        ("--dataset-base-path", "data"),
        ("--seed", "3"),
        ("--plan", "a"),
    ],
)
def test_what_would_do_nothing_in_verify_is_refused(
    place: Place, words: tuple[str, str], capsys: Printed
) -> None:
    assert main(["cache", "verify", str(place.cache), *words]) == 2
    assert "has no effect without --recompute" in capsys.readouterr().err


def test_show_takes_rows_and_ranges_of_them(
    place: Place, tmp_path: Path, capsys: Printed
) -> None:
    words = ["cache", "show", str(place.cache), "--output", str(tmp_path / "x.html")]
    for wrong in ("a", "1-", "-1", "1,,2", ""):
        assert main([*words, "--rows", wrong]) == 2
        assert "--rows: " in capsys.readouterr().err
    assert main([*words, "--rows", "0-1,3"]) == 0
    assert "3 samples" in capsys.readouterr().out
    assert (tmp_path / "x.html").read_text().count("<figure>") == 3


def test_help_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from dstrain.cli.main import main; code = main(['cache', 'verify', '--help']);"
        " sys.exit(code or bool({'torch', 'numpy', 'pyarrow'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
