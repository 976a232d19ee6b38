"""From file names on the command line to the files of each component and its configuration; no weight is read."""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrain.components import Component, Files
from dstrain.config import ModelChoice
from dstrain.errors import StateError, UsageError
from dstrain.flags import parse_model_paths, parse_origins
from dstrain.record import ModelRecord
from dstrain.weights import Weights, header, recognise

MODEL_BASE_VARIABLES = ("DSTRAIN_MODEL_BASE_PATH", "DIFFSYNTH_MODEL_BASE_PATH")


@dataclass(frozen=True)
class ModelConfig:
    """Files of one component: `path` (one, or several shards), or a `model_id` with a pattern of its file names.

    component: which one they are, where a flag says so; otherwise their own names tell.
    entries: without files: what replaces entries of the component's configuration.
    """

    path: str | Sequence[str] | None = None
    model_id: str | None = None
    origin_file_pattern: str | None = None
    component: str = ""
    entries: Mapping[str, Any] = field(default_factory=dict)

    def files(self) -> Files:
        """Find the files; raises StateError naming the place where they were looked for."""
        if self.model_id is None:
            names = [self.path] if isinstance(self.path, str) else list(self.path or ())
            return Files(tuple(_existing(Path(name)) for name in names))
        folder = model_base() / self.model_id
        pattern = self.origin_file_pattern or "*"
        if pattern.endswith("/"):
            return Files((_existing(folder / pattern),), self.model_id)
        found = sorted(path for path in folder.glob(pattern) if path.is_file())
        if not found:
            raise StateError(str(folder / pattern), "no file matches",
                             f"models are looked for below {MODEL_BASE_VARIABLES[0]} (now {model_base()})")  # fmt: skip
        return Files(tuple(found), self.model_id)


def model_base() -> Path:
    """The folder that holds model ids: $DSTRAIN_MODEL_BASE_PATH, or the reference's name for it, or ./models."""
    return Path(next((os.environ[name] for name in MODEL_BASE_VARIABLES if os.environ.get(name)), "models"))


def model_configs(config: ModelChoice, record: ModelRecord) -> tuple[ModelConfig, ...]:
    """The model files of a command line: --model_paths, --model_id_with_origin_paths and the family's path flags."""
    paths = [ModelConfig(path=group) for group in parse_model_paths(config.model_paths)]
    published = [ModelConfig(None, *pair) for pair in parse_origins(config.model_id_with_origin_paths)]
    own = [
        ModelConfig(path=config.family_options[option.name], component=option.component)
        for option in record.options
        if option.component and not option.field and config.family_options.get(option.name)
    ]
    return (*paths, *published, *own, *changed_entries(config, record))


def changed_entries(config: ModelChoice, record: ModelRecord) -> tuple[ModelConfig, ...]:
    """The entries of configurations that the family's bare flags set."""
    given = (option for option in record.options if option.field and config.family_options.get(option.name))
    return tuple(ModelConfig(component=option.component, entries={option.field: True}) for option in given)


def assign(configs: Iterable[ModelConfig], components: Sequence[Component], wanted: Iterable[str]) -> dict[str, Files]:
    """Find which component each set of files is, from the names in the files; one set may hold several.

    Twins are told apart as `_told` does; else by their order, but if only one set of files is left, it is the wanted
    one. Files of a model id whose folder is that of a component nobody wants are not even looked for. Files that do
    not exist are an error only if a wanted component remains unfound.
    """
    found: dict[str, Files] = {}
    missing: list[StateError] = []
    alike: dict[Files, tuple[Component, ...]] = {}
    needed = set(wanted)
    for config in configs:
        if config.entries or published_as(config, components) not in {"", *needed}:
            continue
        try:
            files = config.files()
        except StateError as error:
            missing.append(error)
            continue
        for fitting, part in _parts(config, files, components):
            name = fitting[0].name if len(fitting) == 1 else _told(fitting, part)
            if name:
                _settle(found, name, part)
            else:
                alike[part] = fitting
    for part, fitting in alike.items():
        free = [c.name for c in fitting if c.name not in found]
        first = [name for name in free if name in needed] if len(alike) == 1 else []
        _settle(found, (*first, *free, fitting[0].name)[0], part)
    absent = [c.name for c in components if c.name in needed - set(found) and not c.is_folder]
    if absent and missing:
        raise missing[0]
    return found


