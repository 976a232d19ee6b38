"""Write the package of a new family from the template in this package."""

import keyword
import re
from collections.abc import Collection
from pathlib import Path

from dstrain.errors import UsageError
from dstrain.installed import installed

COMMAND = "dstrain plugins new"


def write_plugin(
    name: str, folder: Path, disabled_plugins: Collection[str] = ()
) -> None:
    """Write the package of a family to a new folder; raises UsageError for a name that
    no package can have, or an installed family has, and for a folder that exists.
    """
    words = r"[a-z][a-z0-9]*(_[a-z0-9]+)*"
    if not re.fullmatch(words, name) or keyword.iskeyword(name):
        want = "expected lower-case letters, digits and single underscores, such as my_model"
        raise UsageError(COMMAND, f"{name!r} is not a valid family name; {want}")
    for plugin in installed(disabled_plugins):
        if plugin.name == name:
            what = f"a family named {name!r} is installed, by {plugin.where}"
            raise UsageError(COMMAND, what)
    if folder.exists():
        raise UsageError(
            COMMAND, f"{folder} already exists; existing files were not modified"
        )
    template = Path(__file__).with_name("template")
    for source in template.rglob("*"):
        place = source.relative_to(template)
        if source.is_dir() or "__pycache__" in place.parts:
            continue
        path = folder / _renamed(str(place), name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_renamed(source.read_text("utf-8"), name), encoding="utf-8")


def _renamed(text: str, name: str) -> str:
    distribution = name.replace("_", "-")
    return text.replace("my_model", name).replace("my-model", distribution)
