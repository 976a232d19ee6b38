"""Configurations of components, found before any weight is read: in a header, in
config.json, published or inferred.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.console import get_logger
from dstrain.errors import StateError, SystemFault
from dstrain.models.components import Component, Files
from dstrain.models.hub import Origin, fetch, offline
from dstrain.models.hub_record import Record
from dstrain.models.weights import Weights, header

logger = get_logger(__name__)


@dataclass(frozen=True)
class Sought:
    """A component whose configuration is looked for: its files, if they are here, and
    the model that may have it.

    place: the folder of its files in that model, if a pattern names it.
    """

    component: Component
    files: Files | None = None
    origin: Origin | None = None
    place: str | None = None

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of the model that may have it, the likeliest first; "" is the
        model's own.
        """
        places = (
            self.component.folders
            if self.place is None
            else (self.place, *self.component.folders)
        )
        return tuple(dict.fromkeys(places))


def find_configuration(sought: Sought) -> Mapping[str, Any]:
    """The content of a component's configuration, in its network's terms.

    It is in its weights' header, in `config.json` beside them or below the model id,
    published, or inferred from the weights' shapes. A config.json that is not here is
    fetched: first of all for a model that is fetched anyway and whose weights this run
    has no use for, else if nothing here tells. Raises StateError naming all of these.
    """
    if sought.files is None and _is_fetched(sought.origin):
        _fetch_json(sought)
    try:
        return _here(sought)
    except StateError:
        if not _fetch_json(sought):
            raise
        return _here(sought)


def _here(sought: Sought) -> Mapping[str, Any]:
    component, files = sought.component, sought.files
    model_id = sought.origin.model_id if sought.origin is not None else ""
    shapes = Weights.of(files).shapes if files is not None else {}
    ours = (
        _header_config(files)
        if files is not None and "family" in header(files.paths[0])
        else None
    )
    if ours is not None and component.accepts_config(
        ours
    ):  # in the network's terms, whatever the layout of the file
        return ours
    for content in _contents(sought):
        own = _own_content(component, content, files, shapes)
        if own is not None:
            return own
    if model_id in component.published:
        return component.published[model_id]
    inferred = component.infer(shapes) if shapes and component.infer else None
    if inferred is not None:
        return inferred
    place = str(files.folder / "config.json") if files else component.name
    raise StateError(
        place,
        f"no configuration of {component.name}: no config.json of it, the shapes do not tell it, "
        f"and model id {model_id or '(none)'} is not known",
        "put config.json beside the weights",
        f"known ids: {', '.join(component.published) or 'none'}",
    )


def _is_fetched(origin: Origin | None) -> bool:
    """Whether files of a model come from a hub: a record says so, or none of them is
    here.
    """
    return origin is not None and (
        Record.read(origin.folder) is not None or not origin.folder.exists()
    )


def _fetch_json(sought: Sought) -> bool:
    """Fetch the config.json of a component that is not here, if its hub has one;
    whether there is a new one.

    A hub that cannot be reached is named; it is for the caller to do without.
    """
    origin = sought.origin
    if origin is None or origin.hub is None or offline():
        return False
    family = Record.read(origin.folder)
    for folder in sought.folders:
        name = f"{folder}/config.json".removeprefix("/")
        if (origin.folder / name).exists() or (
            family and family.is_of(origin.revision) and name not in family.tree
        ):
            continue
        try:
            fetch(origin, name)
            return True
        except StateError:
            continue
        except SystemFault as fault:
            logger.warning(f"{fault.where}: {fault.what}")
            return False
    return False


def _contents(sought: Sought) -> Iterator[Mapping[str, Any]]:
    """What may be the configuration, most trusted first: the header's, that beside the
    weights, the model id's.
    """
    files = sought.files
    written = _header_config(files) if files is not None else None
    if written is not None:
        yield written
    folders = [files.folder] if files is not None else []
    folders += (
        [sought.origin.folder / folder for folder in sought.folders]
        if sought.origin is not None
        else []
    )
    for folder in folders:
        if (folder / "config.json").is_file():
            yield _read_json(folder / "config.json")


def _own_content(
    component: Component,
    content: Mapping[str, Any],
    files: Files | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> Mapping[str, Any] | None:
    """A configuration in the network's terms, whatever its publisher's; None if it is
    not this component's.
    """
    formats = (
        component.formats
        if files is None or files.checkpoint_format is None
        else (files.checkpoint_format,)
    )
    for checkpoint_format in formats:
        own = (
            checkpoint_format.configuration(content, shapes)
            if checkpoint_format.configuration
            else None
        )
        if own is not None and component.accepts_config(own):
            return own
    as_is = files is None or (files.checkpoint_format is None and not files.prefix)
    return content if as_is and component.accepts_config(content) else None


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content: Mapping[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StateError(str(path), f"cannot be read: {error}") from error
    return content


def _header_config(files: Files) -> Mapping[str, Any] | None:
    """The configuration in a header; None if there is none, or another program's text
    of that name.
    """
    try:
        content = json.loads(header(files.paths[0]).get("config", ""))
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