def _told(twins: Sequence[Component], files: Files) -> str:
    """Which of twins these files are: their header names it, if training wrote them, else their folder; or ''."""
    by_header = [c.name for c in twins if c.name == header(files.paths[0]).get("component")]
    by_folder = [c.name for c in twins if _lies_in(files.folder, c)]
    return (*by_header, *by_folder, "")[0]


def _settle(found: dict[str, Files], name: str, files: Files) -> None:
    if found.setdefault(name, files) != files:
        both = f"{found[name].paths[0]} and {files.paths[0]}"
        raise UsageError("model files", f"two sets of files are {name}: {both}")


def _parts(
    config: ModelConfig, files: Files, components: Sequence[Component]
) -> list[tuple[tuple[Component, ...], Files]]:
    """The components in a set of files, twins together; a folder is told by its own name, or a flag says which it is.

    Raises what `recognise` raises, and UsageError for a folder that is no component's.
    """
    known = [c for c in components if config.component in ("", c.name)]
    folders = [c for c in known if c.is_folder]
    if files.paths[0].is_dir():
        fitting = folders if config.component else [c for c in folders if _lies_in(files.paths[0], c)]
        if not fitting:
            names = ", ".join(folder for component in folders for folder in component.folders)
            raise UsageError(str(files.paths[0]), f"is a folder; folders of this family: {names}")
        return [((fitting[0],), files)]
    return recognise(files, known)


def _lies_in(place: Path, component: Component) -> bool:
    return any(place.parts[-len(Path(folder).parts) :] == Path(folder).parts for folder in component.folders)


def published_as(config: ModelConfig, components: Sequence[Component]) -> str:
    """The component whose folder in the published layout a model id's pattern begins with, or ''."""
    pattern = (config.origin_file_pattern or "") if config.model_id else ""
    return next((c.name for c in components if any(pattern.startswith(f"{folder}/") for folder in c.folders)), "")


def configuration(component: Component, files: Files | None, model_id: str) -> Mapping[str, Any]:
    """The content of a component's configuration, in its network's terms.

    It is in its weights' header, in `config.json` beside them or below the model id, published, or inferred from the
    weights' shapes. Raises StateError naming all of these if none tells it.
    """
    shapes = Weights.of(files).shapes if files is not None else {}
    for content in _contents(component, files, model_id):
        own = _own_content(component, content, files, shapes)
        if own is not None:
            return own
    if model_id in component.published:
        return component.published[model_id]
    inferred = component.infer(shapes) if shapes and component.infer else None
    if inferred is not None:
        return inferred
    place = str(files.folder / "config.json") if files else component.name
    raise StateError(place, f"no configuration of {component.name}: no config.json of it, the shapes do not tell it, "
                     f"and model id {model_id or '(none)'} is not known", "put config.json beside the weights",
                     f"known ids: {', '.join(component.published) or 'none'}")  # fmt: skip


def _contents(component: Component, files: Files | None, model_id: str) -> Iterator[Mapping[str, Any]]:
    """What may be the configuration, most trusted first: the header's, that beside the weights, the model id's."""
    written = _header_config(files) if files is not None else None
    if written is not None:
        yield written
    folders = [files.folder] if files is not None else []
    folders += [model_base() / model_id / folder for folder in component.folders] if model_id else []
    for folder in folders:
        if (folder / "config.json").is_file():
            yield _read_json(folder / "config.json")


