"""What MkDocs does not do itself for the docs site.

- The navigation is the tables of docs/index.md: there is one list of pages.
- Files of the repository that pages link to, such as tests, become pages, too, and so do
  notebooks.
- Fences say in their first line how tests run them; readers see a title.
- The address of the site is that of core/pyproject.toml, once there is one.
- The page of decisions lists them.
- Flags are kept in one line.
"""

import json
import os.path
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs"
SOURCE = "source"
"""Folder of the site for files of the repository that are not in docs/."""
PACKAGE = "core/pyproject.toml"
NOTEBOOK = ".ipynb"
DECISIONS = "development/decisions"
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?(\))")
ENTRY = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
FENCE = re.compile(r"^(`{3,}|~{3,})([^\n]*)\n(.*?)^\1[ ]*$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"csv": "text"}
"""Kinds of fences that the highlighter lacks, each with the one to take."""
COMMANDS = re.compile(
    r'(?<!</span>)<code>[^<]*</code>|<div class="language-(?:sh|text) .*?</div>',
    re.DOTALL,
)
"""Code in a line, and blocks of commands and of what they print, in HTML."""
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
QUOTES = "`" * 8
"""A fence that no file contains."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation of the tables of docs/index.md; take the address of the site
    from the package that names it in its messages.
    """
    project = tomllib.loads((ROOT / PACKAGE).read_text(encoding="utf-8"))["project"]
    config.site_url = project.get("urls", {}).get("Documentation")
    text = (ROOT / DOCS / "index.md").read_text(encoding="utf-8")
    config.nav = [{"Home": "index.md"}, *navigation(text)]
    return config


def navigation(index: str) -> list[dict[str, Any]]:
    """Return the navigation: a tab for each heading of the index, a section for each
    heading below it, and an entry for each link in the first cell of a table.
    """
    tabs: list[dict[str, Any]] = []
    entries: list[Any] = []
    for line in index.splitlines():
        if line.startswith("## "):
            entries = []
            tabs.append({line.removeprefix("## "): entries})
        elif line.startswith("### "):
            section: list[Any] = []
            tab = next(iter(tabs[-1].values()))
            tab.append({line.removeprefix("### "): section})
            entries = section
        elif line.startswith("| "):
            cell = line.split(" | ")[0]
            entries += [
                {title: place(f"{DOCS}/{path}")} for title, path in ENTRY.findall(cell)
            ]
    return [tab for tab in tabs if next(iter(tab.values()))]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, and each file outside docs/, that a page leads to."""
    waiting = [f"{DOCS}/{one.src_uri}" for one in files.documentation_pages()]
    known = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.endswith(".md"):
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        for target in sorted(set(targets(text, path)) - known):
            is_made = target.endswith(NOTEBOOK) or not target.startswith(f"{DOCS}/")
            if not is_made or not (ROOT / target).is_file():
                continue
            known.add(target)
            waiting.append(target)
            content = as_page(target)
            files.append(File.generated(config, place(target), content=content))
    return files


def targets(markdown: str, path: str) -> Iterator[str]:
    """Yield the files of the repository that a file links to."""
    for part, is_fence in parts(markdown):
        if is_fence:
            continue
        for _, link, _, _ in LINK.findall(part):
            if ":" not in link:
                yield os.path.normpath(f"{os.path.dirname(path)}/{link}")


def parts(markdown: str) -> Iterator[tuple[str, bool]]:
    """Split a page into what is in fences and what is not, in order."""
    end = 0
    for fence in FENCE.finditer(markdown):
        yield markdown[end : fence.start()], False
        yield fence[0], True
        end = fence.end()
    yield markdown[end:], False


def as_page(path: str) -> str:
    """Return a file of the repository as Markdown."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    if path.endswith(NOTEBOOK):
        return "\n\n".join(cell(one) for one in json.loads(text)["cells"])
    return f"# {path}\n\n{QUOTES}{Path(path).suffix[1:]}\n{text}\n{QUOTES}\n"


def cell(of_notebook: Mapping[str, Any]) -> str:
    """Return a cell of a notebook as Markdown, without what it printed."""
    text = "".join(of_notebook["source"])
    if of_notebook["cell_type"] != "code":
        return text
    return f"{QUOTES}python\n{text}\n{QUOTES}"


def place(path: str) -> str:
    """Return where a file of the repository is in the folder of pages."""
    if path.startswith(f"{DOCS}/"):
        page = path.removeprefix(f"{DOCS}/")
        return f"{page}.md" if page.endswith(NOTEBOOK) else page
    return f"{SOURCE}/{path}" if path.endswith(".md") else f"{SOURCE}/{path}.md"


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Adapt links and fences of a page; list the decisions on theirs."""
    uri = page.file.src_uri
    path = uri.removeprefix(f"{SOURCE}/") if page.file.generated_by else f"{DOCS}/{uri}"
    if uri.startswith(SOURCE):
        page.meta["search"] = {"exclude": True}
    if not (ROOT / path).is_file():
        # Not Markdown: a file of code, shown as it is.
        return markdown
    if uri == "index.md":
        # The page is the list of pages.
        page.meta["hide"] = ["navigation"]
    if uri.startswith(DECISIONS):
        # Who searches wants to know how, before why it is so.
        page.meta["search"] = {"boost": 0.3}
    if uri == f"{DECISIONS}/index.md":
        markdown += decisions()
    return "".join(
        shown_fence(part) if is_fence else with_links(part, path, uri)
        for part, is_fence in parts(markdown)
    )


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep flags in one line: a browser would break them behind their dashes."""
    return COMMANDS.sub(lambda code: FLAG.sub(whole_flag, code[0]), html)


def whole_flag(flag: re.Match[str]) -> str:
    """Return a flag as site.css keeps it in one line."""
    return f'<span class="flag">{flag[0]}</span>'


def decisions() -> str:
    """Return a list of all decisions, by number."""
    lines = ["", ""]
    for path in sorted((ROOT / DOCS / DECISIONS).glob("0*.md")):
        heading = path.read_text(encoding="utf-8").partition("\n")[0]
        number, _, title = heading.removeprefix("# ").partition(". ")
        lines.append(f"- [{number}]({path.name}): {title}")
    return "\n".join(lines)


def with_links(text: str, path: str, uri: str) -> str:
    """Return text of the file `path`, whose page is `uri`, with links to pages of the site
    in place of links to files.
    """

    def adapted(match: re.Match[str]) -> str:
        before, link, anchor, after = match.groups(default="")
        if ":" in link:
            return match[0]
        target = os.path.normpath(f"{os.path.dirname(path)}/{link}")
        to = os.path.relpath(place(target), os.path.dirname(uri))
        is_asset = path.startswith(f"{DOCS}/") and not target.endswith(
            (".md", NOTEBOOK)
        )
        return before + (link if is_asset and DOCS in target else to) + anchor + after

    return LINK.sub(adapted, text)


def shown_fence(fence: str) -> str:
    """Return a fence as readers see it: with the name of a file, or `output`, as title."""
    ticks, info, body = FENCE.fullmatch(fence).groups()  # type: ignore[union-attr]  # called with what it matched
    kind, _, note = info.partition(" ")
    title = note.removeprefix("file=") if note.startswith("file=") else ""
    if note == "output":
        title = note
    head = LANGUAGES.get(kind, kind) + (f' title="{title}"' if title else "")
    return f"{ticks}{head}\n{body}{ticks}"
