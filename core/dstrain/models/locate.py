"""Find the files of each component among the model files given."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dstrain.config.fields import parse_model_paths, parse_origins
from dstrain.config.schema import Hub, ModelChoice, TrainConfig
from dstrain.errors import StateError, SystemFault, UsageError
from dstrain.models.components import Component, Files
from dstrain.models.configs import Sought, find_configuration
from dstrain.models.hub import Origin, fetch, find_here, not_here
from dstrain.models.weights import header, recognise
from dstrain.registry.family import ModelFamily
from dstrain.storage.hashing import Digests, hashed


def find_folder(
    component: Component,
    roots: Iterable[Path],
    origin: Origin | None,
    default: str,
    hub: Hub | None,
) -> Files:
    """Find the folder of a component: below one of the roots, else in the model, else
    where the family says.

    default: "ID:FOLDER/", or ''. hub: where that one is fetched from. Neither is asked
    of a hub if a folder is here. Raises StateError if there is none, SystemFault if a
    hub fails; both name the flag that gives a folder.
    """
    places = [root / folder for root in roots for folder in component.folders]
    model_id, _, published = default.partition(":")
    sources = (
        [(origin, f"{folder}/") for folder in component.folders]
        if origin is not None
        else []
    )
    sources += [(Origin(model_id, hub=hub), published)] if model_id else []
    for place in places:
        if place.is_dir() and not any(
            place == source.folder / folder for source, folder in sources
        ):
            return Files((place,), origin.model_id if origin is not None else "")
    advice = f"give --{component.name}_path FOLDER"
    for get in (find_here, fetch):
        for source, folder in sources:
            try:
                if get(source, folder):
                    return Files((source.folder / folder,), source.model_id)
            except StateError:
                continue
            except SystemFault as fault:
                raise SystemFault(
                    fault.where, fault.what, *fault.help_lines, advice
                ) from fault
    places += [source.folder / folder for source, folder in sources]
    raise StateError(
        component.name,
        f"not found in {', '.join(dict.fromkeys(map(str, places)))}",
        advice,
    )


@dataclass(frozen=True)
class ModelConfig:
    """Files of one component: `path` (one, or several shards), or a `model_id` with a
    pattern of its file names.

    component: which one they are, where a flag says so; otherwise their own names tell.
    entries: without files: what replaces entries of the component's configuration.
    revision: of a model id: a branch, tag or commit; '' for the hub's usual one. hub:
    where files of a model id that are not here are fetched from; None if they are not
    fetched.
    """

    path: str | Sequence[str] | None = None
    model_id: str | None = None
    origin_file_pattern: str | None = None
    component: str = ""
    entries: Mapping[str, Any] = field(default_factory=dict)
    revision: str = ""
    hub: Hub | None = "modelscope"

    @property
    def origin(self) -> Origin | None:
        """The published model they are of, if they are of one."""
        return Origin(self.model_id, self.revision, self.hub) if self.model_id else None

    @property
    def pattern(self) -> str:
        """The pattern of a model id's files: by default all those that lie in no
        folder.
        """
        return self.origin_file_pattern or "*"

    def files(self) -> Files:
        """Find the files here; raises StateError naming the place where they were
        looked for.
        """
        origin = self.origin
        if origin is None:
            names = [self.path] if isinstance(self.path, str) else list(self.path or ())
            return Files(tuple(_existing(Path(name)) for name in names))
        found = find_here(origin, self.pattern)
        if not found:
            raise not_here(origin, self.pattern)
        return self._files(origin, found)

    def fetch(self) -> Files:
        """Find the files, and fetch those of a model id that are not here; raises what
        `files` and a hub raise.
        """
        origin = self.origin
        return (
            self.files()
            if origin is None
            else self._files(origin, fetch(origin, self.pattern))
        )

    def _files(self, origin: Origin, found: Sequence[str]) -> Files:
        names = [self.pattern] if self.pattern.endswith("/") else found
        return Files(tuple(origin.folder / name for name in names), origin.model_id)


def model_configs(config: ModelChoice, family: ModelFamily) -> tuple[ModelConfig, ...]:
    """The model files of a command line: --model_paths, --model_id_with_origin_paths
    and the family's path flags.
    """
    # Planning alone needs no hub.
    hub = None if isinstance(config, TrainConfig) and config.dry_run else config.hub
    paths = [
        ModelConfig(path=group, hub=hub)
        for group in parse_model_paths(config.model_paths)
    ]
    published = [
        ModelConfig(
            None, files.model_id, files.pattern, revision=files.revision, hub=hub
        )
        for files in parse_origins(config.model_id_with_origin_paths)
    ]
    own = [
        ModelConfig(
            path=config.family_options[option.name], component=option.component, hub=hub
        )
        for option in family.options
        if option.component
        and not option.field
        and config.family_options.get(option.name)
    ]
    return (*paths, *published, *own, *changed_entries(config, family))


def changed_entries(
    config: ModelChoice, family: ModelFamily
) -> tuple[ModelConfig, ...]:
    """The entries of configurations that the family's bare flags set."""
    given = (
        option
        for option in family.options
        if option.field and config.family_options.get(option.name)
    )
    return tuple(
        ModelConfig(component=option.component, entries={option.field: True})
        for option in given
    )


