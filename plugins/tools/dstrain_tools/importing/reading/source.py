"""Read a configuration of another tool."""

from dataclasses import replace
from pathlib import Path

from dstrain.plugin import UsageError

from dstrain_tools.importing.entries import Source
from dstrain_tools.importing.reading.ai_toolkit import read_job
from dstrain_tools.importing.reading.command import read_command
from dstrain_tools.importing.reading.data_files import read_data, without_sections
from dstrain_tools.importing.reading.datasets import with_datasets
from dstrain_tools.importing.reading.tool import tool_of
from dstrain_tools.importing.reading.unset import unset

SCRIPTS = (".sh", ".bash", ".bat", ".ps1", ".txt", ".cmd", "")
WITH_DATASETS = ("ai-toolkit", "diffsynth")
"""Tools without a separate file of datasets."""


def read_source(
    path: Path, dataset: Path | None, tool: str | None, number: int | None
) -> Source:
    """Return what a file says.

    Raises UsageError for one that cannot be read, or whose tool cannot be told.

    Args:
        path: A TOML, YAML or JSON file, or a shell script.
        dataset: The tool's separate file of datasets, if the first does not name it.
        tool: Whose it is; told by its keys if None.
        number: Which of a script's training commands is meant, from 1.
    """
    source = _read(path, dataset, tool, number)
    return replace(source, apart=[*source.apart, *unset(source)])


def _read(
    path: Path, dataset: Path | None, tool: str | None, number: int | None
) -> Source:
    suffix = path.suffix.lower()
    if suffix in SCRIPTS:
        return read_command(path, dataset, tool, number)
    if number is not None:
        raise UsageError("--command", f"has no effect: {path} is no shell script")
    data = read_data(path)
    tool = tool or tool_of(data, path)
    has_datasets = "datasets" in data or "general" in data
    if dataset is not None and (tool in WITH_DATASETS or has_datasets):
        what = f"has no effect: {path} has its datasets in it"
        raise UsageError("--dataset", what)
    if tool == "ai-toolkit":
        return read_job(path, data)
    if tool == "diffsynth":
        return Source(tool, without_sections(path, data), files=[path])
    if has_datasets:
        return with_datasets(Source(tool, (), files=[]), path, path)
    source = Source(tool, without_sections(path, data), files=[path])
    return with_datasets(source, path, dataset)
