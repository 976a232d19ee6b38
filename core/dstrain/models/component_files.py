"""Find the files and the configuration of each component among the given model files."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from dstrain.config.fields import parse_model_paths, parse_origins
from dstrain.config.options import Hub, ModelChoice
from dstrain.errors import MissingFiles, StateError, UsageError
from dstrain.models.components import Component, Files, components_of
from dstrain.models.configs import ConfigQuery, find_config
from dstrain.models.formats import Config
from dstrain.models.hub import ModelSource, fetch, model_base
from dstrain.models.weights import header, recognize
from dstrain.registry.family import ModelFamily
from dstrain.storage.hashing import Digests, hash_json


@dataclass(frozen=True)
class ModelConfig:
    """Model files: local paths, or a pattern of file names of a published model."""

    path: str | Sequence[str] | None = None
    """A file, or all shards of one component."""
    model_id: str | None = None
    origin_file_pattern: str | None = None
    component: str = ""
    """The component they are, if a flag says so; else the names in the files tell."""
    entries: Config = field(default_factory=dict)
    """Without files: entries that replace those of the component's configuration."""
    revision: str = ""
    """A branch, tag or commit of the published model; '' for the hub's default."""
    hub: Hub | None = "modelscope"
    """The hub to fetch missing files from; None forbids fetching."""

    @property
    def source(self) -> ModelSource | None:
        """Return the published model, if the files are those of one."""
        if not self.model_id:
            return None
        return ModelSource(self.model_id, self.revision, self.hub)

    @property
    def pattern(self) -> str:
        """Return the pattern of file names; by default all files in no folder."""
        return self.origin_file_pattern or "*"

    def files(self) -> Files:
        """Find the files on this machine.

        Raises StateError naming the place where they should be.
        """
        return replace(self, hub=None).fetch()

    def fetch(self) -> Files:
        """Find the files, fetching those of a published model that are missing.

        Raises what `files` and the hub raise.
        """
        source = self.source
        if source is None:
            paths = [self.path] if isinstance(self.path, str) else self.path or ()
            for path in paths:
                if not Path(path).exists():
                    raise MissingFiles(path, "does not exist")
            return Files(tuple(map(Path, paths)))
        names = fetch(source, self.pattern)
        if self.pattern.endswith("/"):
            names = [self.pattern]
        return Files(tuple(source.folder / name for name in names), source.model_id)


def model_configs(
    config: ModelChoice,
    family: ModelFamily,
    offline: bool = False,
) -> tuple[ModelConfig, ...]:
    """Return the model files of a command line: --model_paths,
    --model_id_with_origin_paths, and the family's path flags and switches.

    With `offline`, no hub is asked for missing files.
    """
    hub = None if offline else config.hub
    found = [
        ModelConfig(paths, hub=hub) for paths in parse_model_paths(config.model_paths)
    ]
    for name, pattern, revision in parse_origins(config.model_id_with_origin_paths):
        found.append(ModelConfig(None, name, pattern, revision=revision, hub=hub))
    for option in family.options:
        value = config.family_options.get(option.name)
        if value and option.field:
            entries = {option.field: True}
            found.append(ModelConfig(component=option.component, entries=entries))
        elif value and option.component:
            found.append(ModelConfig(value, component=option.component, hub=hub))
    return tuple(found)