def _own_content(
    component: Component, content: Mapping[str, Any], files: Files | None, shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, Any] | None:
    """A configuration in the network's terms, whatever its publisher's; None if it is not this component's."""
    layouts = component.layouts if files is None or files.layout is None else (files.layout,)
    for layout in layouts:
        own = layout.configuration(content, shapes) if layout.configuration else None
        if own is not None and component.takes(own):
            return own
    as_is = files is None or (files.layout is None and not files.prefix)
    return content if as_is and component.takes(content) else None


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content: Mapping[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StateError(str(path), f"cannot be read: {error}") from error
    return content


def _header_config(files: Files) -> Mapping[str, Any] | None:
    """The configuration in a header; None if there is none, or another program's text of that name."""
    try:
        content = json.loads(header(files.paths[0]).get("config", ""))
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


@dataclass(frozen=True)
class Found:
    """What was found for a run, before any weight is read: files, and configurations of what is needed."""

    files: Mapping[str, Files]
    contents: Mapping[str, Mapping[str, Any]]


def find(
    record: ModelRecord,
    configs: Sequence[ModelConfig],
    components: Iterable[str],
    bare: Iterable[str] = (),
    among: Collection[str] | None = None,
) -> Found:
    """Find the files of `components`, and configurations of these and `bare`; raises StateError for what is missing.

    among: the components that the variant has: no file is taken for a twin of one of these that the variant lacks.
    """
    known: Sequence[Component] = record.load("components")
    by_name = {component.name: component for component in known}
    wanted = tuple(components)
    own = [component for component in known if among is None or component.name in among]
    files = assign(configs, [c for c in known if c in own or not any(map(c.is_twin, own))], wanted)
    model_id = next((config.model_id for config in configs if config.model_id), "")
    roots = [root for found in files.values() for root in (found.folder.parent, found.folder)]
    for name in wanted:
        if name not in files:
            files[name] = _beside(by_name[name], roots, model_id, record)
    contents = {
        name: configuration(by_name[name], files.get(name), files[name].model_id if name in files else model_id)
        for name in (*wanted, *bare)
        if not by_name[name].is_folder
    }
    for config in configs:
        if config.entries and config.component in contents:
            contents[config.component] = {**contents[config.component], **config.entries}
    return Found({name: files[name] for name in wanted}, contents)


def named_folder(config: ModelConfig, record: ModelRecord) -> str:
    """The component whose folder holds these files, by its name alone: '' if it is no component's folder."""
    path = config.path if isinstance(config.path, str) else (config.path or ("",))[0]
    parent = Path(path).parent.name if path else (config.origin_file_pattern or "").partition("/")[0]
    known: Sequence[Component] = record.load("components")
    return next((component.name for component in known if parent in component.folders), "")


def denoiser_configuration(record: ModelRecord, configs: Sequence[ModelConfig]) -> Mapping[str, Any]:
    """The content of the configuration of the component that is trained by default, or else of a twin of it.

    Raises what `find` raises for the former if neither is found.
    """
    known: Sequence[Component] = record.load("components")
    (default,) = (component for component in known if component.name == record.default_trainable)
    errors: list[StateError] = []
    for part in (default, *filter(default.is_twin, known)):
        try:
            return find(record, configs, (part.name,)).contents[part.name]
        except StateError as error:
            errors.append(error)
    raise errors[0]


def _beside(component: Component, roots: Iterable[Path], model_id: str, record: ModelRecord) -> Files:
    """A folder that no flag named: beside the other files, else below their model id or the family's default."""
    if component.is_folder:
        default = record.default_ids.get(component.name, ":").partition(":")
        bases = [*roots, *([model_base() / model_id] if model_id else [])]
        places = [base / folder for base in bases for folder in component.folders]
        places += [model_base() / default[0] / default[2]] if default[0] else []
        for place in places:
            if place.is_dir():
                return Files((place,), model_id)
        raise StateError(component.name, f"not found in {', '.join(dict.fromkeys(map(str, places)))}",
                         f"give --{component.name}_path FOLDER")  # fmt: skip
    raise StateError(component.name, "no model files for it on the command line",
                     "add them to --model_paths or --model_id_with_origin_paths, or use --toy")  # fmt: skip


def _existing(path: Path) -> Path:
    if not path.exists():
        raise StateError(str(path), "does not exist")
    return path