def assign(
    configs: Iterable[ModelConfig],
    components: Sequence[Component],
    wanted: Iterable[str],
) -> dict[str, Files]:
    """Find which component each set of files is, from the names in the files; one set
    may hold several.

    Twins are told apart as `_told` does; else by their order, but if only one set of
    files is left, it is the wanted one. Files of a model id whose place is that of a
    component nobody wants are not even looked for; those whose place tells nothing are
    fetched, one after the other, while a wanted component is unfound. Files that do not
    exist are an error only if a wanted component remains unfound.
    """
    table = _Table(components, frozenset(wanted))
    missing: list[StateError] = []
    unplaced: list[ModelConfig] = []
    for config in configs:
        place = place_of(config, components) if config.model_id else ""
        if config.entries or place not in {"", *table.wanted}:
            continue
        try:
            files = config.fetch() if place else config.files()
        except StateError as error:
            if config.model_id and not place:
                unplaced.append(config)
            else:
                missing.append(error)
            continue
        table.take(config, files)
    for config in unplaced:
        if table.absent:
            try:
                files = config.fetch()
            except StateError as error:
                missing.append(error)
                continue
            table.take(config, files)
    table.settle_twins()
    if table.absent and missing:
        raise missing[0]
    return table.found


@dataclass
class _Table:
    """What is found while files are assigned: component -> files, and files that twins
    could be.
    """

    components: Sequence[Component]
    wanted: frozenset[str]
    found: dict[str, Files] = field(default_factory=dict)
    alike: dict[Files, tuple[Component, ...]] = field(default_factory=dict)

    @property
    def absent(self) -> list[str]:
        """The wanted components with weights of which nothing is found yet."""
        seen = {
            *self.found,
            *(
                component.name
                for fitting in self.alike.values()
                for component in fitting
            ),
        }
        return [
            c.name
            for c in self.components
            if c.name in self.wanted - seen and not c.is_folder
        ]

    def take(self, config: ModelConfig, files: Files) -> None:
        """Assign the parts of a set of files; raises what `_parts` raises, and
        UsageError for a second set of one.
        """
        for fitting, part in _parts(config, files, self.components):
            name = fitting[0].name if len(fitting) == 1 else _told(fitting, part)
            if name:
                _settle(self.found, name, part)
            else:
                self.alike[part] = fitting

    def settle_twins(self) -> None:
        """Give files that several twins could be to these, in order."""
        for part, fitting in self.alike.items():
            free = [c.name for c in fitting if c.name not in self.found]
            first = (
                [name for name in free if name in self.wanted]
                if len(self.alike) == 1
                else []
            )
            _settle(self.found, (*first, *free, fitting[0].name)[0], part)
        self.alike = {}


def _told(twins: Sequence[Component], files: Files) -> str:
    """Which of twins these files are: their header names it, if training wrote them,
    else their folder; or ''.
    """
    by_header = [
        c.name for c in twins if c.name == header(files.paths[0]).get("component")
    ]
    by_folder = [c.name for c in twins if c.is_in_folder(files.folder)]
    return (*by_header, *by_folder, "")[0]


def _settle(found: dict[str, Files], name: str, files: Files) -> None:
    if found.setdefault(name, files) != files:
        both = f"{found[name].paths[0]} and {files.paths[0]}"
        raise UsageError("model files", f"two sets of files are {name}: {both}")


def _parts(
    config: ModelConfig, files: Files, components: Sequence[Component]
) -> list[tuple[tuple[Component, ...], Files]]:
    """The components in a set of files, twins together; a folder is told by its own
    name, or a flag says which it is.

    Raises what `recognise` raises, and UsageError for a folder that is no component's.
    """
    known = [c for c in components if config.component in ("", c.name)]
    folders = [c for c in known if c.is_folder]
    if files.paths[0].is_dir():
        fitting = (
            folders
            if config.component
            else [c for c in folders if c.is_in_folder(files.paths[0])]
        )
        if not fitting:
            names = ", ".join(
                folder for component in folders for folder in component.folders
            )
            raise UsageError(
                str(files.paths[0]), f"is a folder; folders of this family: {names}"
            )
        return [((fitting[0],), files)]
    return recognise(files, known)


