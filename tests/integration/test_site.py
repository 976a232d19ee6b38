"""The docs site: it is built without a warning and without a network, every link and
anchor leads somewhere, and pages in Chinese have the commands of the English ones.
"""

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_docs import blocks
from tests.support import ROOT

DOCS = ROOT / "docs"
IN_CHINESE = tuple(sorted((DOCS / "zh").glob("*.md")))
COPIED = ("mkdocs.yml", "tools/site_hooks.py", "docs/site.css", "core/pyproject.toml")
"""What a site needs beside its pages."""
LOADED = re.compile(r'<(?:script|link|img)\b[^>]*?(?:src|href)="(https?:)?//[^"]*"')
"""What a browser loads from another host when it opens a page."""


def build(root: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    """Build the site of a checkout as `make docs` does."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]
    return subprocess.run(
        [*words, str(site)], cwd=root, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def hooks() -> Mapping[str, Any]:
    return runpy.run_path(str(ROOT / "tools/site_hooks.py"))


@pytest.mark.parametrize(
    ("index", "page", "complaint"),
    [
        ("| [A](a.md) | a |", "# A\n", ""),
        ("| [A](a.md) | a |", "# A\n\n[b](b.md)\n", "target 'b.md' is not found"),
        ("| [A](a.md) | a |", "# A\n\n[b](#b)\n", "no such anchor"),
        ("", "# A\n", "not included in the"),
    ],
    ids=["nothing wrong", "a page that is missing", "an anchor", "no way to a page"],
)
def test_what_leads_nowhere_fails_the_build(
    index: str, page: str, complaint: str, tmp_path: Path
) -> None:
    for name in COPIED:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    table = f"# Home\n\n## Guide\n\n| page | about |\n|---|---|\n{index}\n"
    (tmp_path / "docs/index.md").write_text(table)
    (tmp_path / "docs/a.md").write_text(page)
    done = build(tmp_path, tmp_path / "site")
    assert (done.returncode == 0) == (not complaint), done.stderr
    assert complaint.split("'")[0] in done.stderr


def test_a_page_loads_nothing_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 100
    assert {
        one.name: found for one in pages if (found := LOADED.search(one.read_text()))
    } == {}


def test_pages_and_anchors_that_messages_name_exist(site: Path) -> None:
    named = re.compile(r"\bdocs/([a-z][\w/-]*)\.md(?:#([\w-]+))?")
    sources = [
        path
        for folder in ("core", "plugins")
        for kind in ("py", "json")
        for path in (ROOT / folder).rglob(f"*.{kind}")
        if "tests" not in path.parts
    ]
    found = {one for path in sources for one in named.findall(path.read_text())}
    assert ("guide/captions-and-buckets", "prior-preservation") in found
    missing = [
        f"{page}#{anchor}"
        for page, anchor in sorted(found)
        if not (site / f"{page}.html").is_file()
        or (anchor and f'id="{anchor}"' not in (site / f"{page}.html").read_text())
    ]
    assert missing == []


def test_files_that_pages_link_to_are_pages(site: Path) -> None:
    page = (site / "development/reliability.html").read_text()
    links = re.findall(r'href="(\.\./source/[^"#]+)', page)
    assert "../source/tests/unit/training/test_module.py.html" in links
    assert [link for link in links if not (site / "development" / link).is_file()] == []


def test_the_page_of_decisions_lists_all_of_them(site: Path) -> None:
    page = (site / "development/decisions/index.html").read_text()
    listed = set(re.findall(r'href="(0\d+-[\w-]+)\.html"', page))
    assert listed == {one.stem for one in (DOCS / "development/decisions").glob("0*")}


def test_the_search_knows_chinese(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())
    assert index["config"]["lang"] == ["en", "zh"]
    titles = {entry["title"] for entry in index["docs"]}
    assert {"快速入门", "拆分训练", "Split training"} <= titles
    assert not [one for one in index["docs"] if one["location"].startswith("source/")]


def test_fences_flags_and_notebooks_are_shown_as_pages_show_them(site: Path) -> None:
    page = (site / "plugins/hooks.html").read_text()
    # The file that a fence is, and not how it is tested.
    assert '<span class="filename">my_logger.py</span>' in page
    assert "file=" not in re.sub(r"<code.*?</code>", "", page, flags=re.DOTALL)
    quickstart = (site / "guide/quickstart.html").read_text()
    assert '<span class="flag">--' in quickstart
    assert "no-test" not in quickstart and "exit=" not in quickstart
    (notebook,) = site.glob("guide/notebook*.html")
    assert '<div class="language-python highlight">' in notebook.read_text()


def test_images_are_small_and_used_and_say_what_they_show() -> None:
    shown = {
        (page.parent / link).resolve(): words
        for page in DOCS.rglob("*.md")
        for words, link in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text())
    }
    images = {path for kind in ("png", "svg") for path in DOCS.rglob(f"*.{kind}")}
    assert set(shown) == images
    assert all(len(words) > 20 for words in shown.values())
    assert [path for path in images if path.stat().st_size > 150_000] == []


def test_the_drawing_of_buckets_is_what_the_code_computes() -> None:
    made = runpy.run_path(str(DOCS / "images/make_images.py"))
    assert (DOCS / "images/buckets.svg").read_text() == made["buckets"]()


def test_the_navigation_has_every_page_once(hooks: Mapping[str, Any]) -> None:
    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        inner = entry.values() if isinstance(entry, dict) else entry
        return [page for one in inner for page in pages(one)]

    index = (DOCS / "index.md").read_text()
    found = pages(hooks["navigation"](index))
    known = {str(one.relative_to(DOCS)) for one in DOCS.rglob("*.md")}
    known |= {f"{one.relative_to(DOCS)}.md" for one in DOCS.rglob("*.ipynb")}
    decisions = {one for one in known if one.startswith("development/decisions/0")}
    assert sorted(found) == sorted(known - decisions - {"index.md"})


@pytest.mark.parametrize("page", IN_CHINESE, ids=lambda page: page.name)
def test_a_page_in_chinese_has_the_commands_of_the_english_one(page: Path) -> None:
    """So running those of the English page tests both."""
    english = (DOCS / "guide" / page.name).read_text()

    def typed(text: str) -> list[tuple[str, str, str | None]]:
        return [
            (block.info, block.body, block.output)
            for block in blocks(text)
            if block.info != "text"
        ]

    assert typed(page.read_text()) == typed(english)
    headings = r"^#+ "
    assert len(re.findall(headings, page.read_text(), re.MULTILINE)) == len(
        re.findall(headings, english, re.MULTILINE)
    )