def find_folder(
    component: Component,
    roots: Iterable[Path],
    source: ModelConfig | None,
    default: str,
    hub: Hub | None,
) -> Files:
    """Find the folder of a tokenizer or processor; ask a hub only if none is here.

    Raises StateError, which names the flag that gives a folder, if there is none, and
    SystemFault if a hub fails.

    Args:
        component: The component to find.
        roots: Folders that may hold its folder; searched first.
        source: The published model that its weights are from; searched second.
        default: The family's own choice, "ID:FOLDER/" or ''; searched last.
        hub: The hub to fetch the default from.
    """
    published: list[ModelConfig] = []
    if source is not None:
        for folder in component.folders:
            published.append(replace(source, origin_file_pattern=f"{folder}/"))
    if default:
        model_id, _, pattern = default.partition(":")
        published.append(ModelConfig(None, model_id, pattern, hub=hub))
    published_places = [
        model_base() / f"{one.model_id}/{one.pattern}" for one in published
    ]
    local = [root / folder for root in roots for folder in component.folders]
    for place in local:
        # A published folder may be fetched in part only; its record is asked below.
        if place.is_dir() and place not in published_places:
            return Files((place,))
    for get in (ModelConfig.files, ModelConfig.fetch):
        for one in published:
            with suppress(StateError):
                return get(one)
    places = ", ".join(dict.fromkeys(map(str, [*local, *published_places])))
    raise MissingFiles(
        component.name, f"not found in {places}", f"give --{component.name}_path FOLDER"
    )


def assign(
    configs: Iterable[ModelConfig],
    components: Sequence[Component],
    wanted: Collection[str],
    absent: list[MissingFiles] | None = None,
) -> dict[str, Files]:
    """Find which component each set of files is, from the names in the files.

    One set may hold several components. Files of a published model in the folder of a
    component that is not wanted are not fetched; those whose folder tells nothing are
    fetched one after the other until every wanted component is found. A missing file
    is an error only if a wanted component remains unfound; with `absent`, the error is
    added there instead.
    """
    assigned = _Assignment(components, wanted)
    missing: list[MissingFiles] = []
    unplaced: list[ModelConfig] = []
    for config in configs:
        place = component_at(config, components) if config.model_id else ""
        if config.entries or (place and place not in assigned.wanted):
            continue
        try:
            files = config.fetch() if place else config.files()
        except MissingFiles as error:
            if config.model_id and not place:
                unplaced.append(config)
            else:
                missing.append(error)
            continue
        assigned.add(config, files)
    for config in unplaced:
        if not assigned.is_complete:
            try:
                files = config.fetch()
            except MissingFiles as error:
                if absent is None:
                    raise
                missing.append(error)
                continue
            assigned.add(config, files)
    assigned.settle_ambiguous()
    if missing and not assigned.is_complete:
        if absent is None:
            raise missing[0]
        absent.extend(missing)
    return assigned.found


@dataclass
class _Assignment:
    """The files found so far."""

    components: Sequence[Component]
    wanted: Collection[str]
    found: dict[str, Files] = field(default_factory=dict)
    """Component -> its files."""
    ambiguous: dict[Files, tuple[Component, ...]] = field(default_factory=dict)
    """Files -> the components with the same keys that they may be."""

    @property
    def is_complete(self) -> bool:
        """Return whether files are found for all wanted components with weights."""
        seen = {one.name for group in self.ambiguous.values() for one in group}
        seen.update(self.found)
        return all(
            component.is_folder or component.name in seen
            for component in self.components
            if component.name in self.wanted
        )

    def add(self, config: ModelConfig, files: Files) -> None:
        """Assign the parts of a set of files.

        Raises what `_parts` raises, and UsageError for a second set of a component.
        """
        for fitting, part in _parts(config, files, self.components):
            name = _owner(fitting, part)
            if name:
                self._settle(name, part)
            else:
                self.ambiguous[part] = fitting

    def settle_ambiguous(self) -> None:
        """Assign files that may be of several components with the same keys, in order.

        A single set of files is that of the wanted component.
        """
        single = len(self.ambiguous) == 1
        for part, candidates in self.ambiguous.items():
            names = [one.name for one in candidates]
            free = [name for name in names if name not in self.found]
            if single:
                free.sort(key=lambda name: name not in self.wanted)
            self._settle(free[0] if free else names[0], part)
        self.ambiguous = {}

    def _settle(self, name: str, files: Files) -> None:
        other = self.found.setdefault(name, files)
        if other != files:
            both = f"{other.paths[0]} and {files.paths[0]}"
            raise UsageError("model files", f"two sets of files match {name}: {both}")