def place_of(config: ModelConfig, components: Sequence[Component]) -> str:
    """The component in whose place in published layouts the files are, by their names
    alone; '' if in none.
    """
    if config.model_id is not None:
        return next(
            (c.name for c in components if c.is_published_as(config.pattern)), ""
        )
    first = Path(
        config.path if isinstance(config.path, str) else (config.path or ("",))[0]
    )
    return next(
        (
            c.name
            for c in components
            if c.is_in_folder(first) or c.is_in_folder(first.parent)
        ),
        "",
    )


@dataclass(frozen=True)
class Found:
    """What was found for a run, before any weight is read: files, and configurations of
    what is needed.
    """

    files: Mapping[str, Files]
    contents: Mapping[str, Mapping[str, Any]]


def find(
    family: ModelFamily,
    configs: Sequence[ModelConfig],
    components: Iterable[str],
    bare: Iterable[str] = (),
    among: Collection[str] | None = None,
) -> Found:
    """Find the files of `components`, and configurations of these and `bare`; raises
    StateError for what is missing.

    among: the components that the variant has: no file is taken for a twin of one of
    these that the variant lacks.
    """
    known: Sequence[Component] = family.load("components")
    by_name = {component.name: component for component in known}
    wanted = tuple(components)
    own = [component for component in known if among is None or component.name in among]
    files = assign(
        configs,
        [c for c in known if c in own or not any(map(c.same_keys_as, own))],
        wanted,
    )
    published = [config for config in configs if config.origin is not None]
    roots = [
        root for found in files.values() for root in (found.folder.parent, found.folder)
    ]
    for name in wanted:
        if name not in files:
            if not by_name[name].is_folder:
                raise StateError(
                    name,
                    "no model files for it on the command line",
                    "add them to --model_paths or --model_id_with_origin_paths, or use --toy",
                )
            origin = published[0].origin if published else None
            hub = configs[0].hub if configs else None
            files[name] = find_folder(
                by_name[name], roots, origin, family.default_ids.get(name, ""), hub
            )
    contents = {
        name: find_configuration(
            _sought(by_name[name], files.get(name), published, known)
        )
        for name in (*wanted, *bare)
        if not by_name[name].is_folder
    }
    for config in configs:
        if config.entries and config.component in contents:
            contents[config.component] = {
                **contents[config.component],
                **config.entries,
            }
    return Found({name: files[name] for name in wanted}, contents)


def _sought(
    component: Component,
    files: Files | None,
    published: Sequence[ModelConfig],
    known: Sequence[Component],
) -> Sought:
    """Where the configuration of a component may be: of local files, nowhere but beside
    them.
    """
    own = [config for config in published if place_of(config, known) == component.name]
    if files is not None:
        own = [
            config for config in (*own, *published) if config.model_id == files.model_id
        ]
    config = next(iter(own if files is not None else (*own, *published)), None)
    place = (
        config.pattern.rpartition("/")[0]
        if config is not None and config in own
        else None
    )
    return Sought(
        component, files, config.origin if config is not None else None, place
    )


def denoiser_configuration(
    family: ModelFamily, configs: Sequence[ModelConfig]
) -> Mapping[str, Any]:
    """The content of the configuration of the component that is trained by default, or
    else of a twin of it.

    Raises what `find` raises for the former if neither is found.
    """
    known: Sequence[Component] = family.load("components")
    (default,) = (
        component for component in known if component.name == family.default_trainable
    )
    here = [replace(config, hub=None) for config in configs]
    errors: list[StateError] = []
    for part in (default, *filter(default.same_keys_as, known)):
        for parts, bare, places in (
            ((part.name,), (), here),
            ((), (part.name,), configs),
        ):
            try:
                return find(family, places, parts, bare).contents[part.name]
            except StateError as error:
                errors.append(error)
    raise errors[0]


def _existing(path: Path) -> Path:
    if not path.exists():
        raise StateError(str(path), "does not exist")
    return path


def component_digests(found: Found, digests: Digests) -> dict[str, str]:
    """The digest of each component as units use it, and of each configuration: part of
    every key.
    """
    whole = {
        name: hashed(
            "component",
            [digests.of_all(files.paths), dict(found.contents.get(name, {})), *preset],
        )
        for name, files in found.files.items()
        for preset in ([digests.of(files.preset)] if files.preset else [],)
    }
    return whole | {
        f"{name}_config": hashed("config", dict(content))
        for name, content in found.contents.items()
    }
