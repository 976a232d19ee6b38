"""Find which form a dataset has."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dstrain.config.options import ModelChoice
from dstrain.console import shell_word
from dstrain.data.tables.form import ID, URL, Form, Given, Source
from dstrain.data.tables.listing import left_out, list_media
from dstrain.data.tables.metadata import SUFFIXES, metadata_files
from dstrain.errors import UsageError, nearest
from dstrain.installed import NamingPlugin, absent_names, how_to_have
from dstrain.registry import load_extensions, warn_once

OWN = ("table", "folder", "several")
"""The forms that core reads."""
FORM_FLAG = "--dataset_form"


def installed_forms(config: ModelChoice) -> tuple[Form, ...]:
    """Return the forms that plugins offer for a run with these options; what cannot be
    used is named in the log.
    """
    extensions = load_extensions(config.disabled_plugins)
    others = len(extensions.broken)
    offers = extensions.offered("dstrain_forms", Form, OWN, options=config)
    warn_once(extensions.broken[others:])
    return tuple(offers.values())


def find_source(
    base: Path,
    metadata: Path | None = None,
    option: str = "--dataset",
    roots: tuple[Path, ...] = (),
    forms: Sequence[Form] = (),
    chosen: str | None = None,
) -> Source:
    """Find the rows of a dataset: in the metadata file that is named, else in a folder's
    own metadata, in what a plugin's form finds there, or in its images and videos.

    Raises UsageError for a folder in which none of these is, or of one several.

    Args:
        option: How the options begin that name these.
        roots: Other folders that may hold files.
        chosen: The name of the only form that is asked, where it is chosen.
    """
    others = _chosen(forms, chosen)
    if metadata is not None:
        if metadata.suffix.lower() not in SUFFIXES and not metadata.is_dir():
            found = ask(others, Given(metadata, option))
            if isinstance(found, Source):
                return replace(found, base=base)
            if found is None:
                refuse_unread(metadata, metadata.suffix, others)
        return Source("table", metadata, base)
    if not base.is_dir():
        raise _no_folder(base, option, others)
    tables = metadata_files(base) if chosen in (None, "table") else []
    if len(tables) > 1:
        names = " and ".join(path.name for path in tables)
        advice = f"name one with {option}_metadata_path"
        raise UsageError(base, f"has {names}", advice)
    if tables:
        return Source("table", tables[0], base)
    found = ask(others, Given(base, option))
    if isinstance(found, Source):
        return found
    if chosen is None:
        _refuse_unread_in(base, others)
    if chosen in (None, "folder") and any(True for _ in list_media(base)):
        return Source("folder", base, base, roots=roots)
    what = f"has no images or videos, and no metadata{', '.join(SUFFIXES)}"
    unread = left_out(base, {})
    raise UsageError(
        base,
        f"{what}; {unread}" if unread else what,
        "put images into it, each with its caption in a text file: dog.jpg and dog.txt",
        f"or name a table with {option}_metadata_path",
    )


def ask(
    forms: Sequence[Form], given: Given, chosen: str | None = None
) -> Source | Path | None:
    """Return what the forms find; raises UsageError if two of them find something, and
    none of the two is chosen.
    """
    found: dict[str, Source | Path] = {}
    for form in forms:
        with NamingPlugin(form.plugin, f"its form {form.name}, at {given.path},"):
            answer = form.find(given)
            if isinstance(answer, Source):
                answer = replace(answer, form=form.name, reader=form)
            elif not isinstance(answer, Path | None):
                raise TypeError(f"find returned {type(answer).__name__}")
        if answer is not None:
            found[form.name] = answer
    if chosen in found:
        return found[chosen]
    if len(found) > 1:
        what = f"may be a dataset of form {' or '.join(found)}"
        raise UsageError(given.path, what, f"choose one with {FORM_FLAG} NAME")
    if not found and given.is_id and given.is_needed:
        refuse_unread(f"{given.option}_base_path", ID, forms)
    return next(iter(found.values()), None)


def refuse_unread(where: str | Path, what: str, forms: Sequence[Form]) -> None:
    """Raise UsageError with the line that installs it, if a plugin that is not installed
    reads this: an ending of files, `ID` or `URL`.
    """
    if any(what in form.reads for form in forms):
        return
    if advice := how_to_have("forms", what):
        named = {ID: "may be the id of a published dataset", URL: "is a URL"}
        says = named.get(what, f"is a {what} file")
        # In one sentence, as what is wrong with a row of a table is.
        raise UsageError(where, f"{says}, which no installed plugin reads; {advice}")


def _chosen(forms: Sequence[Form], name: str | None) -> Sequence[Form]:
    """Return the forms that are asked; raises UsageError for a name that none has."""
    if name is None:
        return forms
    known = [*OWN[:2], *(form.name for form in forms)]
    if name not in known:
        what = (
            f"no form named {name!r}; forms: {', '.join(known)}{nearest(name, known)}"
        )
        raise UsageError(FORM_FLAG, what)
    return [form for form in forms if form.name == name]


def _no_folder(base: Path, option: str, forms: Sequence[Form]) -> UsageError:
    """Return the error of a path that is no folder, with what would be right."""
    flag = f"{option}_base_path"
    if not base.is_file():
        siblings = filter(Path.is_dir, base.parent.glob("*"))
        hint = nearest(base.name, [path.name for path in siblings])
        return UsageError(flag, f"{base} is not a folder{hint}")
    refuse_unread(base, base.suffix, forms)
    what = f"{base} is a file; give its folder"
    if base.suffix.lower() in SUFFIXES:
        folder, table = shell_word(str(base.parent)), shell_word(str(base))
        what += f", or {flag} {folder} {option}_metadata_path {table}"
    return UsageError(flag, what)


def _refuse_unread_in(base: Path, forms: Sequence[Form]) -> None:
    """Refuse a folder with files that a plugin reads which is not installed: its images
    may be what these files name.
    """
    unread = absent_names("forms").difference(*(form.reads for form in forms))
    for folder in (base, base / "data") if unread else ():
        if folder.is_dir():
            # A folder may have a million files: neither sorted nor made paths.
            for name in os.listdir(folder):
                if (suffix := os.path.splitext(name)[1]) in unread:
                    refuse_unread(folder / name, suffix, forms)
