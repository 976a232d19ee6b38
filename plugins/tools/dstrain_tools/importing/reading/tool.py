"""Tell whose configuration it is, by its keys or by the script that it runs."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from dstrain.plugin import UsageError

from dstrain_tools.importing.reading.datasets import DATASET
from dstrain_tools.importing.reading.shell import Command
from dstrain_tools.importing.tables import TOOLS, table_of

DIFFSYNTH_SCRIPT = "model_training"
OF_DIFFUSERS = ("train_dreambooth", "train_text_to_image", "train_control_lora")
"""How names of diffusers' scripts begin."""
MUSUBI_KEYS = ("dit", "task", "model_version", "t5", "clip")
KOHYA_KEYS = (
    "pretrained_model_name_or_path",
    "ae",
    "clip_l",
    "t5xxl",
    "train_data_dir",
)
MUSUBI_DATASET_KEYS = (
    "image_directory",
    "video_directory",
    "image_jsonl_file",
    "video_jsonl_file",
)


def tool_of(data: Mapping[str, Any], path: Path) -> str:
    """Return whose keys these are."""
    config = data.get("config")
    if isinstance(config, Mapping) and "process" in config:
        return "ai-toolkit"
    keys = set(_names(data))
    if keys & set(MUSUBI_DATASET_KEYS):
        return "musubi"
    if "subsets" in keys or "image_dir" in keys:
        return "kohya"
    if keys & set(KOHYA_KEYS):
        return "kohya"
    if keys & set(MUSUBI_KEYS):
        return "musubi"
    what = "has no keys of a known tool"
    tools = ", ".join(TOOLS)
    raise UsageError(path, what, f"say whose it is with --from; tools: {tools}")


def _names(data: Any) -> Iterator[str]:
    """Yield the keys of tables within tables."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield str(key)
            yield from _names(value)
    elif isinstance(data, list):
        for value in data:
            yield from _names(value)


def tool_of_script(command: Command, path: Path) -> str:
    """Return whose script a command runs."""
    if DIFFSYNTH_SCRIPT in command.script:
        return "diffsynth"
    name = script_name(command.script)
    if name.startswith(OF_DIFFUSERS):
        what = f"runs {name}, a script of diffusers, which is not imported"
        advice = "type its flags after dstrain: it answers each with its own"
        raise UsageError(path, what, advice)
    keys = {flag for flag, _ in command.flags}
    if _has_script("musubi", name) or keys & set(MUSUBI_KEYS):
        return "musubi"
    if _has_script("kohya", name) or keys & {*KOHYA_KEYS, DATASET, "network_module"}:
        return "kohya"
    what = f"runs {command.script}, which is no script of a known tool"
    tools = ", ".join(TOOLS)
    raise UsageError(path, what, f"say whose it is with --from; tools: {tools}")


def _has_script(tool: str, name: str) -> bool:
    """Return whether a tool has a script of a name, by its table."""
    patterns = [str(row["script"]) for row in table_of(tool).models]
    return any(one != "*" and fnmatchcase(name, one) for one in patterns)


def script_name(script: str) -> str:
    """Return the name of a script, or of a module, without folders."""
    name = Path(script.replace("\\", "/")).name
    return name if name.endswith(".py") else f"{name.rpartition('.')[2]}.py"