def _owner(fitting: Sequence[Component], files: Files) -> str:
    """Return the component that the files are; of several, the one that wrote them, by
    their header, or whose folder they are in; '' if neither tells.
    """
    if len(fitting) == 1:
        return fitting[0].name
    written_for = header(files.paths[0]).get("component")
    names = [candidate.name for candidate in fitting]
    if written_for in names:
        return written_for
    inside = [
        candidate.name for candidate in fitting if candidate.is_in_folder(files.folder)
    ]
    return inside[0] if inside else ""


def saved_weights(
    family: ModelFamily,
    component: str,
    path: Path,
) -> Files:
    """Return a file with weights of one component, with the format of its keys; raises
    StateError if it is of something else.
    """
    ((_, files),) = recognize(Files((path,)), [components_of(family)[component]])
    return files


def _parts(
    config: ModelConfig,
    files: Files,
    components: Sequence[Component],
) -> list[tuple[tuple[Component, ...], Files]]:
    """Return the components in a set of files, those with the same keys together.

    Raises what `recognize` raises, and UsageError for a folder of no component.
    """
    known = [c for c in components if config.component in ("", c.name)]
    path = files.paths[0]
    if not path.is_dir():
        return recognize(files, known)
    folders: list[str] = []
    for component in known:
        if component.is_folder:
            if config.component or component.is_in_folder(path):
                return [((component,), files)]
            folders += component.folders
    raise UsageError(path, f"is a folder; folders of this family: {', '.join(folders)}")


def component_at(config: ModelConfig, components: Sequence[Component]) -> str:
    """Return the component that the files are published as, by their place alone; '' if
    that does not tell.
    """
    path = config.path or ""
    first = Path(path if isinstance(path, str) else path[0])
    for component in components:
        if config.model_id is not None:
            fits = component.is_published_as(config.pattern)
        else:
            fits = component.is_in_folder(first) or component.is_in_folder(first.parent)
        if fits:
            return component.name
    return ""


@dataclass(frozen=True)
class Found:
    """The files and configurations of a run, found before any weight is read."""

    files: Mapping[str, Files]
    configs: Mapping[str, Config]


def find(
    family: ModelFamily,
    configs: Sequence[ModelConfig],
    components: Iterable[str],
    config_only: Iterable[str] = (),
    among: Collection[str] = (),
    absent: list[MissingFiles] | None = None,
) -> Found:
    """Find the files and the configurations of components.

    Raises StateError for what is missing.

    Args:
        family: The family of the components.
        configs: The given model files.
        components: The components whose files are needed.
        config_only: The components of which the configuration alone is needed.
        among: The components of the variant; another component with the same keys as
            one of these gets no file.
        absent: If given, missing files are added here and are no error.
    """
    by_name = components_of(family)
    known = list(by_name.values())
    wanted = tuple(components)
    files = assign(configs, _usable(known, among), wanted, absent)
    published = [config for config in configs if config.model_id]
    roots: list[Path] = []
    for part in files.values():
        roots += [part.folder.parent, part.folder]
    for name in wanted:
        if name in files:
            continue
        if not by_name[name].is_folder:
            if absent:
                continue  # they may be its files
            raise StateError(
                name,
                "no model files for it on the command line",
                "add them to --model_paths or --model_id_with_origin_paths, or use --toy",
            )
        source = published[0] if published else None
        hub = configs[0].hub if configs else None
        default = family.default_ids.get(name, "")
        try:
            files[name] = find_folder(by_name[name], roots, source, default, hub)
        except MissingFiles as error:
            if absent is None:
                raise
            absent.append(error)
    found_configs = {}
    for name in (*wanted, *config_only):
        if by_name[name].is_folder:
            continue
        try:
            found_configs[name] = _config(
                by_name[name], files.get(name), configs, known
            )
        except StateError:
            # Absent files may have it.
            if not absent or name in files:
                raise
    here = {name: files[name] for name in wanted if name in files}
    return Found(here, found_configs)


