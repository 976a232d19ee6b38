"""Find the configurations of components before any weight is read."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain.console import get_logger
from dstrain.errors import StateError, SystemFault, UsageError, reading
from dstrain.models.components import Component, Files
from dstrain.models.formats import NATIVE, Config, Shapes, fits, shapes_of
from dstrain.models.hub import RECORD, ModelSource, fetch
from dstrain.models.network_files import empty_component
from dstrain.models.weight_files import header
from dstrain.models.weights import Weights
from dstrain.storage import read_limited

logger = get_logger(__name__)


def differing_entries(recorded: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return the entries in which a configuration that was stored as JSON and one in use
    differ, each with both values.
    """
    # JSON has no tuples.
    used = json.loads(json.dumps(config))
    differing = {}
    for name in used | recorded:
        values = (recorded.get(name), used.get(name))
        # _name_or_path and the like say nothing of the network.
        if values[0] != values[1] and not name.startswith("_"):
            differing[name] = values
    return differing


def find_config(
    component: Component,
    files: Files | None = None,
    source: ModelSource | None = None,
    place: str | None = None,
) -> Config:
    """Return the configuration of a component, in its network's terms.

    It is in the weights' header, in `config.json` beside them or in the published
    model, known by the model id, or inferred from the weights' shapes. Raises
    StateError naming all of these.

    Args:
        component: The component.
        files: Its weights, if they are on this machine.
        source: The published model that may have it.
        place: The folder of the weights in that model, if a pattern names it; "" is the
            model's own.
    """
    folders = component.folders if place is None else (place, *component.folders)
    folders = tuple(dict.fromkeys(folders))
    # A model that comes from a hub (it has a record, or no files yet), and whose weights
    # this run does not need, has its own config.json, which tells more than the model id
    # does.
    if source and not files:
        is_here = source.folder.exists() or source.snapshot
        if not is_here or (source.folder / RECORD).exists():
            _fetch_json(source, folders)
    try:
        config = _local_config(component, files, source, folders)
    except StateError:
        if not _fetch_json(source, folders):
            raise
        config = _local_config(component, files, source, folders)
    return {**config, **dict(files.checkpoint_format.implies if files else ())}


def _local_config(
    component: Component,
    files: Files | None,
    source: ModelSource | None,
    folders: Sequence[str],
) -> Config:
    """Return the configuration that the files on this machine tell; raises StateError."""
    shapes: Shapes = {}
    if files:
        shapes = Weights.of(files).shapes
        entries = header(files.paths[0])
        if (written := recorded_config(entries)) is not None:
            # dstrain writes the network's own terms, even with keys of another format.
            if "family" in entries and component.accepts_config(written):
                return written
            config = _in_own_terms(component, written, files, shapes)
            if config is not None:
                return config
    model_id = source.model_id if source else ""
    for path in _places(files, source, folders):
        if path.is_file():
            config = _in_own_terms(component, _read_json(path), files, shapes)
            if config is not None:
                _check_layers(path, config, len(shapes))
                return config
    if model_id in component.published:
        return component.published[model_id]
    inferred = infer_config(component, shapes) if shapes else None
    if inferred is not None:
        return inferred
    where = files.folder / "config.json" if files else component.name
    what = (
        f"no configuration of {component.name}: there is no config.json for it, the "
        f"shapes do not determine it, and model id {model_id or '(none)'} is not known"
    )
    known = f"known ids: {', '.join(component.published) or 'none'}"
    raise StateError(where, what, "put config.json beside the weights", known)


def _check_layers(path: Path, config: Config, weights: int) -> None:
    """Refuse more layers than there are weights: building these may take minutes."""
    for name, value in config.items():
        if isinstance(value, dict):
            _check_layers(path, value, weights)
        elif (
            re.fullmatch(r"n(um)?_(\w+_)?layers|layers_per_block|depth", name)
            and type(value) is int
            and value > weights > 0
        ):
            what = f"{name} is {value}, and there are {weights} weights"
            raise StateError(path, what, "if it is damaged, download it again")


def _places(
    files: Files | None, source: ModelSource | None, folders: Sequence[str]
) -> Iterator[Path]:
    """Yield where config.json may be: beside files, in folders of the model."""
    if files:
        yield files.folder / "config.json"
    if source:
        for root in filter(None, (source.folder, source.snapshot)):
            yield from (root / folder / "config.json" for folder in folders)


def infer_config(component: Component, shapes: Shapes) -> Config | None:
    """Return the configuration of weights with these shapes, or None.

    It is what the component's `infer` says; without that, the published one whose
    network has such weights, if only one has.
    """
    if component.infer is not None:
        return component.infer(shapes)
    fitting: list[Config] = []
    for config in component.published.values():
        network = empty_component(component, config)
        if network is None or config in fitting:
            continue
        own = shapes_of(network.state_dict())
        common = own.keys() & shapes.keys()
        if common and all(fits(shapes[name], own[name]) for name in common):
            fitting.append(config)
    return fitting[0] if len(fitting) == 1 else None


def _fetch_json(source: ModelSource | None, folders: Sequence[str]) -> bool:
    """Fetch the missing config.json of a component and return whether there is one.

    A hub that cannot be reached is a warning: the caller may do without the file.
    """
    if not source:
        return False
    for folder in folders:
        name = f"{folder}/config.json".removeprefix("/")
        if (source.folder / name).exists():
            continue
        try:
            fetch(source, name)
            return True
        except StateError:
            pass  # the next folder may have it
        except SystemFault as fault:
            # The last line says the cause.
            what = "; ".join([fault.what, *fault.help_lines[-1:]])
            logger.warning(f"{fault.where}: {what}")
            break
    return False


def _in_own_terms(
    component: Component, config: Config, files: Files | None, shapes: Shapes
) -> Config | None:
    """Return a published config in the network's terms; None if it is another's."""
    formats = component.formats
    native = files is None or files.checkpoint_format is NATIVE
    if files is not None and not native:
        formats = (files.checkpoint_format,)
    for checkpoint_format in formats:
        if checkpoint_format.configuration is None:
            continue
        converted = checkpoint_format.configuration(config, shapes)
        if converted is not None and component.accepts_config(converted):
            return converted
    if files is not None and files.prefix:
        native = False
    return config if native and component.accepts_config(config) else None


def _read_json(path: Path) -> Config:
    try:
        with reading(path):
            config: Config = json.loads(read_limited(path))
    except UsageError as error:
        raise StateError(path, error.what) from error
    if not isinstance(config, dict):
        raise StateError(path, "is not the configuration of a network: no JSON object")
    return config


def recorded_config(header: Mapping[str, str]) -> Config | None:
    """Return the configuration in a file's header; None if there is none, or another
    program's text of that name.
    """
    try:
        config = json.loads(header.get("config", ""))
    except ValueError:
        return None
    return config if isinstance(config, dict) else None