def find_given(
    family: ModelFamily,
    configs: Sequence[ModelConfig],
    components: Collection[str],
    among: Collection[str],
) -> Found:
    """Find what the given model files say of components that a run does not load; those
    that are not on this machine are passed over.

    Args:
        family: The family of the components.
        configs: The given model files.
        components: The components to find.
        among: As in `find`.
    """
    by_name = components_of(family)
    known = list(by_name.values())
    local = [replace(config, hub=None) for config in configs]
    assigned = _Assignment(_usable(known, among), components)
    with suppress(StateError, UsageError):
        for config in local:
            place = component_at(config, known)
            if not config.entries and (not place or place in components):
                with suppress(StateError):
                    assigned.add(config, config.files())
        assigned.settle_ambiguous()
    files = {
        name: assigned.found[name] for name in components if name in assigned.found
    }
    found_configs = {}
    for name, found in files.items():
        if not by_name[name].is_folder:
            with suppress(StateError):
                found_configs[name] = _config(by_name[name], found, local, known)
    return Found(files, found_configs)


def _usable(known: Sequence[Component], among: Collection[str]) -> list[Component]:
    """Return the components of a variant, and others whose keys none of these has."""
    own = [component for component in known if component.name in among]
    return [c for c in known if c in own or not any(map(c.same_keys_as, own))]


def named_models(family: ModelFamily, configs: Iterable[ModelConfig]) -> dict[str, str]:
    """Return the published model that the files of each component are named by, with its
    revision, for those whose place in the model tells what they are.
    """
    known = list(components_of(family).values())
    models = {}
    for config in configs:
        place = component_at(config, known)
        if place and config.source is not None:
            models[place] = config.source.named
    return models


def _config(
    component: Component,
    files: Files | None,
    configs: Sequence[ModelConfig],
    known: Sequence[Component],
) -> Config:
    """Find the configuration of a component, with the entries that flags replace."""
    published = [config for config in configs if config.model_id]
    content = dict(find_config(_config_query(component, files, published, known)))
    for config in configs:
        if config.component == component.name:
            content.update(config.entries)
    return content


def _config_query(
    component: Component,
    files: Files | None,
    published: Sequence[ModelConfig],
    known: Sequence[Component],
) -> ConfigQuery:
    """Return where the configuration of a component may be: for local files, only
    beside them.
    """

    def is_other(config: ModelConfig) -> bool:
        return component_at(config, known) != component.name

    models = sorted(published, key=is_other)
    if files is not None:
        models = [config for config in models if config.model_id == files.model_id]
    if not models:
        return ConfigQuery(component, files)
    first = models[0]
    if files is None and is_other(first):
        return ConfigQuery(component, None, first.source)
    folder = first.pattern.rpartition("/")[0]
    return ConfigQuery(component, files, first.source, folder)


def denoiser_config(family: ModelFamily, configs: Sequence[ModelConfig]) -> Config:
    """Return the configuration of the component that is trained by default, or of a
    component with the same keys.

    Raises what `find` raises for the former if neither is found.
    """
    by_name = components_of(family)
    default = by_name[family.default_trainable]
    offline = [replace(config, hub=None) for config in configs]
    errors: list[StateError] = []
    for candidate in (default, *filter(default.same_keys_as, by_name.values())):
        # The weights of this machine tell more; without them config.json is fetched.
        name = candidate.name
        for places, files, only in ((offline, [name], []), (configs, [], [name])):
            try:
                return find(family, places, files, only).configs[name]
            except StateError as error:
                errors.append(error)
    raise errors[0]


def component_digests(found: Found, digests: Digests) -> dict[str, str]:
    """Return the digest of each component as units use it, and of each configuration;
    they are part of every cache key.
    """
    digest: dict[str, str] = {}
    for name, files in found.files.items():
        parts = [digests.of_all(files.paths), found.configs.get(name, {})]
        if files.preset is not None:
            parts.append(digests.of(files.preset))
        digest[name] = hash_json("component", parts)
    for name, config in found.configs.items():
        digest[f"{name}_config"] = hash_json("config", config)
    return digest
